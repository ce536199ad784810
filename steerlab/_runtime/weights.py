"""Whose weights these are: a model in memory against the files it was loaded from, and against an engine's."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from steerlab._runtime.sharding import whole
from steerlab.core._hashing import HASH_LENGTH
from steerlab.models import _hashing, weights_hash

_ROWS, _PARTS, _PART = 16, 64, 1024
"""Of a tensor whose model is not read whole: rows that are compared, and runs of values that are hashed."""


def hash_of_weights(model: Any) -> str:
    """Content hash of the weights: that of the files the model came from if it still equals them, else of the values.

    Vectors carry the hash of the files they were extracted from, so that a vector belongs to the same model however
    it was loaded. Of a model above 4 GiB, samples of every parameter are compared and hashed.
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
    is_sampled = _is_sampled(model)
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                if name in own:
                    there, here = stored.get_slice(name), whole(own[name])
                    if list(here.shape) != there.get_shape():
                        return False
                    if is_sampled and here.ndim:
                        pairs = ((there[row], here[row]) for row in _rows(len(here)))
                    else:
                        pairs = ((stored.get_tensor(name), here),)
                    if not all(torch.equal(value.to(own_value.dtype), own_value.cpu()) for value, own_value in pairs):
                        return False
                    seen.add(name)
    return seen == set(own)


def _is_sampled(model: torch.nn.Module) -> bool:
    """Whether a model is too large to be read whole, by the rule for files."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) > _hashing.SAMPLED_OVER


def _rows(count: int) -> list[slice]:
    """Some rows of a tensor, at equal distances."""
    places = torch.linspace(0, count - 1, min(count, _ROWS), dtype=torch.float64).long().tolist()
    return [slice(place, place + 1) for place in places]


@torch.no_grad()
def parameters_hash(model: torch.nn.Module) -> str:
    """Content hash of a model held in memory: names and bytes of all parameters.

    Above 4 GiB it is names, shapes and 64 samples of every parameter, each of 1024 values: another model or checkpoint
    has another hash, a few altered numbers between two samples do not change it.
    """
    digest = hashlib.sha256()
    is_sampled = _is_sampled(model)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        values = whole(parameter)
        if is_sampled:
            digest.update(str(list(values.shape)).encode())
            values = _samples(values.reshape(-1))
        digest.update(values.to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:HASH_LENGTH]


def _samples(values: Tensor) -> Tensor:
    """Runs of values at equal distances; all of few."""
    if len(values) <= _PARTS * _PART:
        return values
    firsts = torch.linspace(0, len(values) - _PART, _PARTS, dtype=torch.float64).long()
    return values[(firsts[:, None] + torch.arange(_PART)).to(values.device)]
