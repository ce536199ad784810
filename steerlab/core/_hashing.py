"""Content hashes: the identity of data, vectors and plans."""

import hashlib
import json
from typing import Any

HASH_LENGTH = 16


def content_hash(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a JSON-serialisable value; key order does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_LENGTH]


def bytes_hash(data: bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()[:HASH_LENGTH]
