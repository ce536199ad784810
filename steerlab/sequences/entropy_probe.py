"""What a step along a direction does to a policy's entropy: predicted from the start, and measured at the end.

With S the sum of step entropies H_j of a response and L_j = Σ_{k<j} log q_k, the log-probability of what comes before
step j, entropy at θ + η·v is H(η) = E[Σ_j e^{L_j(η) − L_j(0)}·H_j(η)] over responses drawn at θ, whose derivatives are

    H′ = E[Σ_j H_j′ + L_j′·(H_j − c_j)]
    H″ = E[Σ_j H_j″ + 2·L_j′·H_j′ + (L_j″ + L_j′²)·(H_j − c_j)]

for any numbers c_j that do not depend on the response. Derivatives of H_j and log q_k along v are central differences
of scores in float64, in which they are exact to some eight digits.

Source:
    Importance sampling per decision: Precup, Sutton & Singh 2000; score-function derivatives: Williams 1992.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.stats
import torch
from torch import Tensor

from steerlab.core.errors import InputError
from steerlab.measures.intervals import Interval
from steerlab.measures.nucleus import truncates
from steerlab.sequences._sampling import single_seed
from steerlab.sequences.config import ForcingPrecision, FunctionalPrecision
from steerlab.sequences.types import BatchedSequences, LogprobResults
from steerlab.steering._plan_assignment import PlanArgument

if TYPE_CHECKING:
    from steerlab.sequences.processor import SequenceProcessor

_RELATIVE_STEP = 1e-4  # of the moved parameters' norm: differences keep half of float64's digits, and curvature shows


@dataclass(frozen=True)
class Estimate:
    """A mean over responses.

    Attributes:
        value: the mean.
        interval: its confidence interval, by Student's t from the spread among responses to one prompt (among all, if
            every prompt has one); NaN ends where there is one response in all.
    """

    value: float
    interval: Interval


@dataclass(frozen=True)
class EntropyProbe:
    """Entropy along θ + η·v, nats per response, predicted and measured.

    Attributes:
        entropy: at θ.
        slope: H′, the change of entropy per unit of η.
        curvature: H″.
        etas: the steps η.
        weighted: the change H(η) − H(0) at each, from the responses drawn at θ by importance weights.
        effective_sample_sizes: of those weights, in responses.
        fresh: the change from responses drawn anew at θ + η·v with the seeds of those drawn at θ; empty unless asked
            for.
    """

    entropy: Estimate
    slope: Estimate
    curvature: Estimate
    etas: np.ndarray
    weighted: tuple[Estimate, ...]
    effective_sample_sizes: np.ndarray
    fresh: tuple[Estimate, ...]

    @property
    def first_order(self) -> np.ndarray:
        """η·H′ at each step."""
        return self.etas * self.slope.value

    @property
    def second_order(self) -> np.ndarray:
        """η·H′ + ½·η²·H″ at each step."""
        return self.first_order + 0.5 * self.etas**2 * self.curvature.value

    def to_frame(self) -> pd.DataFrame:
        """A row per step.

        Columns are `eta first_order second_order weighted weighted_low weighted_high effective_sample_size`, and
        `fresh fresh_low fresh_high` if there are fresh responses.
        """
        columns: dict[str, Any] = {"eta": self.etas, "first_order": self.first_order, "second_order": self.second_order}
        columns |= _columns("weighted", self.weighted)
        columns["effective_sample_size"] = self.effective_sample_sizes
        return pd.DataFrame(columns | (_columns("fresh", self.fresh) if self.fresh else {}))


def _columns(name: str, estimates: Sequence[Estimate]) -> dict[str, list[float]]:
    return {
        name: [one.value for one in estimates],
        f"{name}_low": [one.interval.low for one in estimates],
        f"{name}_high": [one.interval.high for one in estimates],
    }


def entropy_probe(
    processor: "SequenceProcessor",
    prompts: Any,
    v_named: Mapping[str, Tensor],
    etas: Sequence[float],
    *,
    G: int = 32,
    seed: int | Sequence[int] | None = 0,
    fresh: bool = True,
    level: float = 0.95,
    tf_batch_size: int | None = None,
    plan: PlanArgument = None,
    **generate: Any,
) -> EntropyProbe:
    """Predicts how entropy changes along a direction, and measures it at θ + η·v in two ways.

    The direction must not come from the responses that the probe draws; `update_direction` on another batch gives one.
    Parameters are written to while fresh responses are drawn, and are bit for bit as before when the call ends.

    Args:
        processor: with a policy that keeps every token: a nucleus changes in jumps, and weights would be biased.
        prompts: as in `generate_batched`; the entropy is the mean over them.
        v_named: the direction, by parameter name.
        etas: the steps η.
        G: responses per prompt.
        seed: of the draws, at θ and at every θ + η·v alike; as in `generate_batched`.
        fresh: draw anew at every step.
        level: coverage of the intervals.
        tf_batch_size: rows at a time.
        plan: as in `teacher_force_logprobs`.
        **generate: `stop`, `chat`, `gen_batch_size` of `generate_batched`.

    Raises:
        InputError: for a policy that cuts tokens off, a direction of length 0, or steps that are not finite.

    Examples:
        >>> v = update_direction(processor, batch, group_advantages(rewards))  # doctest: +SKIP
        >>> entropy_probe(processor, ["Once upon a time"], v, [0.01, 0.1]).to_frame()  # doctest: +SKIP
    """
    policy = processor.config.generation.policy
    if truncates(policy):
        raise InputError(
            f"The probe needs a policy that keeps every token (top_p=1, no greedy decoding), got {policy}."
        )
    steps = np.asarray(etas, dtype=float)
    if steps.ndim != 1 or not len(steps) or not np.isfinite(steps).all():
        raise InputError(f"etas holds finite steps, at least one, got {etas!r}.")
    seed = single_seed(None) if seed is None else seed  # one for all draws, which are compared
    drawn = processor.generate_batched(prompts, G, seed=seed, plan=plan, **generate)
    with _in_float64(processor), torch.no_grad():
        along = _Along(processor, drawn, v_named, tf_batch_size, plan)
        terms = derivative_terms(along)
        weighted = [along.weighted(eta) for eta in steps]
    sums = along.at_zero.sums()
    anew = []
    for eta in steps if fresh else ():
        with moved_parameters(processor, v_named, float(eta)):
            there = processor.generate_batched(prompts, G, seed=seed, plan=plan, **generate)
            with _in_float64(processor):  # as at θ: otherwise the change would hold that of the precision
                scored = processor.teacher_force_logprobs(
                    there, compute_rb=True, tf_batch_size=tf_batch_size, plan=plan
                )
        anew.append(_estimate(_Steps.of(scored).sums() - sums, level))
    return EntropyProbe(
        entropy=_estimate(sums, level),
        slope=_estimate(terms.slope, level),
        curvature=_estimate(terms.curvature, level),
        etas=steps,
        weighted=tuple(_estimate(change, level) for change, _ in weighted),
        effective_sample_sizes=np.array([size for _, size in weighted]),
        fresh=tuple(anew),
    )


@contextmanager
def moved_parameters(processor: "SequenceProcessor", v_named: Mapping[str, Tensor], eta: float) -> Iterator[None]:
    """Runs the body with the live parameters at θ + η·v, rounded to their dtype; afterwards they are θ to the bit."""
    moved = processor.params_override(v_named, eta)
    own = dict(processor.parts.root.named_parameters())
    names = [name for name in own if name in {*v_named} or not torch.equal(moved[name].to(own[name]), own[name])]
    kept = {name: own[name].detach().clone() for name in names}
    try:
        with torch.no_grad():
            for name in names:
                own[name].copy_(moved[name])
        del moved
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)


@contextmanager
def _in_float64(processor: "SequenceProcessor") -> Iterator[None]:
    """Runs the body with parameters, passes and measures of calls without gradients in float64."""
    before = processor.config
    precision = replace(
        before.precision,
        func_override=FunctionalPrecision(cast_params=True, dtype=torch.float64),
        tf_nograd=ForcingPrecision(),  # autocast would round every pass to its dtype
        entropy_fp64=True,
    )
    processor.config = replace(before, precision=precision)
    try:
        yield
    finally:
        processor.config = before


@dataclass(frozen=True)
class _Steps:
    """Entropy and log q of every step, float64 [B, G, steps]; 0 after a response's end, where nothing is drawn."""

    entropies: np.ndarray
    log_qs: np.ndarray

    @classmethod
    def of(cls, scored: LogprobResults) -> "_Steps":
        return cls(_padded(scored.rb_entropies), _padded(scored.token_logqs))

    def sums(self) -> np.ndarray:
        """Σ_j H_j, [B, G]."""
        return self.entropies.sum(axis=-1)


