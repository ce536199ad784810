"""Dequantises a GGUF file of the user's into an ordinary model directory in the cache, once."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from steerlab.core.errors import InputError, ModelNotFoundError
from steerlab.models import _conversion as conversion
from steerlab.models._hashing import file_hash

SUFFIX = ".gguf"
SOURCE = "dequantised_from"
"""The entry of a converted model's configuration that says what was quantised; `core._quantisation` reads it."""


def convert_file(gguf: Path) -> tuple[Path, str]:
    """The directory of a GGUF file's model in float32, made if it is not there yet, and the start of the file's hash.

    It is known by the file's bytes, so a file that has changed is converted anew. transformers shows its bar meanwhile.

    Args:
        gguf: the file.

    Raises:
        ModelNotFoundError: if the file cannot be read as a model.
        InputError: if the cache cannot be written.
    """
    digest = file_hash(gguf)[:12]
    target = conversion.prepared_directory(f"{re.sub(r'[^A-Za-z0-9._-]', '-', gguf.stem)}-{digest}")
    try:
        conversion.build_under_lock(target, lambda build: _convert(gguf, build, digest))
    except ModelNotFoundError:  # the file is to blame
        raise
    except (OSError, InputError) as error:
        raise InputError(
            f"{gguf} cannot be dequantised into {target.parent} ({error}); make room there, in float32, or set "
            "STEERLAB_CACHE to a directory that can be written."
        ) from error
    return target, digest


def _convert(gguf: Path, directory: Path, digest: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        kinds = kinds_of(gguf)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # whatever the libraries raise over damaged or unsupported files
        raise ModelNotFoundError(
            f"{gguf} cannot be read as a model: {type(error).__name__}: {error}. Check that the file is whole and that "
            "transformers reads GGUF files of its family."
        ) from error
    setattr(model.config, SOURCE, f"GGUF {kinds}")
    conversion.save_plain(model, directory)
    tokenizer.save_pretrained(directory)
    return {"gguf": gguf.name, "gguf_sha256": digest, "kinds": kinds}


def kinds_of(gguf: Path) -> str:
    """How the file's tensors are stored, most frequent first, such as `Q4_1 × 210, F32 × 61`."""
    from gguf import GGUFReader

    counts = Counter(tensor.tensor_type.name for tensor in GGUFReader(gguf).tensors)
    return ", ".join(f"{kind} × {count}" for kind, count in counts.most_common())
