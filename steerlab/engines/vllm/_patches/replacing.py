"""Replaces a function of a vLLM module, once, also where other modules have imported it by name."""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

_MARK = "_steerlab_installed"


def replace_function(
    source: str, name: str, importers: Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Puts `wrap(original)` in the place of a module's function; a second call changes nothing.

    Args:
        source: the module that defines it.
        name: of the function.
        importers: modules that hold it under the same name. One that is imported later takes it from the source.
        wrap: makes the replacement.
    """
    module = importlib.import_module(source)
    original = getattr(module, name)
    if getattr(original, _MARK, False):
        return
    replacement = functools.wraps(original)(wrap(original))
    setattr(replacement, _MARK, True)
    setattr(module, name, replacement)
    for importer in importers:
        if importer in sys.modules and getattr(sys.modules[importer], name, None) is original:
            setattr(sys.modules[importer], name, replacement)
