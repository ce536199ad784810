"""Scoring in batches: which rows run, with which parameters and precision, and what to refuse."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from steerlab._runtime.decoding import eos_token_ids
from steerlab._runtime.evaluation import evaluating
from steerlab._runtime.model_parts import ModelParts
from steerlab._runtime.modules import modules_in
from steerlab.core._progress import progress
from steerlab.core._warning import warn
from steerlab.core.errors import ContextLengthError, InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt
from steerlab.measures.nucleus import truncates
from steerlab.sequences._assembly import Assembly
from steerlab.sequences._data_parallel import inside_forward
from steerlab.sequences._forcing import ForcedRow, Forcing
from steerlab.sequences._head import HeadResult, HeadSpec
from steerlab.sequences._overrides import Overrides
from steerlab.sequences._plan_resolver import PlanResolver
from steerlab.sequences._precision import active_dropout, precise
from steerlab.sequences._sharded_passes import check_as_it_is, joined, passes_for_others, reshard
from steerlab.sequences.config import ForcingPrecision, FunctionalPrecision, ProcessorConfig
from steerlab.sequences.types import BatchedSequences, Support
from steerlab.steering._plan_assignment import AssignedPlan, PlanArgument, group_by_plan


@dataclass(frozen=True)
class ScoringRequest:
    """The arguments of one call; see `SequenceProcessor.teacher_force_logprobs`.

    Attributes:
        with_grad: keep the graph.
        rows_at_once: rows per batch.
        params: parameters by name, or None.
        buffers: buffers by name, or None.
        plan: a plan, None, or a list with one per prompt.
        with_shape: also measure the shape of every distribution.
        chunk_rows: rows of logits at once; None takes what fits.
        averaged: let a DistributedDataParallel wrapper average the gradients of the backward pass that follows. Not for
            a caller that takes `torch.autograd.grad`, which such a wrapper cannot see.
        support: `recomputed` takes the nucleus of this pass, `replayed` the set that each token was drawn from.
        with_flips: also say where the two differ.
    """

    with_grad: bool
    rows_at_once: int
    params: Mapping[str, Tensor] | None = None
    buffers: Mapping[str, Tensor] | None = None
    plan: PlanArgument = None
    with_shape: bool = False
    chunk_rows: int | None = None
    averaged: bool = True
    support: Support = "recomputed"
    with_flips: bool = False

    @property
    def is_overridden(self) -> bool:
        """Whether parameters or buffers are given."""
        return self.params is not None or self.buffers is not None


Batch = tuple[list[ForcedRow], AssignedPlan]


@dataclass(frozen=True)
class Scorer:
    """Scores sequences on one model.

    Attributes:
        parts: the model's parts.
        resolver: its layers, for plans.
        overrides: makes parameter mappings.
        tokenizer: names its end-of-text ids.
        config: the configuration.
    """

    parts: ModelParts
    resolver: PlanResolver
    overrides: Overrides
    tokenizer: Any
    config: ProcessorConfig

    def run(self, sequences: BatchedSequences, request: ScoringRequest) -> tuple[Assembly, list[Receipt]]:
        """Scores every response; receipts are in order of rows."""
        self.parts.check_head()
        assigned = self.resolver.assign(request.plan, sequences.n_prompts)
        rows = forced_rows(sequences, self.parts)
        replays = must_replay(sequences, request.support, self.config.generation.policy, self.parts.d_vocab)
        if replays:
            rows = [with_support(row, sequences) for row in rows]
        assembly = Assembly(sequences, self.config, request.with_grad, request.support)
        receipts: list[Receipt] = []
        with ExitStack() as stack:
            stack.enter_context(precise(self.config.precision))
            stack.enter_context(torch.set_grad_enabled(request.with_grad))
            if request.with_grad:
                self._check_live(request)
            else:
                stack.enter_context(evaluating(self.parts.root))
            forcing = self._forcing(request, sequences.n_prompts, replays)
            batches = _batches(rows, assigned, request.rows_at_once)
            n_batches = len(batches)
            if self.parts.is_sharded:
                batches += passes_for_others(self.parts, batches)

            def work() -> list[dict[str, Any]]:
                return _in_turn(forcing, batches, receipts)

            averager = self.parts.averager if request.with_grad and request.averaged else None
            results = work() if averager is None else inside_forward(averager, work)
            if self.parts.is_sharded and request.with_grad:
                results = joined(results)
            elif self.parts.is_sharded:
                reshard(self.parts.root)
            for (batch, _), result in zip(batches[:n_batches], results[:n_batches], strict=True):
                assembly.take(batch, HeadResult(**result))
        receipts = [receipt for receipt in receipts if receipt.row_index >= 0]
        receipts.sort(key=lambda receipt: receipt.row_index)
        assembly.receipts = tuple(receipts)
        return assembly, receipts

    def _forcing(self, request: ScoringRequest, n_prompts: int, replays: bool) -> Forcing:
        state = self._state(request)
        cast = self._cast(request.with_grad, functional=request.is_overridden or not request.with_grad)
        pass_precision = self._pass_precision(request.with_grad)
        named = eos_token_ids(self.parts.causal, self.tokenizer)
        spec = HeadSpec(
            transform=self.parts.transform,
            policy=self.config.generation.policy,
            compute_dtype=cast.dtype if cast.autocast and isinstance(cast.dtype, torch.dtype) else None,
            measure_dtype=self.config.precision.measure_dtype,
            cast_logits=pass_precision.cast_logits_fp32,
            with_shape=request.with_shape,
            eos_ids=tuple(token for token in sorted(named) if token < self.parts.d_vocab),
            chunk_rows=request.chunk_rows,
            with_flips=request.with_flips and replays,
        )
        return Forcing(self.parts, self.resolver, spec, cast, state, n_prompts)

    def _pass_precision(self, with_grad: bool) -> ForcingPrecision:
        return self.config.precision.tf_withgrad if with_grad else self.config.precision.tf_nograd

    def _cast(self, with_grad: bool, functional: bool) -> ForcingPrecision | FunctionalPrecision:
        """Autocast of the pass: that of functional calls where it is on, else the pass's own."""
        own = self.config.precision.func_override
        return own if functional and own.autocast else self._pass_precision(with_grad)

    def _state(self, request: ScoringRequest) -> dict[str, Tensor] | None:
        """What to run with; None for the live model as it is."""
        own = self.overrides
        if self.parts.is_sharded:
            check_as_it_is(self.parts, self.config.precision.func_override, request.is_overridden)
            return None
        if not request.is_overridden and (request.with_grad or not own.widens_any):
            return None
        state = (
            own.at_zero() if request.params is None and not request.with_grad else own.complete(request.params or {})
        )
        return state | own.check_buffers(request.buffers or {})

    def _check_live(self, request: ScoringRequest) -> None:
        if torch.is_inference_mode_enabled():
            raise InputError(
                "Gradients were asked for inside torch.inference_mode(), which keeps no graph; call outside it. Inside "
                "torch.no_grad() it works."
            )
        training = [module for module in modules_in(self.parts.root) if module.training]
        checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in training)
        if checkpointing and (request.plan is not None or request.is_overridden):
            raise InputError(
                "Gradient checkpointing runs layers again in backward, when a plan's hooks and an override are gone: "
                "the gradients would be wrong. Turn it off, or put the model in evaluation mode."
            )
        if active_dropout(training):
            warn(
                "The model is in training mode and has dropout, so these log-probs are noisy and differ from the "
                "sampler's; call model.eval() for exact ones."
            )


