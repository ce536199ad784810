"""The files of a model's tokenizer, for clients that have no copy of the model."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from steerlab.core.errors import InputError

NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Files that a tokenizer is read from; no code is among them."""

MAX_BYTES = 256 << 20


def tokenizer_files(directory: Path) -> dict[str, Any]:
    """The files of a model directory, in base64, and a hash of them all.

    Raises:
        InputError: if they are far larger than a tokenizer is.
    """
    found = {name: (directory / name).read_bytes() for name in NAMES if (directory / name).is_file()}
    if sum(map(len, found.values())) > MAX_BYTES:
        raise InputError(f"The tokenizer in {directory} takes more than {MAX_BYTES:,} bytes.")
    digest = hashlib.sha256()
    for name, data in found.items():
        digest.update(f"{name} {len(data)} ".encode() + data)
    return {
        "hash": digest.hexdigest()[:32],
        "files": {name: base64.b64encode(data).decode() for name, data in found.items()},
    }
