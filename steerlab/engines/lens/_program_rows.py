"""Rows on a program: the prompt runs on the fast backend, every further token as a replay."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from steerlab._kernels.availability import runs_kernels
from steerlab._runtime.capturing import plan_hooks
from steerlab._runtime.device_transfer import devices_of
from steerlab._runtime.growth import fresh_rows
from steerlab._runtime.hooks import alone
from steerlab._runtime.model_state import remembered
from steerlab._runtime.rows import left_padded
from steerlab._runtime.self_comparison import found_out, is_out_of_memory, ordinary_tokens, rounding_of, undisturbed
from steerlab._runtime.step import Step, running
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import InputError
from steerlab.engines.lens._backends import FastBackend, embedding_device, unhooked_model_of
from steerlab.engines.lens._fixed_cache import fits
from steerlab.engines.lens._info import context_length
from steerlab.engines.lens._program import (
    Program,
    ProgramFailedError,
    ProgramKey,
    drop_program,
    failing_as_program,
    program_for,
)
from steerlab.steering._run import PlanRun
from steerlab.steering.operators._add import add
from steerlab.steering.operators._edit import Edit
from steerlab.steering.plan import Plan
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import All
from steerlab.steering.vectors import SteeringVector

CAPACITY_STEP = 64
COMPARED = "A short comparison on this model found"
NO_MEMORY = "Memory did not suffice for the short comparison that comes before a model's first program"

TRIED = ((1, 512), (3, CAPACITY_STEP), (17, 512), (33, CAPACITY_STEP))
"""Rows and capacities of the comparison. Kernels compute up to 2, 16 and 32 rows each in a way of their own, and leave
more to torch; they divide the slots of a cache among processors if rows are few and slots many. Without kernels the
first two do: one row, and several of different lengths."""

_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of attention under which both sides are compared: not cuDNN's, which plans anew for every length it meets."""

_LONGEST, _STEPS, _POOL = 8, 3, 67
"""Of the comparison: tokens of its longest prompts, steps after them, and different tokens; a prime: rows differ."""


