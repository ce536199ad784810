"""Errors as they travel: by the name of their class, which is one of ours, and their sentence."""

from typing import Any

from steerlab.core import errors
from steerlab.core.errors import EngineError, InputError, SteerlabError

TOO_LARGE, GONE = 413, 503
"""HTTP's codes for a body beyond the limit, and for a server that cannot answer now but may later."""


def failure_json(error: BaseException) -> dict[str, Any]:
    """An error as a message carries it."""
    return {"kind": type(error).__name__, "message": str(error)}


def status_of(error: SteerlabError) -> int:
    """HTTP's code for an error of ours: what was asked is at fault, or the server, for now or in itself."""
    if isinstance(error, InputError):
        return 400
    return GONE if isinstance(error, EngineError) else 500


def failure_of(found: Any) -> SteerlabError:
    """The error that a message carried; one that is none of ours is an EngineError."""
    kind, message = str(found.get("kind")), str(found.get("message"))
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, SteerlabError):
        return known(message)
    return EngineError(f"The server failed: {message}")
