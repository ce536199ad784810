"""Effect: a dose-response with its interval, its nulls, and a verdict with reasons."""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from steerlab.display import Piece, Shown
from steerlab.experiment.measurements.controls import RANK_LEVEL
from steerlab.measures.intervals import (
    Interval,
    cluster_bootstrap_mean,
    least_squares_curvatures,
    least_squares_slopes,
    null_rank,
    rank_floor,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKED_FAMILIES = ("random", "shuffled")
MIN_DOSES = 3
NO_NULLS = "No null family was run, so nothing tells this from a random direction."
FEW_GROUPS = 10
"""Below that many, percentile bootstrap intervals over groups are known to be too narrow."""


@dataclass(frozen=True)
class EffectSettings:
    """What an effect was computed with.

    Attributes:
        metric: name of the metric.
        metric_identity: the name, and for a function a hash of what it computes.
        axis: `dose` (median norms) or `scale` (multiples of the plan).
        max_ppl_ratio: doses that cost more enter no fit.
        level: coverage of the interval.
        n_resamples: bootstrap draws.
        seed: of bootstrap and controls.
    """

    metric: str = "log_prob_margin"
    metric_identity: str = "log_prob_margin"
    axis: str = "dose"
    max_ppl_ratio: float = 1.5
    level: float = 0.95
    n_resamples: int = 4000
    seed: int = 0


@dataclass(frozen=True)
class Comparisons:
    """How many plans were tested on the same items with the same metric, and what that does to a rank.

    Attributes:
        n_tested: plans tested in the experiment, this one counted in.
        adjusted_rank: this one's null rank after Holm's adjustment for all of them.
    """

    n_tested: int
    adjusted_rank: float


@dataclass(frozen=True)
class _Figures:
    """What an effect's rows say; see the properties of `Effect`."""

    n_doses: int
    fitted_doses: list[float]
    item_slopes: pd.DataFrame
    slope: float
    ci: tuple[float, float]
    curvature: float
    curvature_ci: tuple[float, float]
    collapse_dose: float
    anti_steerable: float
    null_slopes: pd.DataFrame
    rank_slope: float
    null_ranks: dict[str, float]
    verdict: str = ""
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Effect(Shown):
    """How much a plan changes a metric, per unit of dose.

    Attributes:
        rows: a row per arm, dose and item; see `steerlab.experiment.measurements.effect.rows`.
        cost: a row per dose: perplexity and its ratio to the unsteered model's on neutral text.
        plan_hash: of the plan at scale 1.
        plan_text: the plan in words.
        settings: what it was computed with.
        provenance: hashes of model and data, and `from_pairs`: whether labels of pairs made the vector.
        comparisons: how many other plans were tested beside it; None for an effect on its own.
    """

    rows: pd.DataFrame = field(repr=False)
    cost: pd.DataFrame = field(repr=False)
    plan_hash: str
    plan_text: str
    settings: EffectSettings
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)
    comparisons: Comparisons | None = None
    _figures: "_Figures" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_figures", _figures(self.rows, self.cost, self.settings))

    @property
    def doses(self) -> list[float]:
        """All doses run for the real vector."""
        return sorted(float(dose) for dose in self.rows[self.rows.family == "vector"].dose.unique())

    @property
    def vector(self) -> str:
        """Names of the plan's vectors; empty for vectors without one, and where an earlier version noted none."""
        return str(self.provenance.get("vectors") or "")

    @property
    def fitted_doses(self) -> list[float]:
        """Doses whose perplexity ratio stays within the bound; only these enter slopes and ranks."""
        return self._figures.fitted_doses

    @property
    def item_slopes(self) -> pd.DataFrame:
        """Least-squares slope of the metric over the fitted doses, per item: `item`, `group`, `slope`."""
        return self._figures.item_slopes

    @property
    def slope(self) -> float:
        """Mean item slope: change of the metric per unit of dose; NaN with fewer than two fitted doses."""
        return self._figures.slope

    @property
    def ci(self) -> tuple[float, float]:
        """Bootstrap interval of the slope, items resampled by group."""
        return self._figures.ci

    @property
    def curvature(self) -> float:
        """Mean over items of the quadratic coefficient: the metric bends by this per squared unit of dose.

        From a least-squares fit of a parabola to each item over the fitted doses; NaN with fewer than three.
        """
        return self._figures.curvature

    @property
    def curvature_ci(self) -> tuple[float, float]:
        """Bootstrap interval of the curvature, items resampled by group."""
        return self._figures.curvature_ci

    @property
    def collapse_dose(self) -> float:
        """The smallest size of a dose at which the perplexity ratio passes the bound; NaN if none does."""
        return self._figures.collapse_dose

    @property
    def anti_steerable(self) -> float:
        """Share of items whose own slope is below 0."""
        return self._figures.anti_steerable

    @property
    def null_slopes(self) -> pd.DataFrame:
        """Slope of every control draw between the outermost fitted doses: `family`, `draw`, `slope`."""
        return self._figures.null_slopes

    @property
    def rank_slope(self) -> float:
        """The real vector's slope between the same two doses, which is what the ranks compare."""
        return self._figures.rank_slope

    @property
    def null_ranks(self) -> dict[str, float]:
        """Per null family: the share of draws at least as large, the effect counted in."""
        return self._figures.null_ranks

    @property
    def null_rank(self) -> float:
        """The worst rank over the families; NaN if none was run."""
        return max(self.null_ranks.values(), default=math.nan)

    @property
    def verdict(self) -> str:
        """`effect`, `no effect`, `not tested` (no null family ran) or `collapsed` (too few doses within the cost)."""
        return self._figures.verdict

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is what it is, what groups and nulls leave open, and how many plans were tested."""
        few = _baseline_reasons(self.doses) + _few_groups_reasons(int(self.item_slopes.group.nunique()), self.ci)
        unasked = _unasked_reasons(self.null_ranks, bool(self.provenance.get("from_pairs")))
        return self._figures.reasons + few + unasked + _comparison_reasons(self.comparisons)

    @property
    def adjusted_rank(self) -> float:
        """The null rank after Holm's adjustment for every plan tested on these items; the rank itself for one."""
        return self.null_rank if self.comparisons is None else self.comparisons.adjusted_rank

    def among(self, comparisons: Comparisons | None) -> "Effect":
        """The same effect, with the number of plans tested beside it."""
        effect = copy.copy(self)
        object.__setattr__(effect, "comparisons", comparisons)
        return effect

    def by_dose(self) -> pd.DataFrame:
        """A row per dose of the real vector.

        Returns:
            `dose`, `value` (mean metric over items), `positive_log_prob` and `negative_log_prob` (nats), `perplexity`
            and `ppl_ratio` of the neutral text, `fitted` (whether the dose enters the fit).
        """
        real: Any = self.rows[self.rows.family == "vector"]
        means: Any = real.groupby("dose", as_index=False)[["value", "positive_log_prob", "negative_log_prob"]].mean()
        table = means.merge(self.cost[["dose", "perplexity", "ppl_ratio"]], on="dose")
        return table.assign(fitted=table.dose.isin(self.fitted_doses))

    def nulls(self) -> pd.DataFrame:
        """A row for the real vector and for each control family, all slopes over the same two doses.

        Returns:
            `family`, `draws`, `mean_slope`, `mean_size` and `largest_size` of |slope|, `rank` (NaN where not ranked).
        """
        size = abs(self.rank_slope)
        rows: list[tuple] = [("vector", 1, self.rank_slope, size, size, math.nan)]
        for family, part in self.null_slopes.groupby("family", sort=False):
            sizes = part.slope.abs()
            rank = self.null_ranks.get(str(family), math.nan)
            rows.append((str(family), len(part), part.slope.mean(), sizes.mean(), sizes.max(), rank))
        return pd.DataFrame(rows, columns=["family", "draws", "mean_slope", "mean_size", "largest_size", "rank"])

    def summary(self) -> dict[str, Any]:
        """The figures as a JSON-serialisable dictionary."""
        names = ["slope", "curvature", "collapse_dose", "anti_steerable", "rank_slope", "null_ranks", "null_rank"]
        names += ["adjusted_rank", "verdict", "reasons"]
        return {name: getattr(self, name) for name in names} | {
            "ci": list(self.ci),
            "curvature_ci": list(self.curvature_ci),
            "n_tested": 1 if self.comparisons is None else self.comparisons.n_tested,
            "doses": self.doses,
            "fitted_doses": self.fitted_doses,
            "n_items": len(self.item_slopes),
            "n_groups": int(self.item_slopes.group.nunique()),
            "settings": asdict(self.settings),
        }

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The dose-response with its interval and the null band."""
        from steerlab.experiment.plots import plot_dose_response

        return plot_dose_response(self, ax)

    def _finding(self) -> str:
        return str(self)

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment.measurements.effect.face import effect_pieces  # which draws

        return effect_pieces(self)

    def __str__(self) -> str:
        low, high = self.ci
        return (
            f"{self.verdict}: {self.slope:+.2f} per unit {self.settings.axis} [{low:+.2f}, {high:+.2f}], "
            f"{self.anti_steerable:.0%} anti-steerable, "
            f"{f'null rank {self.null_rank:.3f}' if self.null_ranks else 'no null rank'}"
            f"{f'; vector {self.vector}' if self.vector else ''}"
        )


def item_table(rows: pd.DataFrame, family: str, draw: int, doses: Sequence[float]) -> np.ndarray:
    """Metric values of one arm, shape [items, doses], at the doses given; dose 0 is every arm's baseline."""
    arm: Any = rows[(rows.family == family) & (rows.draw == draw)]
    base: Any = rows[(rows.family == "vector") & (rows.dose == 0)]
    columns = []
    for dose in doses:
        found = arm[arm.dose == dose]
        chosen = base if found.empty and dose == 0 else found
        columns.append(chosen.sort_values("item").value.to_numpy())
    return np.stack(columns, axis=1)