class ProgramRows:
    """Rows whose prompt runs on the unhooked model and whose every further token runs a program.

    Args:
        bridge: the TransformerBridge.
        run: the plan at work.
        prompt_lens: prompt length of each row.
        max_new_tokens: tokens that may follow.
        is_compiled: whether the program's kernels are fused.
    """

    can_narrow = False

    def __init__(
        self, bridge: Any, run: PlanRun, prompt_lens: Sequence[int], max_new_tokens: int, *, is_compiled: bool
    ) -> None:
        self.run, self.prompt_lens, self.max_new_tokens = run, list(prompt_lens), max_new_tokens
        self._at = {point: _edits_at(run.plan, point) for point in run.plan.hook_points}
        edited = tuple((point, tuple(len(e.terms()) for _, e in edits)) for point, edits in self._at.items())
        capacity = _capacity(max(prompt_lens) + max_new_tokens, context_length(bridge))
        self._bridge, self._key = bridge, ProgramKey(len(self.prompt_lens), capacity, edited, is_compiled)
        self.backend = FastBackend(bridge)
        self.device = embedding_device(self.backend.model)
        self._lens = torch.tensor(self.prompt_lens, device=self.device)
        self.program: Program | None = None
        self._n_steps = 0
        self._is_foreseen = run.is_foreseen

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Runs the body while no other thread runs the model; each of the methods below is called in one.

        Raises:
            InputError: if a weight was replaced after the prompts had run, whose place a recording still reads.
        """
        with alone(self.backend.model):
            if self.program is not None and self.program.is_outdated:
                raise InputError(
                    "A weight of the model was replaced since this stream's last piece, so that the next would come "
                    "from another model than the ones before; begin the stream again."
                )
            yield

    def extend(self, ids: Tensor, valid: Tensor, *, keep: int = 0) -> Tensor:
        """Takes the program and runs the prompts, left-padded; once, before any step.

        Raises:
            ProgramFailedError: if the program cannot be made, or the prompts cannot run on its cache.
        """
        with self._failing():
            return self._extend(ids, valid, keep)

    def _extend(self, ids: Tensor, valid: Tensor, keep: int) -> Tensor:
        self.program = program = program_for(self._bridge, self._key)
        program.user = weakref.ref(self)  # rows know the bridge, and programs outlive it otherwise
        for point, buffers in program.buffers.items():
            buffers.fill([edit for _, edit in self._at[point]])
        program.begin()
        ids, valid = ids.to(self.device), valid.to(self.device)
        width = ids.shape[1]
        positions = valid.cumsum(dim=-1) - 1
        tokens = RowPositions(positions.masked_fill(~valid, -1), self._lens, token_ids=ids)
        program.mask.zero_()  # later slots too, so that prompts of one length need no mask, as on the fast backend
        program.mask[:, :width] = valid.long()
        program.counts[:, 0] = valid.sum(dim=-1)
        self.run.begin(tokens)
        with self.backend.attached(plan_hooks(self.run)), running(Step(tokens, 0, torch.arange(len(ids)))):
            output = self.backend.model(
                input_ids=ids,
                attention_mask=program.mask,
                past_key_values=program.cache,
                use_cache=True,
                position_ids=positions.clamp_min(0),
                logits_to_keep=keep,
            )
        program.mask[:, width:] = 1
        program.cache.advance(width)
        if self._is_foreseen and self.max_new_tokens > 1:
            after = torch.arange(self.max_new_tokens - 1, device=self.device)
            self._place(self.run.begin(RowPositions(self._lens[:, None] + after, self._lens)), 0)
        return output.logits[:, -keep:]

    def step(self, tokens: Tensor) -> Tensor:
        """Runs one token per row; a negative id means that the row has ended."""
        program = self._own()
        program.feed(tokens, self._n_steps)
        if program.buffers and not self._is_foreseen:
            fed = tokens.to(self.device)
            positions = program.counts.masked_fill(fed[:, None] < 0, -1)
            ran = RowPositions(positions, self._lens, token_ids=fed.clamp_min(0)[:, None])
            self._place(self.run.begin(ran), self._n_steps)
        self._n_steps += 1
        with self._failing():
            return program.step()

    @property
    def known_failure(self) -> str | None:
        """Why an earlier program for the same failed; None if none did."""
        return _failures(self._bridge).get(self._key)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Drops a program that fails in the body, and remembers why it did if it would again."""
        try:
            with failing_as_program("A program"):
                yield
        except ProgramFailedError as error:
            if error.is_lasting:
                _failures(self._bridge)[self._key] = error.reason
            drop_program(self._bridge, self._key if error.is_lasting else None)
            raise

    def drop(self) -> None:
        """Lets the program go, with its cache, unless it is in use elsewhere."""
        drop_program(self._bridge, self._key)

    def _own(self) -> Program:
        """The program, if no other rows have taken it."""
        assert self.program is not None
        if self.program.user() is not self:
            raise InputError(
                "Another generation of this shape has begun since this stream's last piece, and both use one program's "
                "tensors; finish one first, or stream with engine='fast'."
            )
        return self.program

    def _place(self, rows: RowPositions, first: int) -> None:
        """States which of these generated tokens the edits reach, and how strongly."""
        for point, buffers in self._own().buffers.items():
            for k, (_, edit) in enumerate(self._at[point]):
                factors = edit.factors(rows)
                strength = edit.scale if factors is None else edit.scale * factors
                buffers.place(k, first, self.run.selects(edit, rows), strength)

    def narrow(self, kept: Tensor) -> None:
        """Never called: the batch of a program is fixed."""
        raise NotImplementedError

    def settle(self) -> None:
        """Hands the program's counts to the plan's run; without a token to generate, nothing has run."""
        if self.program is None:
            return
        for point, buffers in self._own().buffers.items():
            for k, (index, _) in enumerate(self._at[point]):
                self.run.add_counts(index, buffers.edited[k], buffers.changes[k])


def _failures(bridge: Any) -> dict[ProgramKey, str]:
    """Why programs failed, by what they were for."""
    return remembered(bridge, "failed programs", dict)


def _edits_at(plan: Plan, point: HookPoint) -> list[tuple[int, Edit]]:
    return [(index, edit) for index, edit in enumerate(plan) if edit.hook_point == point]


