"""What an effect was computed with, and which rule judged it."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Adjustment: TypeAlias = Literal["holm", "fdr"]
ADJUSTMENTS: Final[dict[str, str]] = {"holm": "Holm's adjustment", "fdr": "Benjamini and Hochberg's adjustment"}
"""How ranks of several plans on the same items are adjusted: for any false claim, or for the share of false claims."""
RULES: Final[dict[int, str]] = {
    1: "whatever is not shown is called no effect, and intervals are percentile bootstraps",
    2: "no effect is what is shown to be small, inconclusive what is neither, and intervals are Student's t",
}
RULE: Final = 2
"""The rule by which effects are judged now."""


@dataclass(frozen=True)
class EffectSettings:
    """What an effect was computed with.

    Attributes:
        metric: name of the metric.
        metric_identity: the name, and for a function a hash of what it computes.
        axis: `dose` (median norms) or `scale` (multiples of the plan).
        max_ppl_ratio: doses that cost more enter no fit.
        level: coverage of the interval.
        n_resamples: bootstrap draws, under rule 1.
        seed: of controls, and under rule 1 of the bootstrap.
        smallest: size of the smallest slope that matters, per unit of dose; None if none was named.
        adjustment: how the rank is adjusted when several plans are tested on the items: `holm` or `fdr`.
        rule: which rule gives the verdict, see `RULES`; 1 in runs of versions that noted none.
    """

    metric: str = "log_prob_margin"
    metric_identity: str = "log_prob_margin"
    axis: str = "dose"
    max_ppl_ratio: float = 1.5
    level: float = 0.95
    n_resamples: int = 4000
    seed: int = 0
    smallest: float | None = None
    adjustment: str = "holm"
    rule: int = RULE


@dataclass(frozen=True)
class Comparisons:
    """How many plans were tested on the same items with the same metric, and what that does to a rank.

    Attributes:
        n_tested: plans tested in the experiment, this one counted in.
        adjusted_rank: this one's null rank after the adjustment for all of them.
        adjustment: which one, `holm` or `fdr`.
    """

    n_tested: int
    adjusted_rank: float
    adjustment: str = "holm"
