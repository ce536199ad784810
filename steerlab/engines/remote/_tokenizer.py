"""The tokenizer of a model that is served: its files, fetched once and kept in the cache."""

import base64
import binascii
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steerlab.core._files import write_atomic
from steerlab.core.errors import EngineError, InputError
from steerlab.models._cache import cache_root

_NAME = re.compile(r"[A-Za-z0-9_]+\.(json|jinja|model|txt)")
_HASH = re.compile(r"[0-9a-f]{32}")


def remote_tokenizer(digest: str, fetch: Callable[[], Any]) -> Any:
    """The tokenizer with a hash; its files are fetched unless they are in the cache.

    No code comes with them, and none is run.

    Args:
        digest: as the server states it.
        fetch: gives the files, in base64.

    Raises:
        EngineError: for files that are not what the server said, or no tokenizer.
    """
    from transformers import AutoTokenizer

    if not _HASH.fullmatch(digest):
        raise InputError(f"The server states a hash of its tokenizer that is none: {digest[:80]!r}.")
    folder = cache_root() / "tokenizers" / digest
    whole = folder / "whole.txt"
    if not whole.is_file():
        _keep(folder, fetch())
        write_atomic(whole, "All files of this tokenizer are here.\n")
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EngineError(f"The tokenizer that the server sent, in {folder}, cannot be read: {error}") from error


def _keep(folder: Path, sent: Any) -> None:
    files = sent.get("files") if isinstance(sent, dict) else None
    if not isinstance(files, dict) or not files or not all(_NAME.fullmatch(str(name)) for name in files):
        raise EngineError("The server sent no files of a tokenizer, or files with names that a tokenizer's have not.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        try:
            write_atomic(folder / name, base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, TypeError) as error:
            raise EngineError(f"The server sent {name}, a file of its tokenizer, damaged: {error}.") from error
