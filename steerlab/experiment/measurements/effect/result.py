"""Effect: a dose-response with its interval, its nulls, and a verdict with reasons."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from steerlab.display import Piece, Shown
from steerlab.experiment._wording import in_figures
from steerlab.experiment.measurements.effect import _verdicts as verdicts
from steerlab.experiment.measurements.effect._figures import Figures, figures_of
from steerlab.experiment.measurements.effect._settings import RULE, Comparisons, EffectSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Effect(Shown):
    """How much a plan changes a metric, per unit of dose.

    Attributes:
        rows: a row per arm, dose and item: `family`, `draw`, `dose`, `item`, `group`, `value` (the metric),
            `positive_log_prob` and `negative_log_prob` (nats), `edited_tokens`, and hashes of what was measured.
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
    _figures: Figures = field(init=False, repr=False, compare=False)
    _judged: "tuple[str, list[str]]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        figures = figures_of(self.rows, self.cost, self.settings)
        object.__setattr__(self, "_figures", figures)
        object.__setattr__(self, "_judged", verdicts.judge(figures, self.settings))

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
        """Interval of the slope by Student's t over groups; by a bootstrap over groups under rule 1."""
        return self._figures.ci

    @property
    def equivalence_ci(self) -> tuple[float, float]:
        """The narrower interval of two one-sided tests at the level of the effect: 90 % beside a 95 % interval.

        Where it lies inside ±`margin`, the slope is shown to be small (Schuirmann 1987).
        """
        return self._figures.equivalence_ci

    @property
    def margin(self) -> float:
        """The size below which a slope counts as small, per unit of dose.

        `smallest` as it was given; else the 95 % quantile of |slope| of this run's random directions; NaN with fewer
        than 19 of them.
        """
        return self._figures.margin

    @property
    def detectable(self) -> float:
        """The smallest size of a slope that a design like this one finds in 80 % of runs.

        From the spread of items and groups, the spread of the control slopes and their number. NaN without slopes,
        nulls or a second group; infinite where no slope can be found, as with too few draws.
        """
        return self._figures.detectable

    @property
    def needed_groups(self) -> float:
        """How many groups like these find a slope of `smallest` in 80 % of runs; NaN if none was named.

        Infinite if no number does, because control directions alone reach that far.
        """
        return self._figures.needed_groups

    @property
    def needed_items(self) -> float:
        """Items in that many groups, at as many a group as here."""
        return verdicts.needed_items(self._figures) if math.isfinite(self.needed_groups) else self.needed_groups

    @property
    def size_over_items(self) -> float:
        """The slope over the standard deviation of the items' slopes; NaN for one item or items all alike."""
        spread = float(self.item_slopes.slope.std(ddof=1))
        return self.slope / spread if spread > 0 else math.nan

    @property
    def size_over_nulls(self) -> float:
        """|slope| over the median |slope| of a null family, between the same two doses; the least over families."""
        nulls = self.null_slopes
        medians = [float(nulls[nulls.family == family].slope.abs().median()) for family in self.null_ranks]
        return abs(self.rank_slope) / max(medians) if medians and max(medians) > 0 else math.nan

    @property
    def curvature(self) -> float:
        """Mean over items of the quadratic coefficient: the metric bends by this per squared unit of dose.

        From a least-squares fit of a parabola to each item over the fitted doses; NaN with fewer than three.
        """
        return self._figures.curvature

    @property
    def curvature_ci(self) -> tuple[float, float]:
        """Interval of the curvature, as that of the slope."""
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
        """`effect`, `no effect`, `inconclusive`, `not tested` or `collapsed`.

        `effect`: the interval excludes 0 and the rank against every null family is at most 0.05. `no effect`: not so,
        and the slope is shown to be small (`equivalence_ci` inside ±`margin`). `inconclusive`: neither is shown; or
        both are, the slope being real and smaller than what matters. `not tested`: no null family ran. `collapsed`:
        fewer than three doses stay within the cost. Runs of rule 1 say `no effect` for whatever was not shown.
        """
        return self._judged[0]

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is what it is, what groups and nulls leave open, and how many plans were tested."""
        settings = self.settings
        return [
            *self._judged[1],
            *verdicts.rule_reasons(settings, self._by_present_rule() if settings.rule != RULE else ""),
            *verdicts.baseline_reasons(self.doses),
            *verdicts.few_groups_reasons(self._figures, settings),
            *verdicts.unasked_reasons(self.null_ranks, bool(self.provenance.get("from_pairs"))),
            *verdicts.comparison_reasons(self.comparisons),
        ]

    def _by_present_rule(self) -> str:
        settings = replace(self.settings, rule=RULE)
        return verdicts.judge(figures_of(self.rows, self.cost, settings), settings)[0]

    @property
    def adjusted_rank(self) -> float:
        """The null rank after the adjustment for every plan tested on these items; the rank itself for one plan."""
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
        names += ["adjusted_rank", "margin", "detectable", "needed_groups", "size_over_items", "size_over_nulls"]
        names += ["verdict", "reasons"]
        return {name: getattr(self, name) for name in names} | {
            "ci": list(self.ci),
            "equivalence_ci": list(self.equivalence_ci),
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
        from steerlab.experiment.measurements.effect._face import effect_pieces  # which draws

        return effect_pieces(self)

    def __str__(self) -> str:
        ends = "(no interval)" if math.isnan(self.ci[0]) else f"[{', '.join(in_figures(end, '+') for end in self.ci)}]"
        return (
            f"{self.verdict}: {in_figures(self.slope, '+')} per unit {self.settings.axis} {ends}, "
            f"{'' if math.isnan(self.margin) else f'margin ±{in_figures(self.margin)}, '}"
            f"{self.anti_steerable:.0%} anti-steerable, "
            f"{f'null rank {self.null_rank:.3f}' if self.null_ranks else 'no null rank'}"
            f"{f'; vector {self.vector}' if self.vector else ''}"
        )
