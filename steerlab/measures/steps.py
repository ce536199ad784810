"""All measurements of a generation step, computed from one nucleus and one exponential of the logits.

`policy_steps` gives the values, `policy_steps_gradient` the derivative of log p, log q and entropy by the logits. Both
are written for rows of logits that exist for a moment only: see `steerlab.sequences`, which calls them chunk by chunk.
On an NVIDIA GPU, in float32, both run as kernels of their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab._kernels.availability import runs_kernels
from steerlab.core.policy import SamplingPolicy
from steerlab.measures.nucleus import nucleus_edges, scaled_by, up_to_edge, widen

_FAR = -1e4  # an exponent whose exponential is exactly 0, and which times 0 is 0, unlike −inf


@dataclass(frozen=True)
class PolicySteps:
    """Per-token measurements of each row. All but `edges` are in nats, one value per row.

    Attributes:
        log_probs: log p of the token under the model's softmax.
        log_qs: log q of the token under the policy; −inf outside the nucleus.
        entropies: entropy of q, the Rao-Blackwellised term of sequence entropy.
        edges: the nucleus's last token (see `nucleus_edges`); None if the policy keeps every token.
        shape: further measures of the distribution; None unless requested.
    """

    log_probs: Float[Tensor, " rows"]
    log_qs: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"]
    edges: Int[Tensor, " rows"] | None
    shape: "PolicyShape | None" = None


@dataclass(frozen=True)
class PolicyShape:
    """The shape of each step's distribution. a = logits / temperature, p = softmax(a), S the nucleus, q = softmax_S(a).

    Attributes:
        head_mass: Σ_S p.
        tail_mass: Σ p outside S, summed directly.
        two_point_entropy: −h·log h − t·log t of head mass h and tail mass t, in nats.
        top1_prob: the largest q.
        margin: highest minus second-highest raw logit over the full vocabulary.
        collision: Σ q².
        renyi2: −log Σ q², in nats.
        effective_support: exp of the entropy of q, in tokens.
        support_size: tokens in S.
        logit_mean: E_q[a].
        logit_var: Var_q[a], centred.
        eos_prob: q of the end-of-text tokens together; NaN without any.
    """

    head_mass: Float[Tensor, " rows"]
    tail_mass: Float[Tensor, " rows"]
    two_point_entropy: Float[Tensor, " rows"]
    top1_prob: Float[Tensor, " rows"]
    margin: Float[Tensor, " rows"]
    collision: Float[Tensor, " rows"]
    renyi2: Float[Tensor, " rows"]
    effective_support: Float[Tensor, " rows"]
    support_size: Float[Tensor, " rows"]
    logit_mean: Float[Tensor, " rows"]
    logit_var: Float[Tensor, " rows"]
    eos_prob: Float[Tensor, " rows"]


SHAPE_FIELDS = tuple(entry.name for entry in fields(PolicyShape))


@torch.no_grad()
def policy_steps(
    logits: Float[Tensor, "rows d_vocab"],
    tokens: Int[Tensor, " rows"],
    policy: SamplingPolicy,
    *,
    dtype: torch.dtype | None = None,
    with_shape: bool = False,
    eos_ids: Int[Tensor, " eos"] | None = None,
) -> PolicySteps:
    """Log p, log q and entropy of each row, and the distribution's shape if requested, without gradients.

    Args:
        logits: raw logits, after any repetition penalty.
        tokens: the token of each row.
        policy: the sampling policy.
        dtype: of the computation on the set; None means float32, or the input's own if wider. The set itself is chosen
            in float32, as in `nucleus`.
        with_shape: also measure the shape.
        eos_ids: tokens that end a text, for `eos_prob`.

    Examples:
        >>> p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
        >>> steps = policy_steps(p.log(), torch.tensor([1]), SamplingPolicy(temperature=0.7))
        >>> round(steps.log_qs.item(), 4), round(steps.entropies.item(), 4)
        (-1.2594, 0.9903)
    """
    edges = nucleus_edges(logits, policy)
    if not with_shape and _is_fused(logits, dtype):
        return _fused_steps(logits, tokens, policy, edges)
    q = _Distribution(logits, policy, edges, dtype)
    index = tokens[:, None]
    below = (q.wide.gather(-1, index) - q.highest)[:, 0]
    log_probs = below - q.log_total_unscaled()
    log_qs = below / q.temperature - q.normaliser.log()
    if q.inside is not None:
        log_qs = log_qs.masked_fill(~q.inside.gather(-1, index)[:, 0], -math.inf)
    shape = q.shape(logits, eos_ids) if with_shape else None
    return PolicySteps(log_probs, log_qs, q.entropy(), edges, shape)


def _is_fused(logits: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether rows are measured by GPU kernels: in float32 only."""
    return logits.dtype == torch.float32 and dtype in (None, torch.float32) and runs_kernels(logits)