def _figures(rows: pd.DataFrame, cost: pd.DataFrame, settings: EffectSettings) -> _Figures:
    real: Any = rows[rows.family == "vector"]
    items = real.drop_duplicates("item").sort_values("item")[["item", "group"]].reset_index(drop=True)
    affordable = set(cost[cost.ppl_ratio <= settings.max_ppl_ratio].dose)
    fitted = sorted(float(dose) for dose in real.dose.unique() if dose in affordable)
    groups: list[str] = items.group.tolist()
    slopes, curvatures = np.full(len(items), np.nan), np.full(len(items), np.nan)
    if len(fitted) >= 2:
        slopes = least_squares_slopes(np.array(fitted), item_table(rows, "vector", 0, fitted))
    if len(fitted) >= 3:
        curvatures = least_squares_curvatures(np.array(fitted), item_table(rows, "vector", 0, fitted))
    nulls, rank_slope = _null_slopes(rows, fitted)
    found = _Figures(
        n_doses=int(real.dose.nunique()),
        fitted_doses=fitted,
        item_slopes=items.assign(slope=slopes),
        slope=float(slopes.mean()),
        ci=_interval(slopes, groups, settings),
        curvature=float(curvatures.mean()),
        curvature_ci=_interval(curvatures, groups, settings),
        collapse_dose=float(cost[cost.ppl_ratio > settings.max_ppl_ratio].dose.abs().min()),
        anti_steerable=float((slopes < 0).mean()) if np.isfinite(slopes).all() else math.nan,
        null_slopes=nulls,
        rank_slope=rank_slope,
        null_ranks={
            family: null_rank(rank_slope, nulls[nulls.family == family].slope.to_numpy())
            for family in RANKED_FAMILIES
            if (nulls.family == family).any()
        },
    )
    verdict, reasons = _judge(found, settings)
    return replace(found, verdict=verdict, reasons=reasons)


