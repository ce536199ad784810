"""The gradient of a policy's sequence entropy by its parameters, and a check of it by finite differences.

H(θ) = E_q[Σ_k H_k], where H_k is the entropy of the sampling distribution at step k. Its gradient is

    ∇H = E_q[ Σ_k ∇H_k + Σ_k ∇log q_k · (Σ_{j>k} H_j − b_k) ]

with any b_k that does not know the token drawn at k or later: the first sum is how each step's distribution changes,
the second how often each prefix is reached. The nucleus counts as fixed.

Source:
    Score-function estimator with per-step baselines: Williams 1992; for sequence entropy, Rao-Blackwellised per step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from steerlab._runtime.evaluation import evaluating
from steerlab.core.errors import InputError
from steerlab.sequences._assembly import Assembly
from steerlab.sequences._scoring import ScoringRequest
from steerlab.sequences.importance import importance_weights
from steerlab.sequences.types import BatchedSequences, LogprobResults, Support
from steerlab.steering._plan_assignment import PlanArgument

if TYPE_CHECKING:
    from steerlab.sequences.processor import SequenceProcessor

_RIDGE = 1e-3
Place = tuple[int, int]


@dataclass(frozen=True)
class EntropyGradient:
    """An estimate of ∇H.

    Attributes:
        gradient: by parameter name, in the parameters' dtype and on their device.
        entropy: the estimate of H itself, nats per sequence.
        entropy_std_error: its standard error over sequences; NaN for fewer than two, or with weights.
        num_sequences: how many sequences went in.
        baseline_r2: share of the variance of Σ_{j>k} H_j that the baseline explains on sequences it was not fitted to;
            NaN without a baseline.
    """

    gradient: dict[str, Tensor]
    entropy: float
    entropy_std_error: float
    num_sequences: int
    baseline_r2: float

    def along(self, v_named: Mapping[str, Tensor]) -> float:
        """The directional derivative ⟨∇H, v⟩, summed in float64.

        Raises:
            InputError: for a name that the gradient does not have.
        """
        missing = [name for name in v_named if name not in self.gradient]
        if missing:
            raise InputError(f"The gradient has no {missing[0]!r}; a tied weight goes by its first name.")
        return math.fsum(
            float((self.gradient[name].double() * v.to(self.gradient[name].device).double()).sum())
            for name, v in v_named.items()
        )


@dataclass(frozen=True)
class EntropyAlong:
    """Entropy re-measured at θ + η·v on sequences drawn at θ.

    Attributes:
        etas: the steps η.
        entropies: importance-weighted estimates of H(θ + η·v), nats per sequence.
        effective_sample_sizes: of the weights at each step.
        per_sequence: the weighted terms w·(Σ_k H_k − c) + c with c the entropy at θ, [steps, sequences]; their mean is
            the estimate. As weights have mean 1, c changes only the variance, which it cuts a great deal.
    """

    etas: np.ndarray
    entropies: np.ndarray
    effective_sample_sizes: np.ndarray
    per_sequence: np.ndarray


@dataclass(frozen=True)
class GradientCheck:
    """A gradient against finite differences, on the same sequences.

    Attributes:
        predicted: ⟨∇H, v⟩.
        measured: (H(θ + η·v) − H(θ − η·v)) / 2η, both re-measured with importance weights.
        measured_std_error: standard error of `measured` over sequences. Both estimate one number with the same samples,
            but not by the same terms: they agree within a few of these, not to rounding.
        effective_sample_size: the smaller one of the two ends.
    """

    predicted: float
    measured: float
    measured_std_error: float
    effective_sample_size: float


def entropy_gradient(
    processor: "SequenceProcessor",
    sequences: BatchedSequences,
    *,
    names: Sequence[str] | None = None,
    baseline: bool | None = None,
    weights: Sequence[float] | None = None,
    tf_batch_size: int | None = None,
    plan: PlanArgument = None,
    support: Support = "recomputed",
) -> EntropyGradient:
    """Estimates ∇H from sequences drawn under the processor's policy and the model's present parameters.

    The baseline is a ridge regression of Σ_{j>k} H_j on the step's seven features, fitted on one half of the sequences
    and used on the other, so that it leaves the estimate unbiased. `.grad` of the parameters is not touched. Under
    DistributedDataParallel the estimate is of this process's sequences alone: average it over the processes yourself.

    Args:
        processor: the processor.
        sequences: independent draws.
        names: parameters to differentiate by; None means all that require gradients.
        baseline: subtract the baseline; None does so unless there are weights. It needs independent draws: among
            enumerated sequences those that share a prefix would get different b_k, and the estimate would be biased.
        weights: of each sequence, in order b·G + g, in place of 1/N; e.g. their exact probabilities when all sequences
            of a tiny model are enumerated.
        tf_batch_size: rows per backward pass; None takes the configuration's.
        plan: as in `teacher_force_logprobs`.
        support: as in `teacher_force_logprobs`; `replayed` gives the entropy of the policy that keeps the sampler's
            sets.

    Raises:
        InputError: for an unknown name, no sequence, or one that was not drawn under the policy.
    """
    places = [(b, g) for b in range(sequences.n_prompts) for g in range(sequences.n_samples)]
    shares = _shares(weights, len(places))
    scored = processor.teacher_force_logprobs(
        sequences,
        compute_rb=True,
        return_baseline_features=True,
        tf_batch_size=tf_batch_size,
        plan=plan,
        support=support,
    )
    _check_drawn(scored)
    baseline = weights is None if baseline is None else baseline
    later = {place: _later_sums(scored.rb_entropies[place[0]][place[1]]) for place in places}
    expected, r2 = _baselines(scored, later) if baseline else (None, math.nan)
    credit = later if expected is None else {place: later[place] - expected[place] for place in places}
    totals = np.array([scored.rb_entropies[b][g].astype(np.float64).sum() for b, g in places])
    return EntropyGradient(
        gradient=_accumulate(processor, sequences, places, credit, shares, names, tf_batch_size, plan, support),
        entropy=float(totals @ shares),
        entropy_std_error=_std_error(totals) if weights is None else math.nan,
        num_sequences=len(places),
        baseline_r2=r2,
    )


def entropy_along(
    processor: "SequenceProcessor",
    sequences: BatchedSequences,
    v_named: Mapping[str, Tensor],
    etas: Sequence[float],
    *,
    tf_batch_size: int | None = None,
    plan: PlanArgument = None,
    support: Support = "recomputed",
) -> EntropyAlong:
    """Entropy at θ + η·v for several η, re-measured on sequences drawn at θ with importance weights.

    Args:
        processor: the processor.
        sequences: independent draws at θ.
        v_named: the direction.
        etas: the steps.
        tf_batch_size: rows at a time.
        plan: as in `teacher_force_logprobs`.
        support: as in `teacher_force_logprobs`; `replayed` gives the entropy of the policy that keeps the sampler's
            sets.
    """

    def scored(eta: float | None) -> LogprobResults:
        override = None if eta is None else processor.params_override(v_named, eta)
        return processor.teacher_force_logprobs(
            sequences,
            tf_batch_size=tf_batch_size,
            compute_rb=True,
            params_override=override,
            plan=plan,
            support=support,
        )

    with torch.no_grad():
        at_zero = scored(None)
        centre = float(np.mean(_sums(at_zero)))
        terms, sizes = [], []
        for eta in etas:
            there = scored(eta)
            weights = importance_weights(there, at_zero)
            terms.append((weights.weights * (_sums(there) - centre) + centre).ravel())
            sizes.append(weights.effective_sample_size)
    table = np.stack(terms)
    return EntropyAlong(np.asarray(etas, dtype=float), table.mean(axis=1), np.array(sizes), table)


def check_entropy_gradient(
    processor: "SequenceProcessor",
    sequences: BatchedSequences,
    gradient: EntropyGradient,
    v_named: Mapping[str, Tensor],
    eta: float,
    *,
    tf_batch_size: int | None = None,
    plan: PlanArgument = None,
    support: Support = "recomputed",
) -> GradientCheck:
    """Compares ⟨∇H, v⟩ with a central finite difference of the re-measured entropy.

    Args:
        processor: the processor.
        sequences: those the gradient was made of, or fresh ones.
        gradient: the gradient.
        v_named: a direction.
        eta: half the distance of the two ends; small enough for weights near 1, large enough for rounding.
        tf_batch_size: rows at a time.
        plan: as in `teacher_force_logprobs`.
        support: as in `teacher_force_logprobs`; `replayed` gives the entropy of the policy that keeps the sampler's
            sets.
    """
    ends = entropy_along(
        processor, sequences, v_named, [-eta, eta], tf_batch_size=tf_batch_size, plan=plan, support=support
    )
    slopes = (ends.per_sequence[1] - ends.per_sequence[0]) / (2 * eta)
    return GradientCheck(
        gradient.along(v_named), float(slopes.mean()), _std_error(slopes), float(ends.effective_sample_sizes.min())
    )


def _accumulate(
    processor: "SequenceProcessor",
    sequences: BatchedSequences,
    places: Sequence[Place],
    credit: Mapping[Place, np.ndarray],
    shares: np.ndarray,
    names: Sequence[str] | None,
    tf_batch_size: int | None,
    plan: PlanArgument,
    support: Support,
) -> dict[str, Tensor]:
    """Gradients of Σ share·(Σ_k H_k + Σ_k log q_k·credit_k)."""
    shared = dict(zip(places, shares, strict=True))

    def term(assembly: Assembly, k: int, place: Place) -> Tensor:
        return shared[place] * assembly.surrogate(k, torch.from_numpy(credit[place]))

    filled = [place for place in places if len(credit[place])]
    return summed_gradients(processor, sequences, filled, term, names, tf_batch_size, plan, support)


def summed_gradients(
    processor: "SequenceProcessor",
    sequences: BatchedSequences,
    places: Sequence[Place],
    term: Callable[[Assembly, int, Place], Tensor],
    names: Sequence[str] | None,
    tf_batch_size: int | None,
    plan: PlanArgument,
    support: Support = "recomputed",
) -> dict[str, Tensor]:
    """Gradients by parameters of a sum over responses, one backward pass per batch; `.grad` is not touched.

    Args:
        processor: the processor.
        sequences: what to score.
        places: responses (b, g) that take part, none of them empty.
        term: a response's term, from the batch's assembly, its place in the batch and (b, g).
        names: parameters; None means all that require gradients.
        tf_batch_size: rows per backward pass.
        plan: as in `teacher_force_logprobs`.
        support: as in `teacher_force_logprobs`.
    """
    if processor.parts.is_sharded:
        raise InputError(
            "The parameters of a model sharded by fully_shard are whole inside a pass only, so no gradient can be "
            "taken by them here; score with_grad=True and call backward() on a loss."
        )
    processor.scorer.resolver.assign(plan, sequences.n_prompts)  # a list with one plan per prompt, or an error
    chosen = _parameters(processor, names)
    total = {name: torch.zeros_like(parameter) for name, parameter in chosen.items()}
    size = tf_batch_size or processor.config.generation.tf_batch_size
    with evaluating(processor.parts.root), torch.enable_grad():
        for start in range(0, len(places), size):
            batch = places[start : start + size]
            plans = [plan[b] for b, _ in batch] if isinstance(plan, list | tuple) else plan
            request = ScoringRequest(
                with_grad=True,
                rows_at_once=size,
                plan=plans,
                chunk_rows=processor.head_chunk_rows,
                averaged=False,
                support=support,
            )
            assembly, _ = processor.scorer.run(sequences.select(batch), request)
            terms = [term(assembly, k, place) for k, place in enumerate(batch)]
            found = torch.autograd.grad(torch.stack(terms).sum(), list(chosen.values()), allow_unused=True)
            for name, gradient in zip(chosen, found, strict=True):
                if gradient is not None:
                    total[name] += gradient
    return total


def _parameters(processor: "SequenceProcessor", names: Sequence[str] | None) -> dict[str, nn.Parameter]:
    own = dict(processor.parts.root.named_parameters())
    unknown = [name for name in names or () if name not in own]
    if unknown:
        raise InputError(f"The model has no parameter {unknown[0]!r}; a tied weight goes by its first name.")
    chosen = {name: p for name, p in own.items() if (p.requires_grad if names is None else name in names)}
    frozen = [name for name, parameter in chosen.items() if not parameter.requires_grad]
    if frozen or not chosen:
        raise InputError(f"No gradient can be had by {frozen[0] if frozen else 'any parameter'}: requires_grad is off.")
    return chosen


def _check_drawn(scored: LogprobResults) -> None:
    for b, row in enumerate(scored.outside_nucleus):
        for g, outside in enumerate(row):
            if outside.any():
                raise InputError(
                    f"Token {int(outside.argmax())} of response ({b}, {g}) lies outside the nucleus of "
                    f"{scored.policy}; the estimator needs sequences drawn under the processor's policy."
                )


def _sums(scored: LogprobResults) -> np.ndarray:
    """Σ_k H_k of every sequence, float64 [B, G]."""
    return np.array([[values.astype(np.float64).sum() for values in row] for row in scored.rb_entropies])


def _later_sums(entropies: np.ndarray) -> np.ndarray:
    """Σ_{j>k} H_j for every k, float64."""
    wide = entropies.astype(np.float64)
    return wide.sum() - np.cumsum(wide)


def _baselines(scored: LogprobResults, later: Mapping[Place, np.ndarray]) -> tuple[dict[Place, np.ndarray], float]:
    """b_k of every step, fitted on the other half of the sequences; and the share of variance it explains there."""
    assert scored.baseline_feats_torch is not None
    features = {place: scored.baseline_feats_torch[place[0]][place[1]].double().numpy() for place in later}
    places = list(later)
    halves = [places[0::2], places[1::2]]
    found: dict[Place, np.ndarray] = {}
    for own, other in (halves, halves[::-1]):
        fit = _ridge([features[place] for place in other], [later[place] for place in other])
        found |= {place: fit(features[place]) for place in own}
    actual = np.concatenate([later[place] for place in places])
    residual = actual - np.concatenate([found[place] for place in places])
    spread = actual.var() if actual.size else 0.0
    return found, float(1 - residual.var() / spread) if spread > 0 else math.nan


def _ridge(features: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A function from features to predictions; 0 if there is nothing to fit."""
    rows = np.concatenate(features) if features else np.zeros((0, 1))
    if len(rows) == 0:
        return lambda values: np.zeros(len(values))
    centre, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    y = np.concatenate(targets)
    x = (rows - centre) / scale
    slope = np.linalg.solve(x.T @ x + _RIDGE * len(x) * np.eye(x.shape[1]), x.T @ (y - y.mean()))
    return lambda values: y.mean() + ((values - centre) / scale) @ slope


def _shares(weights: Sequence[float] | None, n: int) -> np.ndarray:
    if weights is None:
        return np.full(n, 1 / n)
    shares = np.asarray(weights, dtype=float)
    if shares.shape != (n,) or not np.isfinite(shares).all():
        raise InputError(f"weights holds one finite number per sequence, {n}, got shape {shares.shape}.")
    return shares


def _std_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