def _batches(rows: Sequence[ForcedRow], assigned: Sequence[AssignedPlan], rows_at_once: int) -> list[Batch]:
    """Rows that run together: of one plan, and of like length, so that little is padded."""
    found: list[Batch] = []
    for one, members in group_by_plan(assigned):
        wanted = set(members)
        mine = sorted((row for row in rows if row.prompt_index in wanted), key=lambda row: len(row.ids))
        found += [(mine[start : start + rows_at_once], one) for start in range(0, len(mine), rows_at_once)]
    return found


def _in_turn(forcing: Forcing, batches: Sequence[Batch], receipts: list[Receipt]) -> list[dict[str, Any]]:
    """The fields of every batch's `HeadResult`, in plain dictionaries, which a wrapper can look into; adds receipts."""
    results = []
    n_rows = sum(len(batch) for batch, _ in batches)
    with progress(n_rows, "score") as bar:
        for batch, one in batches:
            result, edited = forcing.run(batch, one)
            results.append(vars(result))
            receipts += edited
            bar.update(len(batch))
    return results


def forced_rows(sequences: BatchedSequences, parts: ModelParts) -> list[ForcedRow]:
    """Every response that has a token to score.

    Raises:
        ContextLengthError: if a row exceeds the context.
        InputError: for an id outside the vocabulary.
    """
    ids, limit, d_vocab, found = sequences.sequences.cpu().numpy(), parts.context_length, parts.d_vocab, []
    is_known = bool(ids.size) and 0 <= int(ids.min()) and int(ids.max()) < d_vocab  # whatever padding holds
    starts = sequences.attention_masks.bool().cpu().numpy().argmax(axis=-1).tolist()  # of several highest the first
    for b, (end, lens) in enumerate(zip(sequences.prompt_lens, sequences.gen_lens, strict=True)):
        for g, n_response in enumerate(lens):
            own = ids[b, g, starts[b][g] : end + n_response]
            if limit is not None and len(own) > limit:
                raise ContextLengthError(
                    f"Row ({b}, {g}) takes {len(own)} tokens, {len(own) - limit} more than the context of {limit}; "
                    "nothing is cut silently."
                )
            if not is_known:
                _check_ids(own, d_vocab, (b, g))
            if n_response:
                found.append(ForcedRow(own, end - starts[b][g], b, g, b * sequences.n_samples + g))
    return found