def _fused_steps(logits: Tensor, tokens: Tensor, policy: SamplingPolicy, edges: Tensor | None) -> PolicySteps:
    from steerlab._kernels.steps import RowMeasures, measure_rows_on_gpu

    measured = RowMeasures.empty(len(logits), edges, logits.device)
    measure_rows_on_gpu(logits, tokens, _divisor(policy), measured)
    return PolicySteps(measured.log_probs, measured.log_qs, measured.entropies, edges)


def _divisor(policy: SamplingPolicy) -> float:
    """What logits are divided by; a greedy policy leaves them as they are."""
    return 1.0 if policy.is_greedy else policy.temperature


class _Distribution:
    """Rows of q, as exponentials of a = logits / temperature shifted by their maximum."""

    def __init__(self, logits: Tensor, policy: SamplingPolicy, edges: Tensor | None, dtype: torch.dtype | None) -> None:
        self.wide = widen(logits, dtype)
        self.temperature = _divisor(policy)
        self.inside = None if edges is None else up_to_edge(scaled_by(logits, policy), edges)
        self.highest = self.wide.amax(dim=-1, keepdim=True)  # the most probable token is always inside
        self.shifted = self.wide - self.highest  # before the division, so that large logits lose nothing
        if self.temperature != 1:
            self.shifted /= self.temperature
        self.shifted.clamp_(min=_FAR)
        self.weights = self.shifted.exp()
        self.total = self.weights.sum(dim=-1)
        self.outside = None
        if self.inside is not None:
            whole = self.weights
            self.weights = whole * self.inside  # faster than torch.where
            self.outside = whole.sub_(self.weights)
        self.normaliser = self.total if self.inside is None else self.weights.sum(dim=-1)
        self.mean_shifted = torch.linalg.vecdot(self.weights, self.shifted) / self.normaliser

    def log_total_unscaled(self) -> Tensor:
        """Logsumexp of the logits before the temperature, less the highest."""
        return (self.total if self.temperature == 1 else (self.wide - self.highest).exp_().sum(dim=-1)).log()

    def entropy(self) -> Tensor:
        return (self.normaliser.log() - self.mean_shifted).clamp_min(0.0)

    def shape(self, logits: Tensor, eos_ids: Tensor | None) -> PolicyShape:
        best = logits.topk(min(2, logits.shape[-1]), dim=-1).values.to(self.wide.dtype)
        margin = best[:, 0] - best[:, 1] if best.shape[-1] > 1 else torch.full_like(best[:, 0], math.inf)
        head = self.normaliser / self.total
        tail = torch.zeros_like(head) if self.outside is None else self.outside.sum(dim=-1) / self.total
        collision = torch.linalg.vecdot(self.weights, self.weights) / self.normaliser**2
        deviation = self.shifted - self.mean_shifted[:, None]
        variance = torch.linalg.vecdot(self.weights, deviation.square_()) / self.normaliser
        size = self.wide > -math.inf if self.inside is None else self.inside
        return PolicyShape(
            head_mass=head,
            tail_mass=tail,
            two_point_entropy=torch.special.entr(head) + torch.special.entr(tail),
            top1_prob=1 / self.normaliser,
            margin=margin,
            collision=collision,
            renyi2=collision.clamp_max(1.0).reciprocal().log(),  # 0 for a point mass, never −0 or less
            effective_support=self.entropy().exp(),
            support_size=size.to(head.dtype).sum(dim=-1),
            logit_mean=self.highest[:, 0] / self.temperature + self.mean_shifted,
            logit_var=variance,
            eos_prob=self._eos_prob(eos_ids),
        )

    def _eos_prob(self, eos_ids: Tensor | None) -> Tensor:
        if eos_ids is None or not len(eos_ids):
            return torch.full_like(self.normaliser, math.nan)
        return self.weights.index_select(-1, eos_ids).sum(dim=-1) / self.normaliser


