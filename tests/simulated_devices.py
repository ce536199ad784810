"""Several devices on a torch that has only the CPU: real values, errors where devices meet, a log of every copy.

A tensor on `sim:0`, `sim:1`, … holds an ordinary CPU tensor behind another device's name. Operations compute on what is
held, refuse tensors of different devices as CUDA does, and return tensors of the same device; `to` and `copy_` between
devices, and values read by Python, are logged.

`simulated_devices` registers the device type with torch for the rest of the process, so run it in a process of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "sim"
CPU = torch.device("cpu")
# torch can define a device type in Python from version 2.10 on.
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

aten = torch.ops.aten
_READ_BY_PYTHON = (
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
)
# Their indices may lie on the CPU, whatever the device of the rest.
_INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
)


class DeviceMismatchError(RuntimeError):
    """Tensors of different devices met in one operation."""


@dataclass(frozen=True)
class Transfer:
    """One copy between devices."""

    source: torch.device
    target: torch.device
    elements: int

    @property
    def between_devices(self) -> bool:
        """Whether the host, as source or target, had no part in it."""
        return CPU not in (self.source, self.target)


class SimTensor(Tensor):
    """A tensor on a simulated device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "SimTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimTensor({self.held!r}, device={str(self.device)!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(torch.tensor(p) if isinstance(p, list) else p for p in parts))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("A simulated tensor was used outside `with simulated_devices()`.")


class _Simulation(TorchDispatchMode):
    """Carries out every operation that involves a simulated device."""

    def __init__(self, log: list[Transfer]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in _leaves((args, kwargs)) if isinstance(value, Tensor)]
        simulated = [tensor for tensor in tensors if isinstance(tensor, SimTensor)]
        if not simulated and not _is_simulated(kwargs.get("device")):
            return func(*args, **kwargs)
        # Outside inference mode, whose tensors cannot stand in for others; gradients are not simulated.
        with torch.inference_mode(False), torch.no_grad():
            return self._run(func, args, kwargs, tensors, simulated)

    def _run(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], simulated: list[SimTensor]
    ) -> Any:
        if func.overloadpacket is aten.to:
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to(args[0], **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        operands = _leaves((args[:1], args[2:])) if func in _INDEXING else tensors
        common = _common_device(func, [t for t in operands if isinstance(t, Tensor)], simulated)
        if func in _READ_BY_PYTHON:
            self.log.append(Transfer(common, CPU, 1))
            return func(*_mapped(_held, args), **_mapped(_held, kwargs))
        return _compute(func, args, kwargs, common, simulated)

    def _to(self, source: Tensor, *, device: Any = None, **options: Any) -> Tensor:
        target = source.device if device is None else _indexed(device)
        self._note(source, target)
        return _on(target, aten._to_copy.default(_held(source), **options))

    def _copy(self, target: Tensor, source: Tensor, *options: Any, **more: Any) -> Tensor:
        self._note(source, target.device)
        _held(target).copy_(_held(source), *options, **more)
        return target

    def _note(self, source: Tensor, target: torch.device) -> None:
        if source.device != target:
            self.log.append(Transfer(source.device, target, source.numel()))


def _compute(
    func: Any, args: Any, kwargs: Mapping[str, Any], common: torch.device | None, simulated: list[SimTensor]
) -> Any:
    """Runs an operation on what the tensors hold; its results are on the device asked for, or where its inputs are."""
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    device = common if asked is None else _indexed(asked)
    shapes = [tensor.shape for tensor in simulated]
    output = func(*_mapped(_held, args), **_mapped(_held, kwargs))
    if [tensor.held.shape for tensor in simulated] != shapes:
        raise NotImplementedError(f"{func} changes a shape in place, which the simulation does not follow.")
    known = {id(tensor.held): tensor for tensor in simulated}

    def dressed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else _on(device, value)

    return _mapped(dressed, output)


def _common_device(func: Any, operands: list[Tensor], simulated: list[SimTensor]) -> torch.device | None:
    """The device on which an operation runs; None for one without simulated operands, which makes a tensor."""
    devices = {tensor.device for tensor in operands if isinstance(tensor, SimTensor) or tensor.ndim}
    if len(devices) > 1:
        raise DeviceMismatchError(f"{func} got tensors on {', '.join(sorted(map(str, devices)))}.")
    return next(iter(devices), None) if simulated else None


def _leaves(value: Any) -> list[Any]:
    """What nested tuples, lists and dictionaries hold."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple | list):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
        else:
            found.append(item)
    return found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same nest with every leaf changed."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    return change(value)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, SimTensor) else value


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return SimTensor(tensor, device) if device.type == NAME else tensor


def _is_simulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _indexed(device: Any) -> torch.device:
    """The device itself, or the first one of a type given without an index."""
    device = torch.device(device)
    return torch.device(NAME, 0) if device.type == NAME and device.index is None else device


@contextmanager
def simulated_devices() -> Iterator[list[Transfer]]:
    """Runs the body with devices `sim:0`, `sim:1`, …; the list grows by each transfer as it happens."""
    _register()
    log: list[Transfer] = []
    with _Simulation(log), _TensorFromData():
        yield log


@cache
def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME)


class _TensorFromData(TorchFunctionMode):
    """Makes `torch.tensor(…, device=…)` take part; its own way to another device bypasses the simulation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and _is_simulated(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def place(model: nn.Module, device_map: Mapping[str, torch.device | str]) -> None:
    """Moves modules, named by their path, with all their parameters and buffers; ties hold within a device."""
    moved: dict[tuple[int, torch.device], Any] = {}
    for path, device in device_map.items():
        for module in model.get_submodule(path).modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = _placed(value, torch.device(device), moved)
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = _placed(value, torch.device(device), moved)


def _placed(value: Tensor, device: torch.device, moved: dict[tuple[int, torch.device], Any]) -> Any:
    key = (id(value), device)
    if key not in moved:
        made = value.detach().to(device)
        moved[key] = nn.Parameter(made, requires_grad=False) if isinstance(value, nn.Parameter) else made
    return moved[key]
