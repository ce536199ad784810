"""Compiled decoding: the unhooked model's one-token pass as one fused program, on a GPU replayed as a CUDA graph.

Everything the pass needs lies in buffers at fixed places: token ids, positions, mask, key-value cache, and for every
edit the directions and gates of its terms and its factor at each row's position. Changing the plan changes the buffers'
contents, not the program, so a sweep over doses or vectors compiles once. Operators without terms are refused by name.
"""

import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from steerlab._runtime.capturing import plan_hooks
from steerlab._runtime.families import CHECKED_FAMILIES
from steerlab._runtime.hooks import install_input_hook, install_output_hook
from steerlab._runtime.model_state import remembered
from steerlab._runtime.step import Step, running
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import InputError
from steerlab.engines.lens._backends import (
    FastBackend,
    attention_kernel,
    embedding_device,
    plain_points,
)
from steerlab.engines.lens._hooking import find_hook_point
from steerlab.engines.lens._unhooked_model import UnhookedModel
from steerlab.steering._run import PlanRun
from steerlab.steering.operators._edit import Edit, norm_kept
from steerlab.steering.plan import Plan
from steerlab.steering.positions._rows import RowPositions

CAPACITY_STEP = 64
_KEPT_PROGRAMS = 8


@dataclass(frozen=True)
class ProgramKey:
    """What a compiled program is made for, with the terms of each edit at each hook point; anything else is data."""

    n_rows: int
    capacity: int
    edited: tuple[tuple[HookPoint, tuple[int, ...]], ...]


class EditBuffers:
    """Terms and factors of the edits at one hook point.

    Args:
        n_terms: how many each edit has.
        n_rows: rows of the batch.
        d_model: width of the stream.
        device: where the layer lies.
    """

    def __init__(self, n_terms: Sequence[int], n_rows: int, d_model: int, device: torch.device) -> None:
        n_edits, self.n_terms = len(n_terms), n_terms
        self.reads = torch.zeros(sum(n_terms), d_model, device=device)
        self.writes = torch.zeros(sum(n_terms), d_model, device=device)
        self.gates = torch.zeros(sum(n_terms), 7, device=device)
        self.keeps = torch.zeros(n_edits, dtype=torch.bool, device=device)
        self.mask = torch.zeros(n_edits, n_rows, dtype=torch.bool, device=device)
        self.factors = torch.zeros(n_edits, n_rows, device=device)
        self.edited = torch.zeros(n_edits, n_rows, dtype=torch.long, device=device)
        self.changes = torch.zeros(n_edits, n_rows, device=device)

    def fill(self, edits: Sequence[Edit]) -> None:
        """Writes a plan's edits at this hook point into the buffers."""
        terms = [term for edit in edits for term in edit.terms()]
        for k, term in enumerate(terms):
            self.reads[k] = 0.0 if term.read is None else term.read
            self.writes[k] = term.write
            self.gates[k] = torch.tensor([*astuple(term.gate), term.bias])
        self.keeps.copy_(torch.tensor([edit.norm is not None for edit in edits]))
        self.edited.zero_()
        self.changes.zero_()

    def __call__(self, h: Tensor) -> Tensor:
        """The stream [rows, 1, d_model] after these edits, each seeing the one before; counts what it did."""
        first = 0
        for k, count in enumerate(self.n_terms):
            wide, mask = h.to(torch.float32), self.mask[k][:, None, None]
            delta = torch.zeros_like(wide)
            for term in range(first, first + count):
                delta = delta + self._gated(term, wide)[..., None] * self.writes[term]
            delta = self.factors[k][:, None, None] * delta
            delta = torch.where(mask, torch.where(self.keeps[k], norm_kept(wide, delta), delta), 0.0)
            self.edited[k].add_(self.mask[k])
            self.changes[k].add_((delta.norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-30))[:, 0])
            h = torch.where(mask, h + delta.to(h.dtype), h)
            first += count
        return h

    def _gated(self, term: int, wide: Tensor) -> Tensor:
        amount, gain, low, high, slope, threshold, bias = self.gates[term].unbind()
        z = wide @ self.reads[term] + bias
        value = amount + slope * z + gain * torch.minimum(torch.maximum(z, low), high)
        return torch.where(z > threshold, value, 0.0)


