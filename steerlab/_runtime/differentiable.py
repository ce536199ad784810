"""Log-probabilities of targets as a differentiable function of a change of the stream at one hook point."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab._runtime.backend import HookedModel
from steerlab._runtime.capturing import HookPair, edit_pairs
from steerlab._runtime.rows import left_padded
from steerlab._runtime.step import current_step
from steerlab._runtime.whole_rows import WholeRows
from steerlab.core._batching import batches_by_tokens
from steerlab.core._hook_points import HookPoint
from steerlab.core._text import EncodedPair
from steerlab.measures.log_probs import chosen_log_probs
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan
from steerlab.steering.positions._prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions._rows import Marks
from steerlab.steering.positions._sets import Where

Change: TypeAlias = Callable[
    [Float[Tensor, "batch pos d_model"], Bool[Tensor, "batch pos"], Int[Tensor, " batch"]], Tensor
]
"""What is added to the stream: a function of the stream (float32, detached), of the positions where it is added, and of
each row's place among the rows asked for, to what broadcasts to the stream's shape."""


class DifferentiableScores:
    """Teacher-forced scores of (context, target) pairs with a change of the stream at one hook point.

    A target's tokens count as generated, as in `LensEngine.score`. Each pair runs whole and without a cache. The stream
    is detached before the change, so that nothing below the hook point is kept for the backward pass; the model's
    parameters are only read, and take no gradient meanwhile.

    Args:
        model: the model.
        pairs: contexts and targets, each with the prompt it came from.
        point: where the stream is changed.
        where: the positions.
        batch_tokens: tokens per pass, padding included.
    """

    def __init__(
        self,
        model: HookedModel,
        pairs: Sequence[tuple[EncodedPair, PromptContent]],
        point: HookPoint,
        where: Where,
        batch_tokens: int,
    ) -> None:
        self._model, self._pairs = model, list(pairs)
        self._point, self._where = point, where
        self._batch_tokens = batch_tokens
        self.tokens_run = 0

    @property
    def lengths(self) -> list[int]:
        """How many tokens each pair's target has."""
        return [len(pair.target_ids) for pair, _ in self._pairs]

    def log_probs(self, rows: Sequence[int], vector: Float[Tensor, " d_model"]) -> Float[Tensor, " rows"]:
        """Summed log p of the targets of these pairs, in nats, float32 on the CPU, in this order.

        Args:
            rows: which pairs, by index.
            vector: what is added; a gradient flows back to it.
        """
        return self.changed_log_probs(rows, lambda stream, chosen, places: vector)

    def changed_log_probs(self, rows: Sequence[int], change: Change) -> Float[Tensor, " rows"]:
        """As `log_probs`, with any change of the stream; a gradient flows back to what it is made of.

        Args:
            rows: which pairs, by index.
            change: called once a pass, with rows of similar length; `tokens_run` counts the tokens of these passes.
        """
        chosen = [self._pairs[row] for row in rows]
        lengths = [len(pair.context_ids) + len(pair.target_ids) for pair, _ in chosen]
        found: dict[int, Tensor] = {}
        for batch in batches_by_tokens(lengths, self._batch_tokens):
            found.update(zip(batch, self._batch([chosen[i] for i in batch], torch.tensor(batch), change), strict=True))
        return torch.stack([found[i] for i in range(len(chosen))])

    def _batch(
        self, chosen: Sequence[tuple[EncodedPair, PromptContent]], places: Tensor, change: Change
    ) -> Float[Tensor, " rows"]:
        pairs = [pair for pair, _ in chosen]
        hooks = self._hooks(change, places, marks_for([self._where], [c.before(p.context_ids) for p, c in chosen]))
        backend = self._model.exact_backend(hooks)
        rows = WholeRows(backend.model, PlanRun(Plan(), len(pairs)), [len(p.context_ids) for p in pairs])
        keep = max(len(pair.target_ids) for pair in pairs)
        fed = [(*p.context_ids, *p.target_ids[:-1]) for p in pairs]
        self.tokens_run += sum(map(len, fed))
        wants_graph = torch.is_grad_enabled()
        # the bridge turns gradients off
        with backend.attached(hooks), frozen(backend.model), torch.set_grad_enabled(wants_graph):
            logits = rows.extend(*left_padded(fed), keep=keep)
        tokens, own = left_padded([pair.target_ids for pair in pairs], logits.device)
        return chosen_log_probs(logits, tokens).masked_fill(~own, 0.0).sum(dim=1).float().cpu()

    def _hooks(self, change: Change, places: Tensor, marks: Marks | None) -> list[HookPair]:
        def edit(point: HookPoint, value: Tensor) -> Tensor:
            tokens = current_step().tokens
            known = tokens if marks is None else replace(tokens, marks=marks)
            mask = self._where.resolve(known.on(value.device))
            stream = value.detach()
            added = change(stream.float(), mask, places)
            return torch.where(mask[..., None], stream + added.to(value.device, value.dtype), stream)

        return edit_pairs([self._point], edit)


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """A model whose parameters take no gradient while the body runs; which did before is restored afterwards."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