@torch.no_grad()
def policy_steps_gradient(
    logits: Float[Tensor, "rows d_vocab"],
    tokens: Int[Tensor, " rows"],
    policy: SamplingPolicy,
    edges: Int[Tensor, " rows"] | None,
    *,
    by_log_probs: Float[Tensor, " rows"] | None,
    by_log_qs: Float[Tensor, " rows"] | None,
    by_entropies: Float[Tensor, " rows"] | None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "rows d_vocab"]:
    """Gradient by the logits of Σ (g₁·log p + g₂·log q + g₃·H), the nucleus held fixed.

    ∂log p/∂x = e_y − softmax(x); ∂log q/∂x = (e_y − q)/T for y inside, else 0; ∂H/∂x = −q·(log q + H)/T.

    Args:
        logits: as given to `policy_steps`.
        tokens: as given there.
        policy: as given there.
        edges: its result's `edges`.
        by_log_probs: g₁ of each row; None means 0.
        by_log_qs: g₂.
        by_entropies: g₃.
        dtype: as given to `policy_steps`.

    Returns:
        The gradient, in the dtype of the computation.
    """
    if policy.is_greedy:
        by_log_qs = by_entropies = None  # a point mass does not move with the logits
    if _is_fused(logits, dtype):
        return _fused_gradient(logits, tokens, policy, edges, (by_log_probs, by_log_qs, by_entropies))
    q = _Distribution(logits, policy, edges, dtype)
    scale = 1 / q.temperature
    gradient = torch.zeros_like(q.shifted)
    at_token = torch.zeros_like(q.normaliser)
    if by_log_qs is not None:
        g = by_log_qs.to(gradient.dtype) * scale
        g = g if q.inside is None else g.masked_fill(~q.inside.gather(-1, tokens[:, None])[:, 0], 0.0)
        gradient.addcmul_(q.weights, (-g / q.normaliser)[:, None])
        at_token += g
    if by_entropies is not None:
        g = (by_entropies.to(gradient.dtype) * scale / q.normaliser)[:, None]
        gradient.addcmul_(q.weights * (q.shifted - q.mean_shifted[:, None]), -g)  # log q + H = z − E_q[z]
    if by_log_probs is not None:
        g = by_log_probs.to(gradient.dtype)
        gradient.addcmul_(_softmax(q), -g[:, None])
        at_token += g
    return gradient.scatter_add_(-1, tokens[:, None], at_token[:, None])


def _fused_gradient(
    logits: Tensor, tokens: Tensor, policy: SamplingPolicy, edges: Tensor | None, by: Sequence[Tensor | None]
) -> Tensor:
    from steerlab._kernels.steps import RowMeasures, gradient_in_place_on_gpu, measure_rows_on_gpu

    measured = RowMeasures.empty(len(logits), edges, logits.device)
    measure_rows_on_gpu(logits, tokens, _divisor(policy), measured)
    by_log_probs, by_log_qs, by_entropies = (None if g is None else g.float().contiguous() for g in by)
    gradient = logits.clone()
    gradient_in_place_on_gpu(gradient, tokens, _divisor(policy), measured, (by_log_probs, by_log_qs, by_entropies))
    return gradient


def _softmax(q: _Distribution) -> Tensor:
    """The model's own softmax."""
    if q.temperature != 1:
        return q.wide.softmax(dim=-1)
    whole = q.weights if q.outside is None else q.weights + q.outside
    return whole / q.total[:, None]
