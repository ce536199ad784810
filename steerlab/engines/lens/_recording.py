"""A pass recorded as CUDA graphs: one for each stretch of layers on one device, with copies between them."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from steerlab._kernels.availability import can_read
from steerlab._runtime.device_transfer import Transfers, pack, unpack

_WARM_UPS = 2
_LITTLE = 1 / 8  # of a device's memory
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount")


class NoReadback(TorchDispatchMode):
    """Refuses operations whose result the processor waits for, which no recording can hold.

    One that meets such an operation fails, and leaves torch's random numbers of that device unusable. Stopped before
    it, it ends like any other. Only the recorded run can tell: some models do without reading while one is made.

    Args:
        device_type: of the tensors whose values are not to be read.

    Raises:
        RuntimeError: at the first of them.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if (name in _READS or by_mask) and args[0].device.type == self._device_type:
            raise RuntimeError(f"{func} waits for the device in the middle of a pass.")
        return func(*args, **(kwargs or {}))


class KeptConstants(TorchFunctionMode):
    """Makes tensors of Python numbers once, and copies of them from then on.

    `torch.tensor` copies from the processor's memory, which no recording can hold. Hugging Face's mask for eager
    attention is made of such a number, as are the slopes of ALiBi.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.tensor, torch.as_tensor) or not args or not _is_of_numbers(args[0]):
            return func(*args, **kwargs)
        key = repr((args, kwargs))
        if key not in self._made:
            self._made[key] = func(*args, **kwargs)
        return self._made[key].clone()


def _is_of_numbers(data: Any) -> bool:
    """Whether data is a Python number or nested lists of such; tensors in lists would be read to tell them apart."""
    return all(map(_is_of_numbers, data)) if isinstance(data, list | tuple) else isinstance(data, int | float)


class RecordedTransfers(Transfers):
    """Transfers that end one graph of the recording under way and begin the next.

    Args:
        states: by device, in the order in which a pass comes to them, what it reads there beside tensors of the model.
            The first one's goes along to the others.

    Attributes:
        recording: under way, if one is.
    """

    def __init__(self, states: Mapping[torch.device, Tensor]) -> None:
        super().__init__()
        self.recording: Recording | None = None
        self._states, self._order = states, list(states)

    def bring(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor on a device, outside of a recording."""
        if tensor.device == device or not can_read(device, tensor.device):
            return tensor.to(device)
        from steerlab._kernels.peers import take

        _let_wait(device, tensor.device, torch.cuda.Event())
        made = torch.empty_like(tensor, device=device)
        take(made, tensor)
        tensor.record_stream(torch.cuda.current_stream(device))
        return made

    def send(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """See `Transfers.send`."""
        send = super().send if self.recording is None else self.recording.cross
        here = tensors[0].device
        if here not in self._order or self._order.index(device) < self._order.index(here):
            return send(tensors, device)
        *sent, state = send([*tensors, self._states[here]], device)
        self._states[device].copy_(state)
        return sent


class Recording:
    """A function of tensors at fixed places, run once and then replayed.

    Args:
        work: what to record; it leaves its inputs and results where they are.
        devices: all that it runs on, the first one first.
        transfers: by which it goes from one to the next.
        restore: undoes what a run of `work` changed.
        around: around the run that is recorded.
        constants: around each run.
    """

    def __init__(
        self,
        work: Callable[[], Tensor],
        devices: Sequence[torch.device],
        transfers: RecordedTransfers,
        restore: Callable[[], None],
        around: AbstractContextManager[Any] | None = None,
        constants: AbstractContextManager[Any] | None = None,
    ) -> None:
        around, constants = around or nullcontext(), constants or nullcontext()
        self._steps: list[Callable[[], Any]] = []
        self._kept: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        with _streams_on(devices), _random_numbers_kept(devices):
            for _ in range(_WARM_UPS):
                with constants:
                    work()
                restore()
            transfers.recording = self
            try:
                self._begin(devices[0])
                with constants, around:
                    self.result = work()
                self._end()
                if self.result.device != devices[0]:  # whose next pass writes what the last device reads
                    self._wait(devices[0], self.result.device)
            except BaseException:
                self._abandon()
                raise
            finally:
                transfers.recording = None
            restore()

    def replay(self) -> Tensor:
        """Runs it again; the result is valid until the next time."""
        for step in self._steps:
            step()
        return self.result

    def cross(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies of tensors on a device, on which the recording goes on.

        Raises:
            RuntimeError: if the tensors are not where the recording is.
        """
        here = torch.device("cuda", torch.cuda.current_device())
        if any(tensor.device != here for tensor in tensors):
            raise RuntimeError(f"A pass on {here} takes tensors of another device along to {device}.")
        packed = pack(tensors)
        self._end()
        moved = torch.empty_like(packed, device=device)
        self._kept += [packed, moved]
        if can_read(device, here):
            from steerlab._kernels.peers import take

            self._wait(device, here)
            take(moved, packed)  # once outside of the graph, which a kernel cannot be compiled in
            self._begin(device)
            take(moved, packed)
        else:
            self._steps.append(partial(moved.copy_, packed, non_blocking=True))
            self._begin(device)
        return unpack(moved, tensors)

    def _wait(self, device: torch.device, other: torch.device) -> None:
        self._steps.append(partial(_let_wait, device, other, torch.cuda.Event()))

    def _begin(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        self._steps.append(graph.replay)

    def _abandon(self) -> None:
        """Ends a graph that is being recorded, of which nothing is used."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # of a void recording: the error on its way says why it is void
                graph.capture_end()


@contextmanager
def _random_numbers_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Gives torch's generators of the devices back as they were if the body fails.

    A recording that is void leaves them as if it still went on, and the user's next draw would raise.
    """
    generators = [torch.cuda.default_generators[device.index] for device in devices if device.type == "cuda"]
    states = [generator.clone_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            generator.graphsafe_set_state(state)
        raise


@contextmanager
def _streams_on(devices: Sequence[torch.device]) -> Iterator[None]:
    """Runs the body on a new stream of each device, after all earlier work and before all later; nothing is freed."""
    _wait(devices)
    if any(free < _LITTLE * total for free, total in map(torch.cuda.mem_get_info, devices)):
        gc.collect()  # not always, for in a process of many modules it takes a third of a second
    with ExitStack() as stack:
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()
        for device in reversed(devices):
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        stack.callback(_wait, devices)
        yield


def _let_wait(device: torch.device, other: torch.device, event: torch.cuda.Event) -> None:
    """Lets the current stream of a device wait for that of another."""
    event.record(torch.cuda.current_stream(other))
    torch.cuda.current_stream(device).wait_event(event)


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