def _capacity(needed: int, context: int | None) -> int:
    """Tokens that a row of a program can hold: few different ones, so that calls of similar lengths share a program.

    No more than the model's context, for which some families make their tables.
    """
    step = max(CAPACITY_STEP, 1 << max(0, needed.bit_length() - 3))
    rounded = -(-needed // step) * step
    return rounded if context is None else max(needed, min(rounded, context))


def why_no_program(bridge: Any, plan: Plan, *, is_compiled: bool) -> str | None:
    """Why no program can be made for this model and plan, in a sentence; None if one can."""
    model = unhooked_model_of(bridge).model
    devices = devices_of(model)
    if is_compiled and len(devices) > 1:
        return "The model is spread over several devices."
    if any(torch.is_autocast_enabled(kind) for kind in {device.type for device in devices}):
        return "Autocast is on, whose dtypes a program would keep."
    if not fits(model.config.get_text_config()):
        return "The model keeps more than keys and values of attention."
    without = next((edit.operator for edit in plan if not edit.operator.has_formula), None)
    if without is not None:
        return f"Edits of a program share one form, and {without} states no terms."
    if any(point.site == "resid_mid" for point in plan.hook_points):
        return "The plan edits resid_mid."
    try:
        different = found_out(bridge, "program difference", lambda: _difference(bridge), weights=model)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip().partition("\n")[0].rstrip(".")
        return f"{NO_MEMORY} ({said})."
    return None if different is None else f"{COMPARED} {different}."


def _difference(bridge: Any) -> str | None:
    """What a program, not compiled, gives otherwise than the fast backend on this model, in words.

    Raises:
        Exception: one that `is_out_of_memory`, which says nothing of the model.
    """
    rounding = rounding_of(bridge.original_model)
    tried = TRIED if runs_kernels(bridge.original_model.get_input_embeddings().weight) else TRIED[:2]
    try:
        with undisturbed(bridge.original_model), sdpa_kernel(_WITHOUT_PLANS):
            is_same = all(rounding.explains(*_both(bridge, n_rows, capacity)) for n_rows, capacity in tried)
    except Exception as error:  # foreign code, which may fail in any way; the fast engine then runs
        cause = error.__cause__ if isinstance(error, ProgramFailedError) and error.__cause__ else error
        if is_out_of_memory(cause):
            raise cause from None
        return f"that {type(cause).__name__} is raised: {cause}"
    return None if is_same else "other logits than the fast engine's"


def _both(bridge: Any, n_rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Logits by a program and by the fast backend: after prompts of several lengths, and at each step that follows."""
    backend, context = FastBackend(bridge), context_length(bridge)
    capacity = capacity if context is None else max(_LONGEST + _STEPS, min(capacity, context))
    pool = ordinary_tokens(backend.model, _POOL)
    lens = [_LONGEST - 3 * row % _LONGEST for row in range(n_rows)]
    rows = [[pool[(5 * row + k) % _POOL] for k in range(length + _STEPS)] for row, length in enumerate(lens)]
    prompts = left_padded([tokens[:-_STEPS] for tokens in rows])
    following = torch.tensor([tokens[-_STEPS:] for tokens in rows]).T
    runs = [PlanRun(_trial(bridge), n_rows) for _ in range(2)]
    ours = ProgramRows(bridge, runs[0], lens, capacity - _LONGEST, is_compiled=False)
    plain = fresh_rows(backend.model, runs[1], lens, "step")
    try:
        with ours.alone():
            found = [ours.extend(*prompts, keep=1), *(ours.step(tokens).clone() for tokens in following)]
    finally:
        ours.drop()
    with backend.attached(plan_hooks(runs[1])):
        wanted = [plain.extend(*prompts, keep=1), *(plain.step(tokens) for tokens in following)]
    return torch.cat(found, dim=1), torch.cat(wanted, dim=1)


def _trial(bridge: Any) -> Plan:
    """A plan with an edit in the middle of the model, at every position."""
    layer = bridge.cfg.n_layers // 2
    values = torch.randn(bridge.cfg.d_model, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return Plan(add(SteeringVector.from_tensor(values, layer=layer), coef=1.0, where=All()))
