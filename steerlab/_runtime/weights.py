"""Whose weights these are: a model in memory against the files it was loaded from, and against an engine's."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from steerlab._runtime.sharding import whole
from steerlab.core._hashing import HASH_LENGTH
from steerlab.models import weights_hash


def hash_of_weights(model: Any) -> str:
    """Content hash of the weights: that of the files the model came from if it still equals them, else of the values.

    Vectors carry the hash of the files they were extracted from, so that a vector belongs to the same model however
    it was loaded.
    """
    path = Path(getattr(model, "name_or_path", "") or "")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if files and _equals_files(model, files):
        return weights_hash(path)
    return parameters_hash(model)


@torch.no_grad()
def _equals_files(model: Any, files: list[Path]) -> bool:
    own = dict(model.named_parameters())
    seen = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                if name in own:
                    value = stored.get_tensor(name)
                    here = whole(own[name]).cpu()
                    if value.shape != here.shape or not torch.equal(value.to(here.dtype), here):
                        return False
                    seen.add(name)
    return seen == set(own)


def parameters_hash(model: torch.nn.Module) -> str:
    """Content hash of a model held in memory: names and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(whole(parameter).to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:HASH_LENGTH]