def _padded(nested: Sequence[Sequence[Any]]) -> np.ndarray:
    longest = max((len(values) for row in nested for values in row), default=0)
    table = np.zeros((len(nested), len(nested[0]), longest))
    for b, row in enumerate(nested):
        for g, values in enumerate(row):
            table[b, g, : len(values)] = np.asarray(values, dtype=np.float64)
    return table


class _Along:
    """Scores of the same responses at θ + η·v, in float64."""

    def __init__(
        self,
        processor: "SequenceProcessor",
        sequences: BatchedSequences,
        v_named: Mapping[str, Tensor],
        tf_batch_size: int | None,
        plan: PlanArgument,
    ) -> None:
        self._call = (processor, sequences, v_named, tf_batch_size, plan)
        self.at_zero = self.at(0.0)

    def at(self, eta: float) -> _Steps:
        processor, sequences, v_named, tf_batch_size, plan = self._call
        scored = processor.teacher_force_logprobs(
            sequences,
            compute_rb=True,
            tf_batch_size=tf_batch_size,
            params_override=processor.params_override(v_named, eta),
            plan=plan,
        )
        return _Steps.of(scored)

    @torch.no_grad()
    def unit(self) -> float:
        """A step that moves the parameters by a ten-thousandth of their norm."""
        processor, _, v_named, *_ = self._call
        at_zero, at_one = (processor.params_override(v_named, eta) for eta in (0.0, 1.0))
        named = [name for name in at_zero if not torch.equal(at_one[name], at_zero[name])]
        size = math.sqrt(sum(float((at_one[name] - at_zero[name]).double().square().sum()) for name in named))
        if not size > 0 or not math.isfinite(size):
            raise InputError(f"The direction has norm {size}; there is no way to go.")
        own = math.sqrt(sum(float(at_zero[name].double().square().sum()) for name in named))
        return _RELATIVE_STEP * (own or 1.0) / size

    def weighted(self, eta: float) -> tuple[np.ndarray, float]:
        """The change of Σ_j w_j·(H_j − c_j) + c_j from θ, [B, G]; and the effective sample size of whole weights."""
        there, here = self.at(eta), self.at_zero
        moved, centre = there.log_qs - here.log_qs, _others_mean(here.entropies)
        weighted = np.exp(_before(moved)) * (there.entropies - centre) + centre
        whole = moved.sum(axis=-1)
        shares = np.exp(whole - whole.max())
        return weighted.sum(axis=-1) - here.sums(), float(shares.sum() ** 2 / np.square(shares).sum())


