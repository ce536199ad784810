"""Log-probabilities of targets as a differentiable function of one vector that is added to the stream."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core.batching import batches_by_tokens
from steerlab.core.hook_points import HookPoint
from steerlab.core.text import EncodedPair
from steerlab.measures.log_probs import chosen_log_probs
from steerlab.runtime.backend import HookedModel
from steerlab.runtime.capturing import HookPair, edit_pairs
from steerlab.runtime.rows import left_padded
from steerlab.runtime.step import current_step
from steerlab.runtime.whole_rows import WholeRows
from steerlab.steering.plan import Plan
from steerlab.steering.positions.prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions.rows import Marks
from steerlab.steering.positions.sets import Where
from steerlab.steering.run import PlanRun


class DifferentiableScores:
    """Teacher-forced scores of (context, target) pairs with a vector added at one hook point.

    A target's tokens count as generated, as in `LensEngine.score`. Each pair runs whole and without a cache. The stream
    is detached before the addition, so that nothing below the hook point is kept for the backward pass; the model's
    parameters are only read.

    Args:
        model: the model.
        pairs: contexts and targets, each with the prompt it came from.
        point: where the vector is added.
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

    def log_probs(self, rows: Sequence[int], vector: Float[Tensor, " d_model"]) -> Float[Tensor, " rows"]:
        """Summed log p of the targets of these pairs, in nats, float32 on the CPU, in this order.

        Args:
            rows: which pairs, by index.
            vector: what is added; a gradient flows back to it.
        """
        chosen = [self._pairs[row] for row in rows]
        lengths = [len(pair.context_ids) + len(pair.target_ids) for pair, _ in chosen]
        found: dict[int, Tensor] = {}
        for batch in batches_by_tokens(lengths, self._batch_tokens):
            found.update(zip(batch, self._batch([chosen[i] for i in batch], vector), strict=True))
        return torch.stack([found[i] for i in range(len(chosen))])

    def _batch(self, chosen: Sequence[tuple[EncodedPair, PromptContent]], vector: Tensor) -> Float[Tensor, " rows"]:
        pairs = [pair for pair, _ in chosen]
        hooks = self._hooks(vector, marks_for([self._where], [c.before(p.context_ids) for p, c in chosen]))
        backend = self._model.exact_backend(hooks)
        rows = WholeRows(backend.model, PlanRun(Plan(), len(pairs)), [len(p.context_ids) for p in pairs])
        keep = max(len(pair.target_ids) for pair in pairs)
        wants_graph = torch.is_grad_enabled()
        with backend.attached(hooks), torch.set_grad_enabled(wants_graph):  # the bridge turns gradients off
            logits = rows.extend(*left_padded([(*p.context_ids, *p.target_ids[:-1]) for p in pairs]), keep=keep)
        tokens, own = left_padded([pair.target_ids for pair in pairs], logits.device)
        return chosen_log_probs(logits, tokens).masked_fill(~own, 0.0).sum(dim=1).float().cpu()

    def _hooks(self, vector: Tensor, marks: Marks | None) -> list[HookPair]:
        def add(point: HookPoint, value: Tensor) -> Tensor:
            tokens = current_step().tokens
            known = tokens if marks is None else replace(tokens, marks=marks)
            mask = self._where.resolve(known.on(value.device))[..., None]
            stream = value.detach()
            return torch.where(mask, stream + vector.to(value.device, value.dtype), stream)

        return edit_pairs([self._point], add)
