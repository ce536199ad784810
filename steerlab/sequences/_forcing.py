"""Teacher forcing: rows run through the decoder once, and the head applied to the positions that predict a response.

Rows are padded on the right, where a causal model cannot see it: no mask is needed, and every number is a function of
the row's own tokens alone, whatever stood around them in the caller's padded batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from steerlab._runtime.arguments import optional_arguments
from steerlab._runtime.device_transfer import queued
from steerlab._runtime.model_parts import ModelParts
from steerlab._runtime.rows import right_padded_ids
from steerlab._runtime.sharding import as_forward_of, is_distributed, is_sharded
from steerlab.core._not_finite_errors import not_finite
from steerlab.core.receipts import Receipt
from steerlab.core.token_sets import TokenSets
from steerlab.sequences._head import HeadResult, HeadSpec, measure_head
from steerlab.sequences._plan_resolver import PlanResolver, apply_plan
from steerlab.sequences._precision import autocasting
from steerlab.sequences.config import ForcingPrecision, FunctionalPrecision
from steerlab.steering._plan_assignment import AssignedPlan
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._prompt_lookup import PromptContent
from steerlab.steering.positions._rows import RowPositions


@dataclass(frozen=True)
class ForcedRow:
    """One response with its prompt, and its place in the call.

    Attributes:
        ids: those of the prompt, at least one, then those to score, at least one.
        n_prompt: how many are the prompt's.
        prompt_index: b.
        sample_index: g.
        row_index: b·G + g.
        support: what each id was drawn from, to be replayed; None recomputes it.
    """

    ids: Int[np.ndarray, " tokens"]
    n_prompt: int
    prompt_index: int
    sample_index: int
    row_index: int
    support: TokenSets | None = None

    @property
    def n_scored(self) -> int:
        """How many ids are scored."""
        return len(self.ids) - self.n_prompt

    @property
    def run_ids(self) -> Int[np.ndarray, " run"]:
        """The ids that are run: all but the last, which predicts nothing."""
        return self.ids[:-1]


@dataclass(frozen=True)
class Forcing:
    """How rows are run.

    Attributes:
        parts: the model's parts.
        resolver: its layers, for plans.
        spec: how the head's logits are measured.
        precision: autocast of the pass.
        state: parameters and buffers to run with, by name; None runs the live model.
        n_prompts: prompts of the call.
    """

    parts: ModelParts
    resolver: PlanResolver
    spec: HeadSpec
    precision: ForcingPrecision | FunctionalPrecision
    state: Mapping[str, Tensor] | None
    n_prompts: int

    def run(self, rows: Sequence[ForcedRow], assigned: AssignedPlan) -> tuple[HeadResult, list[Receipt]]:
        """Scores a batch of rows under one plan; results are of all rows' tokens, one row after the other."""
        run = PlanRun(assigned.plan, len(rows), self._contents(rows) if len(assigned.plan) else None)
        late: list[Callable[[], None]] = []
        result = HeadResult(**self.parts.in_forward(lambda: self._measured(rows, run, late)))
        receipts = run.receipts(
            token_ids=[row.run_ids for row in rows],
            prompt_lens=[row.n_prompt for row in rows],
            prompt_indices=[row.prompt_index for row in rows],
            row_indices=[row.row_index for row in rows],
            plan_hash=assigned.given_hash,
        )
        for check in late:
            check()
        return result, receipts

    def _contents(self, rows: Sequence[ForcedRow]) -> list[PromptContent]:
        """What a plan may look up in each row's prompt."""
        return [
            PromptContent(
                row.prompt_index,
                self.n_prompts,
                tuple(row.ids[: row.n_prompt].tolist()),
                tokenizer=self.resolver.tokenizer,
            )
            for row in rows
        ]

    def _measured(self, rows: Sequence[ForcedRow], run: PlanRun, late: list[Callable[[], None]]) -> dict[str, Any]:
        """The fields of the result, a plain dictionary, which hooks of a sharded model can look into.

        `late` takes a check that may as well be made last: it waits for the device, which has the head to work on.
        """
        hidden, weight, bias, tokens = self._final_states(rows, run)
        finite = hidden.detach().amax(dim=-1).isfinite() & hidden.detach().amin(dim=-1).isfinite()
        replayed = [row.support for row in rows if row.support is not None]
        supports = TokenSets.joined(replayed) if replayed else None
        head = self.parts.head
        check = partial(self._check_finite, finite, rows, run, hidden.dtype)
        is_harmless = not len(run.plan) and supports is None and self.spec.bears_any_states(weight)
        if is_harmless and not self.parts.is_sharded:
            late.append(check)
        else:
            check()
        if is_sharded(head):  # its weight is whole in its own forward only

            def of_head(given: Tensor) -> dict[str, Any]:
                return vars(measure_head(self.spec, given, head.weight, head.bias, tokens, supports))

            return as_forward_of(head, of_head, hidden)
        return vars(measure_head(self.spec, hidden, weight, bias, tokens, supports))

    def _check_finite(
        self, finite: Bool[Tensor, " scored"], rows: Sequence[ForcedRow], run: PlanRun, dtype: torch.dtype
    ) -> None:
        """Nothing, if the final states of all scored tokens are finite.

        Raises:
            NonFiniteError: otherwise; names the first response.
        """
        if bool(finite.all()):
            return
        ends = np.cumsum([row.n_scored for row in rows])
        row = rows[int(np.searchsorted(ends, int((~finite).nonzero()[0]), side="right"))]
        what = f"The final states of prompt {row.prompt_index}, response {row.sample_index},"
        raise not_finite(what, dtype, steered=bool(len(run.plan)))

    def _final_states(self, rows: Sequence[ForcedRow], run: PlanRun) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Final hidden states where a token is predicted, the head's weight and bias as they ran, and those tokens."""
        device = self.parts.device
        ids = right_padded_ids([row.run_ids for row in rows]).to(device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        if len(run.plan):
            lens, ends = torch.tensor([(row.n_prompt, len(row.run_ids)) for row in rows], device=device).T
            own = positions.masked_fill(positions >= ends[:, None], -1)
            run.begin(RowPositions(own, lens, token_ids=ids))
        carrier = _Carrier(self.parts)
        with ExitStack() as stack:
            if len(run.plan):
                stack.enter_context(apply_plan(self.resolver.layers, run))
            stack.enter_context(autocasting(self.precision, ids.device))
            if self.state is None:
                hidden, weight, bias = carrier(ids, positions)
            else:
                named = {f"root.{name}": value for name, value in self.state.items()}
                hidden, weight, bias = torch.func.functional_call(carrier, named, (ids, positions))
        places, tokens = queued(_scored(rows, ids.shape[1]), hidden.device)
        chosen: Any = _Chosen.apply(hidden, places)
        return chosen.to(weight.device), weight, bias, tokens.to(weight.device)


def _scored(rows: Sequence[ForcedRow], width: int) -> Int[Tensor, "2 scored"]:
    """Where each scored token is predicted, counted through rows of this width, and the token."""
    found = np.empty((2, sum(row.n_scored for row in rows)), dtype=np.int64)
    end = 0
    for k, row in enumerate(rows):
        start, end = end, end + row.n_scored
        first = k * width + row.n_prompt - 1
        found[0, start:end] = np.arange(first, first + row.n_scored)
        found[1, start:end] = row.ids[row.n_prompt :]
    return torch.from_numpy(found)


class _Chosen(torch.autograd.Function):
    """Rows of [batch, pos, d_model] by their places in [batch·pos]; none twice, so that the way back need not add."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor) -> Tensor:
        ctx.shape = hidden.shape
        ctx.save_for_backward(places)
        return hidden.flatten(0, 1).index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.shape)
        whole.view(-1, ctx.shape[-1]).index_copy_(0, places, gradient)
        return whole, None


class _Carrier(nn.Module):
    """Holds the user's model for one call, so that its parts can run with other parameters under the model's names."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        self.root = parts.root
        self.__dict__["parts"] = parts  # not as a submodule: the parts lie inside root already

    def forward(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Final hidden states [batch, pos, d_model], and the head's weight and bias that are in place now."""
        parts: Any = self.__dict__["parts"]
        known = {"position_ids": positions, "use_cache": False}
        options = {name: known[name] for name in optional_arguments(parts.decoder, *known)}
        hidden = parts.decoder(input_ids=ids, **options).last_hidden_state
        hidden = hidden.full_tensor() if is_distributed(hidden) else hidden
        return hidden, parts.head.weight, parts.head.bias