def _interval(values: np.ndarray, groups: Sequence[str], settings: EffectSettings) -> tuple[float, float]:
    options = {"level": settings.level, "n_resamples": settings.n_resamples, "seed": settings.seed}
    found = cluster_bootstrap_mean(values, groups, **options)
    return found.low, found.high


def outermost(doses: Sequence[float]) -> list[float]:
    """The two doses farthest apart; control arms run at these."""
    return [min(doses), max(doses)]


def _null_slopes(rows: pd.DataFrame, fitted: Sequence[float]) -> tuple[pd.DataFrame, float]:
    columns = ["family", "draw", "slope"]
    if len(fitted) < 2:
        return pd.DataFrame([], columns=columns), math.nan
    ends = outermost(fitted)
    real: Any = rows[rows.family == "vector"]
    arms: Any = rows[rows.family != "vector"].groupby(["family", "draw"], sort=False)

    def slope(part: pd.DataFrame, family: str, draw: int) -> float:
        return float(least_squares_slopes(np.array(ends), item_table(part, family, draw, ends)).mean())

    base = real[real.dose == 0]  # every arm's baseline
    found = [(family, draw, slope(pd.concat([base, part]), family, draw)) for (family, draw), part in arms]
    return pd.DataFrame(found, columns=columns), slope(real, "vector", 0)


