"""Moving between devices once: a model spread over several devices, with one copy per boundary and step.

A block gets, beside the hidden states, tensors that are the same for every block (rotary tables, mask, positions).
Left alone, each block on another device copies them again. Here all tensors that must move are packed into one buffer,
copied once per device and step, and handed to every later block there. The step's positions, which edits need, ride
along.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steerlab._runtime.modules import device_of, parameters_of, unwrapped
from steerlab._runtime.step import current_step_or_none


@contextmanager
def memoised_transfers(
    model: nn.Module, blocks: Sequence[nn.Module], transfers: "Transfers | None" = None
) -> Iterator[None]:
    """Runs the body with every module's inputs moved to its device, each tensor once per device and pass.

    On a single device this does nothing.

    Args:
        model: the model that will be called.
        blocks: its transformer blocks, in order.
        transfers: how; by copying.
    """
    if len(devices_of(model)) < 2:
        yield
        return
    memo = Transfers() if transfers is None else transfers
    with ExitStack() as stack:
        clearing = model.register_forward_pre_hook(lambda *_: memo.clear())
        stack.callback(clearing.remove)
        for module in [*blocks, *_outside(model, blocks)]:
            handle = module.register_forward_pre_hook(_mover(memo, device_of(unwrapped(module))), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def devices_of(model: nn.Module) -> list[torch.device]:
    """Where a model's parameters lie, in the order of its modules."""
    return list(dict.fromkeys(parameter.device for parameter in parameters_of(model)))


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules outside the blocks that hold tensors of their own, or wrap one that does."""
    for child in module._modules.values():
        if child is None or any(child is block for block in blocks):
            continue
        if child is not unwrapped(child) or child._parameters or child._buffers:
            yield child
        else:
            yield from _outside(child, blocks)


class Transfers:
    """Copies made in the current pass: (identity of the source, device) → copy."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, torch.device], Tensor] = {}
        self.streams: list[Tensor] = []
        self.companions: dict[int, Tensor] = {}

    def clear(self) -> None:
        self.copies.clear()
        self.streams.clear()
        self.companions.clear()

    def moved(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The tensors on a device; those not yet there move in one packed copy from each device they come from.

        The first is the stream. The others accompany it: once copied to a device, they come along to the next, whether
        the next block needs them or a later one, so that all come from one device.
        """
        missing = {id(t): t for t in tensors if t.device != device and (id(t), device) not in self.copies}
        if missing:
            near = next(iter(missing.values())).device
            missing |= {
                key: tensor
                for key, tensor in self.companions.items()
                if (key, near) in self.copies and (key, device) not in self.copies and tensor.device != device
            }
            self._copy([(t, self.copies.get((key, near), t)) for key, t in missing.items()], device)
            self.streams.append(tensors[0])
            self.companions |= {key: tensor for key, tensor in missing.items() if tensor is not tensors[0]}
        return [t if t.device == device else self.copies[id(t), device] for t in tensors]

    def send(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies of tensors of one device on another, through one transfer."""
        if len(tensors) == 1:
            return [tensors[0].to(device)]
        return unpack(pack(tensors).to(device), tensors)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """Copies tensors, each given with the nearest of its copies."""
        for origin in {nearest.device for _, nearest in pairs}:
            here = [(source, nearest) for source, nearest in pairs if nearest.device == origin]
            for (source, _), made in zip(here, self.send([n for _, n in here], device), strict=True):
                self.copies[id(source), device] = made


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors of one device in one buffer, each at a multiple of 16."""
    parts = []
    for after, tensor in enumerate(tensors, start=1):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        padding = -flat.numel() % 16 if after < len(tensors) else 0
        parts += [flat, flat.new_zeros(padding)] if padding else [flat]
    return torch.cat(parts)


def unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these from a buffer that `pack` filled, or from a copy of it on another device."""
    found, start = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        found.append(buffer[start : start + size].view(tensor.dtype).view(tensor.shape))
        start += size + -size % 16
    return found


def queued(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on a device; an NVIDIA GPU makes it after the work that it still has, and nobody waits."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _mover(memo: Transfers, device: torch.device | None) -> Any:
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
