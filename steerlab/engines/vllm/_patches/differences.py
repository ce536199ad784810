"""How a vLLM differs from what this package touches of it."""

import ast
from collections.abc import Callable

from steerlab.engines.vllm._patches.touched import SUPPORTED, TOUCHED, Touched, minor

Read = Callable[[str], str | None]
"""What is at a place, as `Source` reads it."""


def differences(read: Read, version: str) -> list[str]:
    """What is otherwise than it must be, a sentence for each name; none if the version fits.

    Args:
        read: what is at a place.
        version: of this vLLM; one that is not supported is compared with the newest that is.
    """
    wanted = minor(version) if minor(version) in SUPPORTED else SUPPORTED[-1]
    return [line for touched in TOUCHED if wanted in touched.versions for line in _difference(touched, read)]


def _difference(touched: Touched, read: Read) -> list[str]:
    found = read(touched.place)
    if found is None:
        return [f"{touched.place} is not there; it must be {_shown(touched.shape)}."]
    return [] if fits(found, touched.shape) else [f"{touched.place} is {found}; it must be {_shown(touched.shape)}."]


def _shown(shape: str) -> str:
    return f"callable as {shape}" if shape.startswith("(") else shape


def fits(found: str, shape: str) -> bool:
    """Whether what is there has a shape."""
    if not (found.startswith("(") and shape.startswith("(")):
        return shape in (found, found.partition(":")[0])
    names, wanted = parameters(found), shape[1:-1].split(", ") if shape != "()" else []
    if "..." not in wanted:
        return names == wanted
    at = wanted.index("...")
    return names[:at] == wanted[:at] and set(wanted[at + 1 :]) <= set(names[at:])


def parameters(written: str) -> list[str]:
    """The names in a list of parameters, `*args` and `**kwargs` with their stars."""
    made = ast.parse(f"def f{written}: ...").body[0]
    assert isinstance(made, ast.FunctionDef)
    given = made.args
    starred = ([f"*{given.vararg.arg}"] if given.vararg else [], [f"**{given.kwarg.arg}"] if given.kwarg else [])
    return [
        *(part.arg for part in (*given.posonlyargs, *given.args)),
        *starred[0],
        *(part.arg for part in given.kwonlyargs),
        *starred[1],
    ]