def _check_ids(ids: Int[np.ndarray, " tokens"], d_vocab: int, place: tuple[int, int]) -> None:
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < d_vocab:
            raise InputError(f"Row {place} holds token id {token}, outside the vocabulary of {d_vocab}.")


def must_replay(sequences: BatchedSequences, support: str, policy: SamplingPolicy, d_vocab: int) -> bool:
    """Whether scoring takes the supports that the sequences carry; a policy that keeps every token needs none.

    Raises:
        InputError: for another word, or sequences that do not carry supports of this policy and vocabulary.
    """
    if support not in get_args(Support):
        raise InputError(f"support is {' or '.join(map(repr, get_args(Support)))}, got {support!r}.")
    if support == "recomputed":
        return False
    if sequences.policy is not None and sequences.policy != policy:
        raise InputError(
            f"The sequences were drawn under {sequences.policy}, and the configuration now says {policy}: their "
            "supports belong to the first. Set the configuration back, or use support='recomputed'."
        )
    if not truncates(policy) and (sequences.supports is None or sequences.policy is not None):
        return False  # sets of another sampler, given without its policy, may leave tokens out all the same
    if sequences.supports is None:
        raise InputError(
            "support='replayed' needs the sets that the tokens were drawn from, which these sequences do not carry: "
            "draw them with generate_batched(…, with_support=True), or use support='recomputed'."
        )
    found = {sets.d_vocab for row in sequences.supports for sets in row if len(sets)}
    if not found <= {d_vocab}:
        raise InputError(f"The supports are of a vocabulary of {sorted(found)} tokens, the model's has {d_vocab}.")
    return True


def with_support(row: ForcedRow, sequences: BatchedSequences) -> ForcedRow:
    """The row with what its tokens were drawn from."""
    assert sequences.supports is not None
    return replace(row, support=sequences.supports[row.prompt_index][row.sample_index])
