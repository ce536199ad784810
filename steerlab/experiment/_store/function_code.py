"""The code of a function, as text and as what it compiles to."""

import functools
import inspect
from types import CodeType


@functools.lru_cache(maxsize=512)
def source_text(code: CodeType) -> str:
    """The source; empty where none can be read."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def bytecode(code: CodeType) -> bytes:
    """What the code does, without the lines that it stands on; the same in every process of one version of Python."""
    constants = [bytecode(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    return b"\0".join([code.co_code, repr(code.co_names).encode(), *constants])


def _constant(value: object) -> bytes:
    """A constant as bytes; members of a frozenset sorted, because their order differs between processes."""
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode()
