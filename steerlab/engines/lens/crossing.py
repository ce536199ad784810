"""Crossing devices once: a model spread over several devices, with one copy per boundary and step.

A block gets, beside the hidden states, tensors that are the same for every block (rotary tables, mask, positions). Left
alone, each block on another device copies them again. Here all tensors that must move are packed into one buffer,
copied once per device and step, and handed to every later block there. The step's positions, which edits need, ride along.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steerlab.engines.lens.shadow import device_of, unwrapped
from steerlab.engines.lens.step import current_step_or_none


@contextmanager
def memoised_crossings(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Runs the body with every module's inputs moved to its device, each tensor once per device and pass.

    On a single device this does nothing.

    Args:
        model: the model that will be called.
        blocks: its transformer blocks, in order.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) < 2:
        yield
        return
    memo = _Memo()
    with ExitStack() as stack:
        clearing = model.register_forward_pre_hook(lambda *_: memo.clear())
        stack.callback(clearing.remove)
        for module in [*blocks, *_outside(model, blocks)]:
            handle = module.register_forward_pre_hook(_mover(memo, device_of(unwrapped(module))), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules outside the blocks that hold tensors of their own, or wrap one that does."""
    for child in module._modules.values():
        if child is None or any(child is block for block in blocks):
            continue
        if child is not unwrapped(child) or child._parameters or child._buffers:
            yield child
        else:
            yield from _outside(child, blocks)


class _Memo:
    """Copies made in the current pass: (identity of the source, device) → copy."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, torch.device], Tensor] = {}
        self.sources: list[Tensor] = []

    def clear(self) -> None:
        self.copies.clear()
        self.sources.clear()

    def moved(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The tensors on a device; those not yet there cross in one packed copy from each device they come from.

        They come from where the first of them is, if they were copied there earlier: from block to block everything
        travels with the stream, and so in one copy.
        """
        missing = {id(t): t for t in tensors if t.device != device and (id(t), device) not in self.copies}
        if missing:
            sources = list(missing.values())
            nearest = [self.copies.get((id(t), sources[0].device), t) for t in sources]
            for origin in {t.device for t in nearest}:
                group = [(s, t) for s, t in zip(sources, nearest, strict=True) if t.device == origin]
                for (source, _), made in zip(group, packed_copy([t for _, t in group], device), strict=True):
                    self.copies[id(source), device] = made
            self.sources += sources
        return [t if t.device == device else self.copies[id(t), device] for t in tensors]


def packed_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors on a device, through one transfer."""
    if len(tensors) == 1:
        return [tensors[0].to(device)]
    parts, places, offset = [], [], 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        padding = -flat.numel() % 16
        parts += [flat, flat.new_zeros(padding)] if padding else [flat]
        places.append((offset, flat.numel()))
        offset += flat.numel() + padding
    buffer = torch.cat(parts).to(device)
    return [
        buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
        for tensor, (start, size) in zip(tensors, places, strict=True)
    ]


def _mover(memo: _Memo, device: torch.device | None) -> Any:
    def move(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if device is None:
            return None
        found: list[Tensor] = []
        _collect(args, found)
        _collect(kwargs, found)
        if all(tensor.device == device for tensor in found):
            return None
        step = current_step_or_none()
        riders = [] if step is None or step.positions.device == device else [step.positions]
        moved = memo.moved([*found, *riders], device)
        if step is not None and riders:
            step.tokens.provide(device, moved[-1])
        replaced = {id(s): m for s, m in zip(found, moved, strict=False)}
        return _replace(args, replaced), _replace(kwargs, replaced)

    return move


def _collect(value: Any, found: list[Tensor]) -> None:
    """Tensors in nested tuples, lists and dictionaries; a cache is left alone, its layers live where they belong."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _replace(value: Any, replaced: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replaced[id(value)]
    if isinstance(value, tuple | list):
        return type(value)(_replace(item, replaced) for item in value)
    if isinstance(value, dict):
        return {key: _replace(item, replaced) for key, item in value.items()}
    return value
