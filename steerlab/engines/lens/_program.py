"""A program: the one-token pass of the unhooked model on tensors at fixed places, so that it can be replayed.

Token ids, positions, mask, key-value cache and edits all lie in such tensors. Changing the plan changes their contents,
not the program, so a sweep over doses or vectors makes one. On GPUs the pass is recorded as CUDA graphs; in *compiled*
programs torch's compiler fuses what our kernels leave.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steerlab._kernels.availability import runs_kernels
from steerlab._runtime.device_transfer import devices_of, memoised_transfers
from steerlab._runtime.hooks import install_input_hook, install_output_hook
from steerlab._runtime.model_state import remembered
from steerlab._runtime.modules import device_of, modules_in
from steerlab._runtime.self_comparison import is_out_of_memory
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import SteerlabError
from steerlab.engines.lens._backends import attention_kernel, plain_points
from steerlab.engines.lens._decode_attention import register
from steerlab.engines.lens._edit_buffers import EditBuffers
from steerlab.engines.lens._fixed_cache import FixedCache
from steerlab.engines.lens._fusing import fuse_between, fuse_linears
from steerlab.engines.lens._hooking import find_hook_point
from steerlab.engines.lens._recording import KeptConstants, NoReadback, RecordedTransfers, Recording
from steerlab.engines.lens._unhooked_model import UnhookedModel

_KEPT_PROGRAMS, _SHARE_OF_MEMORY = 8, 1 / 16


@dataclass(frozen=True)
class ProgramKey:
    """What a program is made for; anything else is data.

    Attributes:
        n_rows: rows of the batch.
        capacity: tokens that a row can hold.
        edited: the edited hook points, each with the number of terms of each edit there.
        is_compiled: whether torch's compiler fuses what our kernels leave.
    """

    n_rows: int
    capacity: int
    edited: tuple[tuple[HookPoint, tuple[int, ...]], ...]
    is_compiled: bool


class ProgramFailedError(Exception):
    """A program could not be made or run, though nothing had spoken against it; caught in this package.

    Attributes:
        reason: what happened, a sentence.
        is_lasting: whether it would happen again; lack of memory may pass.
    """

    def __init__(self, doing: str, error: Exception) -> None:
        self.is_lasting = not is_out_of_memory(error)
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        what = f"{type(error).__name__}: {first_line}" if self.is_lasting else f"memory ran out, {first_line}"
        self.reason = f"{doing} failed ({what})."
        super().__init__(self.reason)


class _Inputs(NamedTuple):
    """What changes from step to step, on one device.

    Attributes:
        tokens: that come next, shape [rows, 1].
        indices: which generated token of its row each is, -1 for rows that have ended, shape [rows, 1].
        counts: tokens that each row has run, shape [rows, 1].
        filled: slots of the cache that hold a token, shape [].
        together: all of these in one tensor.
    """

    tokens: Tensor
    indices: Tensor
    counts: Tensor
    filled: Tensor
    together: Tensor

    @classmethod
    def zeros(cls, n_rows: int, device: torch.device) -> "_Inputs":
        together = torch.zeros(3 * n_rows + 1, dtype=torch.long, device=device)
        return cls(*together[:-1].view(3, n_rows, 1), filled=together[-1], together=together)


class Program:
    """One decoding step with its tensors.

    Args:
        bridge: the TransformerBridge.
        key: what it is made for.

    Attributes:
        tokens: the token of each row that comes next, shape [rows, 1].
        counts: tokens that each row has run, shape [rows, 1].
        mask: 1 where a slot of the cache holds a token of the row, or will, shape [rows, capacity].
        cache: the key-value cache.
        buffers: the edits at each hook point.
        user: gives the rows that run on it, if they are alive.
    """

    def __init__(self, bridge: Any, key: ProgramKey) -> None:
        self.key = key
        self.unhooked = UnhookedModel(bridge.original_model)
        self.devices = _in_order(self.unhooked.model)
        self.device = self.devices[0]
        self._inputs = {device: _Inputs.zeros(key.n_rows, device) for device in self.devices}
        filled = {device: inputs.filled for device, inputs in self._inputs.items()}
        text_config = bridge.original_model.config.get_text_config()
        self.cache: Any = FixedCache(text_config, key.capacity, filled)
        self.tokens, self.counts = self._inputs[self.device].tokens, self._inputs[self.device].counts
        self.mask = torch.zeros(key.n_rows, key.capacity, dtype=torch.long, device=self.device)
        self.user: Callable[[], Any] = lambda: None
        self.buffers = {point: self._buffers_at(bridge, point, n_terms) for point, n_terms in key.edited}
        self._transfers = RecordedTransfers({device: inputs.together for device, inputs in self._inputs.items()})
        self._blocks = [self.unhooked.of(block) for block in bridge.blocks]
        self._recording: Recording | None = None
        self._held = [held for m in modules_in(self.unhooked.model) for held in (m._parameters, m._buffers)]
        self._places = self._places_of_weights()
        attention = attention_kernel(bridge, "sdpa")
        has_kernels = runs_kernels(self.tokens)
        self.unhooked.set_attention(register() if has_kernels and attention == "sdpa" else attention)
        if next(self.unhooked.model.parameters()).dtype != torch.bfloat16:
            self.unhooked.keep_experts_on_device()
        self._renewals: list[Callable[[], None]] = []
        if has_kernels:
            fuse_linears(self.unhooked.model)
            self._renewals = fuse_between(self.unhooked.model, key.capacity)
        self._compiled = _compiled(self._call_model) if key.is_compiled else None

    def _buffers_at(self, bridge: Any, point: HookPoint, n_terms: tuple[int, ...]) -> EditBuffers:
        name = find_hook_point(bridge, point.name).name
        module = self.unhooked.of(plain_points(bridge)[name])
        index = self._inputs[device_of(module) or self.device].indices
        sizes = self.key.n_rows, self.key.capacity, bridge.cfg.d_model
        buffers = EditBuffers(n_terms, *sizes, index)
        install = install_input_hook if name.endswith("hook_in") else install_output_hook
        install(module, buffers)
        return buffers

    @property
    def is_outdated(self) -> bool:
        """Whether a weight or module moved or was replaced since; a recording would read what was there before."""
        return self.unhooked.is_outdated or self._places != self._places_of_weights()

    def _places_of_weights(self) -> list[int]:
        return [tensor.data_ptr() for held in self._held for tensor in held.values() if tensor is not None]

    def feed(self, fed: Tensor, index: int) -> None:
        """States what the coming step runs; the step before counts as done.

        Args:
            fed: each row's generated token of this index, negative for rows that have ended, shape [rows].
            index: the first generated token is 0.
        """
        ran = min(index, 1)
        for device in self.devices[:1] if self.is_recorded else self.devices:  # a recording takes along what it was fed
            inputs, here = self._inputs[device], self._transfers.bring(fed, device)
            if runs_kernels(here):
                from steerlab._kernels.feeding import feed

                feed(here, *inputs[:4], index, ran)
                continue
            inputs.tokens.copy_(here.clamp_min(0)[:, None])
            inputs.indices.copy_(torch.where(here < 0, -1, index)[:, None])
            inputs.counts.add_(ran)
            inputs.filled.add_(ran)

    def begin(self) -> None:
        """Empties the cache, and makes anew what was computed ahead of buffers of the model."""
        self.cache.clear()
        for renew in self._renewals:
            renew()

    @property
    def is_recorded(self) -> bool:
        """Whether passes are replayed as CUDA graphs."""
        return self.device.type == "cuda"

    def step(self) -> Tensor:
        """Runs the pass on what `feed` stated; the logits are valid until the next step.

        Raises:
            ProgramFailedError: if it cannot be recorded, compiled or run.
        """
        if not self.is_recorded:
            with failing_as_program("A pass of the program"):
                logits = self._pass()
        else:
            if self._recording is None:
                with failing_as_program("Recording the pass as CUDA graphs"):
                    self._recording = self._record()
            logits = self._recording.replay()
        return logits

    def _pass(self) -> Tensor:
        # not kept where nothing is compiled: a program that refers to itself is freed late, and its cache with it
        forward = self._compiled or self._call_model
        return forward(self.tokens, self.counts, self.mask)

    def _call_model(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        output = self.unhooked.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits

    def _record(self) -> Recording:
        counted = [t for b in self.buffers.values() for t in (b.edited, b.changes)]
        saved = [tensor.clone() for tensor in counted]

        def restore() -> None:
            for tensor, value in zip(counted, saved, strict=True):
                tensor.copy_(value)

        with memoised_transfers(self.unhooked.model, self._blocks, self._transfers):
            # compiled code may leave such a mode aside; a program that is not compiled was compared before
            if self.key.is_compiled:
                return Recording(self._pass, self.devices, self._transfers, restore)
            around, constants = NoReadback(self.device.type), KeptConstants()
            return Recording(self._pass, self.devices, self._transfers, restore, around, constants)


def program_for(bridge: Any, key: ProgramKey) -> Program:
    """The program for a key, made once; the least recently used are dropped where their caches take much memory."""
    kept: dict[ProgramKey, Program] = remembered(bridge, "programs", dict)
    found = kept.pop(key, None)
    while kept and (len(kept) >= _KEPT_PROGRAMS or _crowd(list(kept.values()))):
        kept.pop(next(iter(kept)))
    if found is not None and found.is_outdated:
        found = None
    kept[key] = found or Program(bridge, key)
    return kept[key]


def drop_program(bridge: Any, key: ProgramKey | None) -> None:
    """Forgets the program for a key, or all; rows that still run on one keep it."""
    kept: dict[ProgramKey, Program] = remembered(bridge, "programs", dict)
    if key is None:
        kept.clear()
    else:
        kept.pop(key, None)


@contextmanager
def failing_as_program(doing: str) -> Iterator[None]:
    """Raises what other code raises in the body as a `ProgramFailedError`."""
    try:
        yield
    except (SteerlabError, ProgramFailedError):
        raise
    except Exception as error:  # foreign code, which may fail in any way
        raise ProgramFailedError(doing, error) from error


def _crowd(programs: list[Program]) -> bool:
    """Whether the caches of programs take more than their share of a GPU."""
    device = programs[0].device
    if device.type != "cuda":
        return False
    held = sum(program.cache.n_bytes for program in programs)
    return held > _SHARE_OF_MEMORY * torch.cuda.get_device_properties(device).total_memory


def _in_order(model: Any) -> list[torch.device]:
    """The devices of a model, that of its embedding first."""
    first = model.get_input_embeddings().weight.device
    return [first, *(device for device in devices_of(model) if device != first)]


def _compiled(method: Any) -> Any:
    """The method with what no kernel of ours computes fused by inductor.

    Its code object is its own, so that no other program's compiled code is found under it.
    """
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{id(method.__self__):x}")
    copied = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(types.MethodType(copied, method.__self__), fullgraph=True, dynamic=False)