class Program:
    """One compiled decoding step with its buffers.

    Args:
        bridge: the TransformerBridge.
        key: rows, cache capacity and edited hook points.
    """

    def __init__(self, bridge: Any, key: ProgramKey) -> None:
        from transformers import StaticCache

        self.key = key
        self.device = embedding_device(bridge.original_model)
        self.unhooked = UnhookedModel(bridge.original_model)
        self.unhooked.set_attention(attention_kernel(bridge, "sdpa"))
        self.cache: Any = StaticCache(config=bridge.original_model.config.get_text_config(), max_cache_len=key.capacity)
        self.tokens = torch.zeros(key.n_rows, 1, dtype=torch.long, device=self.device)
        self.counts = torch.zeros(key.n_rows, 1, dtype=torch.long, device=self.device)
        self.mask = torch.zeros(key.n_rows, key.capacity, dtype=torch.long, device=self.device)
        self.buffers = {
            point: EditBuffers(n_terms, key.n_rows, bridge.cfg.d_model, self.device) for point, n_terms in key.edited
        }
        for point, buffers in self.buffers.items():
            name = find_hook_point(bridge, point.name).name
            install = install_input_hook if name.endswith("hook_in") else install_output_hook
            install(self.unhooked.of(plain_points(bridge)[name]), buffers)
        self._forward: Any = torch.compile(_with_unique_code(self._call_model), fullgraph=True, dynamic=False)
        self.user: Callable[[], Any] = lambda: None
        self._graph: Any = None
        self._logits: Tensor | None = None

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

    def step(self) -> Tensor:
        """Runs the pass on what the buffers hold; the logits are valid until the next step."""
        if self.device.type != "cuda":
            return self._forward(self.tokens, self.counts, self.mask)
        graph = self._graph or self._record()
        graph.replay()
        assert self._logits is not None
        return self._logits

    def _record(self) -> Any:
        """Compiles, warms up and records the CUDA graph; the cache's length and all counts are as before."""
        state = [layer.cumulative_length for layer in self.cache.layers]
        state += [t for b in self.buffers.values() for t in (b.edited, b.changes)]
        saved = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward(self.tokens, self.counts, self.mask)
                _restore(state, saved)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._forward(self.tokens, self.counts, self.mask)
        _restore(state, saved)
        return self._graph


