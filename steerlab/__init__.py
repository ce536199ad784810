"""Steer language models through their residual stream, and measure exactly what changed.

The public names are those of `__init__.pyi`, which type checkers and editors read too. Importing this package is cheap:
a name loads its module the first time it is used, so torch, transformers and the plotting libraries stay out of a
process until something needs them.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

from steerlab._moved import MovedModules

sys.meta_path.append(MovedModules())

_MODULES = {
    alias.name: node.module or ""
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> the module that holds it, or the package whose module it is."""

# `from steerlab import *` must not hide Python's own `set`.
__all__ = sorted({*_MODULES, "__version__"} - {"set"})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Loads a public name on its first use."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("steerlab")
    elif name in _MODULES:
        holder = importlib.import_module(_MODULES[name])
        own = None if _MODULES[name] == __name__ else getattr(holder, name, None)  # this package would ask itself again
        value = own or importlib.import_module(f"{_MODULES[name]}.{name}")
    else:
        raise AttributeError(f"module 'steerlab' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__, *_MODULES})
