"""Which module goes to which of several GPUs: consecutive layers, and about the same bytes on each."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn


def balanced_device_map(path: Path, n_devices: int, dtype: torch.dtype) -> dict[str, int]:
    """A device for every module of a model directory, as Hugging Face's `device_map`; no weight is read.

    Args:
        path: the model directory.
        n_devices: how many GPUs.
        dtype: of the weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    return balanced(model, n_devices)


def balanced(model: nn.Module, n_devices: int) -> dict[str, int]:
    """A device for every module of a model: in order, the fullest with as few bytes as can be.

    A head that shares the embedding's weights goes where the embedding is, and what has no weights to the first device.
    """
    modules = dict(_in_order(model))
    seen: set[int] = set()
    sizes = [_new_bytes(module, seen) for module in modules.values()]
    places = dict(zip(modules, _split(sizes, n_devices), strict=True))
    owner: dict[int, str] = {}
    for name, module in modules.items():
        shared = next((owner[id(p)] for p in module.parameters() if id(p) in owner), None)
        owner |= {id(p): name for p in module.parameters() if id(p) not in owner}
        if shared is not None:
            places[name] = places[shared]
        elif next(module.parameters(), None) is None:
            places[name] = 0
    return places


def _in_order(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model that stay whole: each block of its longest list, and what lies beside it."""
    longest = max((m for m in module.modules() if isinstance(m, nn.ModuleList)), key=len)
    for name, child in module.named_children():
        if child is longest:
            yield from ((f"{prefix}{name}.{index}", block) for index, block in enumerate(longest))
        elif any(inner is longest for inner in child.modules()):
            yield from _in_order(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _new_bytes(module: nn.Module, seen: set[int]) -> int:
    """Bytes of the parameters and buffers that nobody counted before."""
    fresh = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in seen]
    seen.update(map(id, fresh))
    return sum(t.numel() * t.element_size() for t in fresh)


def _split(sizes: Sequence[int], n_parts: int) -> list[int]:
    """The part of each item: consecutive, and the largest part as small as it can be."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _filled(sizes, middle)[-1] < n_parts else (middle + 1, high)
    return _filled(sizes, low)


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """The part of each item if parts are filled one after the other up to a limit."""

    def put(state: tuple[int, int], size: int) -> tuple[int, int]:
        part, held = state
        return (part, held + size) if held + size <= limit else (part + 1, size)

    return [part for part, _ in accumulate(sizes, put, initial=(0, 0))][1:]
