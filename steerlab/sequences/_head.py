"""The language-model head and everything measured of its logits, in chunks of rows that exist for a moment only.

Logits of a whole batch are never there: forward keeps one chunk at a time and the numbers it gives, backward makes each
chunk's logits again. What is kept is the final hidden states, and per row the last token of its nucleus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab._runtime.autocast import without_autocast
from steerlab._runtime.model_parts import LogitTransform
from steerlab.core.policy import SamplingPolicy
from steerlab.core.token_sets import TokenSets
from steerlab.measures._supports import masks_of, replayed_gradient, replayed_steps
from steerlab.measures.nucleus import nucleus, truncates
from steerlab.measures.steps import SHAPE_FIELDS, PolicySteps, policy_steps, policy_steps_gradient
from steerlab.sequences._fused_head import FusedHead, Wants, is_fused
from steerlab.sequences._sharded_head import VocabularyShards, local_head

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of one chunk of logits, by device, where no kernels run; some half dozen arrays of this size live at once."""

FLIPPED = "flipped"
"""1 where the nucleus of a row's logits is another set than its replayed support, else 0."""


@dataclass(frozen=True)
class HeadSpec:
    """How the head's logits are made and measured.

    Attributes:
        transform: what the model does to the head's output.
        policy: the sampling policy.
        compute_dtype: dtype of the product; None leaves it to the weights.
        measure_dtype: dtype of the measures; None means float32, or the logits' own if wider.
        cast_logits: cast logits to float32 as soon as they arise.
        with_shape: also measure the distribution's shape.
        eos_ids: tokens that end a text.
        chunk_rows: rows at a time; None takes what fits `CHUNK_BYTES`.
        with_flips: also compare replayed supports with the nuclei that these logits have.
    """

    transform: LogitTransform
    policy: SamplingPolicy
    compute_dtype: torch.dtype | None = None
    measure_dtype: torch.dtype | None = None
    cast_logits: bool = True
    with_shape: bool = False
    eos_ids: tuple[int, ...] = ()
    chunk_rows: int | None = None
    with_flips: bool = False

    @property
    def extras(self) -> tuple[str, ...]:
        """What is measured besides log p, log q and entropy."""
        return (SHAPE_FIELDS if self.with_shape else ()) + ((FLIPPED,) if self.with_flips else ())

    def bears_any_states(self, weight: Tensor) -> bool:
        """Whether NaN and infinity do no harm: none where kernels only sum up, perhaps in a search for a nucleus."""
        return is_fused(weight, self.measure_dtype, self.with_shape) and not truncates(self.policy)

    def rows_at_once(self, weight: Tensor, d_vocab: int) -> int:
        if self.chunk_rows is not None:
            return self.chunk_rows
        width = 8 if torch.float64 in (self.measure_dtype, weight.dtype) else 4
        budget = CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cuda"])
        return max(1, budget // (width * d_vocab))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The model's logits of some rows."""
        logits = self.transform(torch.nn.functional.linear(hidden, weight, bias))
        return logits.float() if self.cast_logits and logits.dtype != torch.float64 else logits


@dataclass(frozen=True)
class HeadResult:
    """What the rows are worth, in order; nats.

    Attributes:
        log_probs: log p of each token.
        log_qs: log q of each token; −inf outside the nucleus.
        entropies: entropy of q.
        shape: the fields of `PolicyShape` by name, and `FLIPPED`, detached; empty unless asked for.
    """

    log_probs: Float[Tensor, " rows"]
    log_qs: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"]
    shape: dict[str, Tensor]


def measure_head(
    spec: HeadSpec,
    hidden: Float[Tensor, "rows d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    bias: Float[Tensor, " d_vocab"] | None,
    tokens: Int[Tensor, " rows"],
    supports: TokenSets | None = None,
) -> HeadResult:
    """Log p, log q and entropy of every row, differentiable by hidden states, weight and bias.

    On the given supports, or else on the nuclei that the logits have.

    The nucleus counts as fixed under differentiation, as its members change only at isolated points. The gradient of
    log q is 0 for a token outside the nucleus, where log q is −inf. A `DTensor` weight may have its vocabulary sharded
    over processes, which then all have the same rows.
    """
    local, offset, shards = local_head(weight, bias)
    found = _Head.apply(spec, hidden, local, offset, tokens, supports, shards)
    log_probs, log_qs, entropies, extras = found  # pyright: ignore[reportGeneralTypeIssues]
    return HeadResult(log_probs, log_qs, entropies, dict(zip(spec.extras, extras, strict=bool(spec.extras))))


class _Head(torch.autograd.Function):
    """See `measure_head`; the fourth output holds `spec.extras` as rows."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: HeadSpec,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        supports: TokenSets | None,
        shards: VocabularyShards | None,
    ) -> Any:
        with without_autocast(weight.device.type):
            cast = _in_compute_dtype(spec, hidden, weight, bias)
            if supports is None and shards is None and is_fused(cast[1], spec.measure_dtype, spec.with_shape):
                return _forward_fused(ctx, spec, hidden, weight, bias, tokens)
            parts = _parts(spec, weight, shards, len(hidden))
            measured = [_measure(spec, *cast, tokens, supports, part, shards) for part in parts]
        found, flips = zip(*measured, strict=True)
        edges = None if found[0].edges is None else torch.cat([one.edges for one in found if one.edges is not None])
        ctx.spec, ctx.measured, ctx.supports, ctx.shards = spec, None, supports, shards
        ctx.save_for_backward(hidden, weight, bias, tokens, edges)
        ctx.set_materialize_grads(False)
        extras = [
            torch.cat(flips if name == FLIPPED else [getattr(one.shape, name) for one in found]) for name in spec.extras
        ]
        main = (torch.cat([getattr(one, name) for one in found]) for name in ("log_probs", "log_qs", "entropies"))
        stacked = torch.stack(extras) if extras else hidden.new_empty(0)
        ctx.mark_non_differentiable(stacked)
        return (*main, stacked)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.measured is not None:
            return _backward_fused(ctx, gradients)
        hidden, weight, bias, tokens, edges = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[1:4]
        summed = torch.promote_types(weight.dtype, torch.float32)
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=summed) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=summed) if wants_bias else None
        with without_autocast(weight.device.type):
            rows, matrix, offset = _in_compute_dtype(ctx.spec, hidden, weight, bias)
            for part in _parts(ctx.spec, weight, ctx.shards, len(hidden)):
                by = [None if g is None else g[part] for g in gradients[:3]]
                edge = None if edges is None else edges[part]
                supports = None if ctx.supports is None else ctx.supports[part]
                gradient = _pulled_back(
                    ctx.spec, rows[part], matrix, offset, tokens[part], edge, supports, by, ctx.shards
                )
                if to_hidden is not None:
                    to_hidden[part] = gradient @ matrix if ctx.shards is None else ctx.shards.summed(gradient @ matrix)
                if to_weight is not None:
                    _add_product(to_weight, gradient.T, rows[part])
                if to_bias is not None:
                    to_bias += gradient.sum(dim=0, dtype=summed)
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        return None, to_hidden, to_weight, None if to_bias is None else to_bias.to(bias.dtype), None, None, None


def _forward_fused(
    ctx: Any, spec: HeadSpec, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, matrix, offset = _in_compute_dtype(spec, hidden, weight, bias)
    head = FusedHead(spec.transform, spec.policy, matrix, offset, spec.chunk_rows)
    measured = head.measure(rows.contiguous(), tokens)
    ctx.spec, ctx.measured = spec, measured
    ctx.save_for_backward(hidden, weight, bias, tokens)
    ctx.set_materialize_grads(False)
    shape = hidden.new_empty(0)
    ctx.mark_non_differentiable(shape)
    return measured.log_probs.clone(), measured.log_qs.clone(), measured.entropies.clone(), shape


def _backward_fused(ctx: Any, gradients: Sequence[Any]) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, tokens = ctx.saved_tensors
    by_log_p, by_log_q, by_entropy = gradients[:3]
    with without_autocast(weight.device.type):
        rows, matrix, offset = _in_compute_dtype(ctx.spec, hidden, weight, bias)
        head = FusedHead(ctx.spec.transform, ctx.spec.policy, matrix, offset, ctx.spec.chunk_rows)
        wants = Wants(*ctx.needs_input_grad[1:4])
        found = head.pull_back(rows.contiguous(), tokens, ctx.measured, (by_log_p, by_log_q, by_entropy), wants)
    given = ((found.hidden, hidden), (found.weight, weight), (found.bias, bias))
    return None, *(None if g is None else g.to(of.dtype) for g, of in given), None, None, None


def _measure(
    spec: HeadSpec,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    supports: TokenSets | None,
    part: slice,
    shards: VocabularyShards | None,
) -> tuple[PolicySteps, Tensor]:
    """What is measured of some rows, and whether their nuclei differ from their supports; [0] if nobody asks."""
    logits = _whole_logits(spec, hidden[part], weight, bias, shards)
    eos = torch.tensor(spec.eos_ids, dtype=torch.long, device=logits.device)
    options: dict[str, Any] = {"dtype": spec.measure_dtype, "with_shape": spec.with_shape, "eos_ids": eos}
    if supports is None:
        return policy_steps(logits, tokens[part], spec.policy, **options), logits.new_empty(0)
    inside = masks_of(supports[part], logits.device)
    steps = replayed_steps(logits, tokens[part], spec.policy, inside, **options)
    if not spec.with_flips:
        return steps, logits.new_empty(0)
    return steps, (nucleus(logits, spec.policy) != inside).any(dim=-1).to(steps.log_probs.dtype)


def _pulled_back(
    spec: HeadSpec,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    edges: Tensor | None,
    supports: TokenSets | None,
    by: Sequence[Tensor | None],
    shards: VocabularyShards | None,
) -> Tensor:
    """The gradient by this process's raw output of the head, from those by log p, log q and entropy."""
    logits = _whole_logits(spec, hidden, weight, bias, shards)
    given: dict[str, Any] = {"by_log_probs": by[0], "by_log_qs": by[1], "by_entropies": by[2]}
    given["dtype"] = spec.measure_dtype
    if supports is None:
        gradient = policy_steps_gradient(logits, tokens, spec.policy, edges, **given)
    else:
        gradient = replayed_gradient(logits, tokens, spec.policy, masks_of(supports, logits.device), **given)
    if shards is not None:
        gradient, logits = gradient[:, shards.own], logits[:, shards.own]
    return spec.transform.pull_back(gradient, logits).to(weight.dtype)


def _whole_logits(
    spec: HeadSpec, hidden: Tensor, weight: Tensor, bias: Tensor | None, shards: VocabularyShards | None
) -> Tensor:
    logits = spec.logits(hidden, weight, bias)
    return logits if shards is None else shards.gathered(logits)


def _in_compute_dtype(
    spec: HeadSpec, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = spec.compute_dtype or weight.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b, in the total's own dtype where that is possible."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _parts(spec: HeadSpec, weight: Tensor, shards: VocabularyShards | None, n_rows: int) -> list[slice]:
    size = spec.rows_at_once(weight, weight.shape[0] if shards is None else shards.d_vocab)
    return [slice(start, start + size) for start in range(0, n_rows, size)]
