"""Modules of one's own that a command imports before anything else, for what they register."""

import sys
from collections.abc import Sequence
from importlib import import_module

from steerlab.core.errors import InputError


def import_modules(names: Sequence[str]) -> None:
    """Imports modules: installed ones, or files in the current directory.

    Raises:
        InputError: for one that is not there, or fails.
    """
    if names and "" not in sys.path:
        sys.path.append("")  # as for `python -c`, but behind what is installed
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and name.split(".")[0] == (error.name or "").split(".")[0]:
                raise InputError(
                    f"--import {name}: there is no such module, neither installed nor in the current directory. It "
                    "takes a module's name, such as `my_operators` for my_operators.py."
                ) from error
            raise InputError(f"--import {name}: the module fails with {type(error).__name__}: {error}") from error