class CompiledRows:
    """Rows whose prompt runs on the unhooked model and whose every further token runs a compiled program.

    Args:
        bridge: the TransformerBridge.
        run: the plan at work.
        prompt_lens: prompt length of each row.
        max_new_tokens: tokens that may follow.

    Raises:
        InputError: for an operator without terms, a cache that is not plain, or several devices.
    """

    can_narrow = False

    def __init__(self, bridge: Any, run: PlanRun, prompt_lens: Sequence[int], max_new_tokens: int) -> None:
        self.run = run
        self.prompt_lens = list(prompt_lens)
        needed = max(prompt_lens) + max_new_tokens
        capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
        points = tuple(
            (point, tuple(len(edit.terms()) for _, edit in _edits_at(run, point))) for point in run.plan.hook_points
        )
        self.program = _program(bridge, ProgramKey(len(self.prompt_lens), capacity, points))
        self.program.user = weakref.ref(self)  # rows know the bridge, and programs outlive it otherwise
        self.device = self.program.device
        self.backend = FastBackend(bridge)
        self._lens = torch.tensor(self.prompt_lens, device=self.device)
        self._load_plan()

    def _load_plan(self) -> None:
        for point, buffers in self.program.buffers.items():
            buffers.fill([edit for _, edit in _edits_at(self.run, point)])

    def extend(self, ids: Tensor, valid: Tensor, *, keep: int = 0) -> Tensor:
        """Runs the prompts, left-padded; once, before any step."""
        program, cache = self.program, self.program.cache
        for layer in cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.zero_()
                layer.keys.zero_()  # NaN of an earlier call would pass the mask: 0 times NaN is NaN
                layer.values.zero_()
        ids, valid = ids.to(self.device), valid.to(self.device)
        width = ids.shape[1]
        positions = valid.cumsum(dim=-1) - 1
        tokens = RowPositions(positions.masked_fill(~valid, -1), self._lens, token_ids=ids)
        program.mask.fill_(1)
        program.mask[:, :width] = valid.long()
        program.counts[:, 0] = valid.sum(dim=-1)
        self.run.begin(tokens)
        with self.backend.attached(plan_hooks(self.run)), running(Step(tokens, 0, torch.arange(len(ids)))):
            output = self.backend.model(
                input_ids=ids,
                attention_mask=program.mask,
                past_key_values=cache,
                use_cache=True,
                position_ids=positions.clamp_min(0),
                logits_to_keep=keep,
            )
        return output.logits[:, -keep:]

    def step(self, tokens: Tensor) -> Tensor:
        """Runs one token per row; a negative id means that the row has ended."""
        program = self.program
        if program.user() is not self:
            raise InputError(
                "Another compiled generation of this shape has begun since this stream's last piece, and both use one "
                "program's buffers; finish one first, or stream with engine='fast'."
            )
        fed = tokens.to(self.device)[:, None]
        program.tokens.copy_(fed.clamp_min(0))
        if program.buffers:
            ran = RowPositions(program.counts.masked_fill(fed < 0, -1), self._lens, token_ids=fed.clamp_min(0))
            rows = self.run.begin(ran)
            for point, buffers in program.buffers.items():
                for k, (_, edit) in enumerate(_edits_at(self.run, point)):
                    buffers.mask[k] = self.run.selects(edit, rows)[:, 0]
                    factors = edit.factors(rows)
                    buffers.factors[k] = edit.scale if factors is None else edit.scale * factors[:, 0]
        logits = program.step()
        program.counts += 1
        return logits

    def narrow(self, kept: Tensor) -> None:
        """Never called: the batch of a compiled program is fixed."""
        raise NotImplementedError

    def settle(self) -> None:
        """Hands the program's counts to the plan's run."""
        for point, buffers in self.program.buffers.items():
            for k, (index, _) in enumerate(_edits_at(self.run, point)):
                self.run.add_counts(index, buffers.edited[k], buffers.changes[k])


def why_not_compiled(bridge: Any, plan: Plan) -> str | None:
    """Why no program can be made for this model and plan, in a sentence; None if one can."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    model = bridge.original_model
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "The model is spread over several devices."
    family = model.config.get_text_config().model_type
    if family not in CHECKED_FAMILIES:
        return f"The family {family!r} was not checked on the compiled engine."
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=CAPACITY_STEP)
    if any(type(layer) is not StaticLayer for layer in cache.layers):
        return "The model has sliding-window layers."
    without = next((edit.operator for edit in plan if not edit.operator.has_formula), None)
    if without is not None:
        return f"Compiled edits share one form, and {without} states no terms."
    if any(point.site == "resid_mid" for point in plan.hook_points):
        return "The plan edits resid_mid."
    return None


def _program(bridge: Any, key: ProgramKey) -> Program:
    """The program for a key, made once; the least recently used ones are dropped."""
    kept: dict[ProgramKey, Program] = remembered(bridge, "programs", dict)
    program = kept.pop(key, None) or Program(bridge, key)
    kept[key] = program
    while len(kept) > _KEPT_PROGRAMS:
        kept.pop(next(iter(kept)))
    return program


def _edits_at(run: PlanRun, point: HookPoint) -> list[tuple[int, Any]]:
    return [(index, edit) for index, edit in enumerate(run.plan) if edit.hook_point == point]


def _restore(tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, saved, strict=True):
        tensor.copy_(value)


def _with_unique_code(method: Any) -> Any:
    """The method with a code object of its own, so that no other program's compiled code is found under it."""
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{id(method.__self__):x}")
    copied = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return types.MethodType(copied, method.__self__)
