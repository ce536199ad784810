"""Warnings that point at the user's line."""

import sys
import warnings

PACKAGE = __name__.partition(".")[0]


class SteerlabWarning(UserWarning):
    """What this package warns of; the command line shows these and no library's."""


def warn(message: str) -> None:
    """Gives a `SteerlabWarning` at the line that called this package, however deep inside it was noticed."""
    level = outermost = 1
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:  # a dataclass's own __init__ has no file
            outermost = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, SteerlabWarning, stacklevel=outermost + 1)