def _judge(figures: _Figures, settings: EffectSettings) -> tuple[str, list[str]]:
    fitted, ranks = figures.fitted_doses, figures.null_ranks
    if figures.n_doses < MIN_DOSES:
        reason = f"Only {figures.n_doses} doses were run; a fit needs {MIN_DOSES}."
        return ("no effect", [reason]) if ranks else ("not tested", [reason, NO_NULLS])
    if len(fitted) < MIN_DOSES:
        return "collapsed", [
            f"Only {len(fitted)} doses keep the perplexity ratio within {settings.max_ppl_ratio:g}; a fit needs "
            f"{MIN_DOSES}. Use smaller doses."
        ]
    low, high = figures.ci
    excludes = Interval(low, high, settings.level).excludes_zero
    level = f"{settings.level:.0%}"
    if math.isnan(low):
        reasons = ["All items share one group, so no interval exists; use items of several groups."]
    else:
        side = "excludes" if excludes else "includes"
        reasons = [f"The {level} interval [{low:.2f}, {high:.2f}] {side} 0."]
    if not ranks:
        return "not tested", [*reasons, NO_NULLS]
    nulls = figures.null_slopes
    for family, rank in ranks.items():
        reasons.append(_rank_reason(family, rank, int((nulls.family == family).sum())))
    passed = excludes and all(rank <= RANK_LEVEL for rank in ranks.values())
    return ("effect" if passed else "no effect"), reasons


def _rank_reason(family: str, rank: float, draws: int) -> str:
    floor = rank_floor(draws)
    names = {"random": "random directions", "shuffled": "vectors of balanced label flips"}
    beyond = "beyond" if rank <= RANK_LEVEL else "not beyond"
    reason = f"Rank {rank:.3f} against {draws} {names[family]} (it cannot be below {floor:.3f}): {beyond} this null."
    return reason if floor <= RANK_LEVEL else reason + " Too few draws for a verdict of effect; use at least 19."


def _baseline_reasons(doses: Sequence[float]) -> list[str]:
    """What is missing where the unsteered model was not measured; no part of the verdict."""
    if 0 in doses:
        return []
    return ["Dose 0 was not among the doses, so nothing here shows the unsteered model, only how doses differ."]


def _few_groups_reasons(groups: int, ci: tuple[float, float]) -> list[str]:
    """A caution for an interval that rests on few groups; no part of the verdict."""
    if groups >= FEW_GROUPS or math.isnan(ci[0]):
        return []
    few = f"with fewer than {FEW_GROUPS} it covers the truth less often than it says"
    return [f"The interval rests on {groups} groups; {few}."]


def _unasked_reasons(families: Collection[str], from_pairs: bool) -> list[str]:
    """What random directions alone leave open about a vector that labels made; no part of the verdict."""
    if not from_pairs or "random" not in families or "shuffled" in families:
        return []
    return [
        "Only random directions were asked. The vector comes from pairs, and whether their labels make it, rather than "
        "their texts, is what label flips ask: controls with shuffled=20, and the pairs."
    ]


def _comparison_reasons(comparisons: Comparisons | None) -> list[str]:
    if comparisons is None or comparisons.n_tested < 2:
        return []
    adjusted = comparisons.adjusted_rank
    tested = f"{comparisons.n_tested} plans were tested on these items with this metric"
    if math.isnan(adjusted):
        return [f"{tested}; this one has no null rank to adjust."]
    beyond = "within" if adjusted <= RANK_LEVEL else "not within"
    return [f"{tested}; Holm's adjustment makes its rank {adjusted:.3f}, {beyond} {RANK_LEVEL:g}."]