@dataclass(frozen=True)
class DerivativeTerms:
    """Terms of each response whose means are H′ and H″, [B, G]."""

    slope: np.ndarray
    curvature: np.ndarray


def derivative_terms(along: _Along, centred: bool = True) -> DerivativeTerms:
    """The terms of H′ and H″; see the module. c_j is the mean of H_j over the other responses to the prompt."""
    unit = along.unit()
    down, here, up = along.at(-unit), along.at_zero, along.at(unit)
    first_h, second_h = _differences(down.entropies, here.entropies, up.entropies, unit)
    first_l, second_l = map(_before, _differences(down.log_qs, here.log_qs, up.log_qs, unit))
    above = here.entropies - (_others_mean(here.entropies) if centred else 0.0)
    slope = first_h + first_l * above
    curvature = second_h + 2 * first_l * first_h + (second_l + first_l**2) * above
    return DerivativeTerms(slope.sum(axis=-1), curvature.sum(axis=-1))


def _differences(down: np.ndarray, here: np.ndarray, up: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """First and second derivative by central differences."""
    return (up - down) / (2 * unit), (up - 2 * here + down) / unit**2


def _before(values: np.ndarray) -> np.ndarray:
    """Of each step, the sum over the steps before it."""
    return np.cumsum(values, axis=-1) - values


def _others_mean(entropies: np.ndarray) -> np.ndarray:
    """Of each step, the mean of H_j over the other responses to the prompt; 0 without any."""
    others = entropies.sum(axis=1, keepdims=True) - entropies
    return others / max(1, entropies.shape[1] - 1)


def _estimate(values: np.ndarray, level: float) -> Estimate:
    """The mean of responses' terms, [B, G], and its interval."""
    n_prompts, n_samples = values.shape
    if n_samples > 1:
        error = math.sqrt(float((values.var(axis=1, ddof=1) / n_samples).sum())) / n_prompts
        freedom = n_prompts * (n_samples - 1)
    else:
        error = float(values.std(ddof=1)) / math.sqrt(n_prompts) if n_prompts > 1 else math.nan
        freedom = max(1, n_prompts - 1)
    wide = float(scipy.stats.t.ppf((1 + level) / 2, freedom)) * error
    mean = float(values.mean())
    return Estimate(mean, Interval(mean - wide, mean + wide, level))
