"""The comparison of arms at equal cost: each interpolated where neutral text is as much less likely under it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from steerlab.core._numbers import as_list, as_number, shown
from steerlab.core.errors import InputError
from steerlab.display import Piece, Remarks, Shown, figure
from steerlab.experiment._wording import in_figures, with_ends
from steerlab.experiment.measurements._interval_rule import rule_of, without_rule
from steerlab.experiment.measurements.baselines.arms import PromptArm
from steerlab.measures.equal_cost import Crossing, first_crossing
from steerlab.measures.intervals import cluster_t_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VECTOR = "vector"
EQUAL_COST = [
    "ppl_ratio", "arm", "strength", "change", "change_low", "change_high",
    "vector_less_arm", "vector_less_arm_low", "vector_less_arm_high", "reason",
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class BaselineComparison(Shown):
    """A vector beside arms that change the prompt, on the same items.

    Attributes:
        rows: a row per arm, strength and item: `arm`, `strength` (the vector's dose), `item`, `group`, `value` (the
            metric), `change` (from the plain prompt and the unsteered model).
        points: a row per arm and strength: `arm`, `strength`, `ppl_ratio` of neutral text with `ppl_ratio_low` and
            `ppl_ratio_high`, `change` (mean over items) with `change_low` and `change_high`; `interval`, the rule of
            the ends.
        equal_cost: a row per asked ratio and arm, see `at`.
        metric: name of the metric.
        plan_hash: of the vector's plan at scale 1.
        plan_text: the plan in words.
        arms: the other arms, with their texts.
        on_hash: content hash of the items.
        seed: of the experiment.
    """

    rows: pd.DataFrame = field(repr=False)
    points: pd.DataFrame = field(repr=False)
    equal_cost: pd.DataFrame = field(repr=False)
    metric: str
    plan_hash: str
    plan_text: str
    arms: tuple[PromptArm, ...]
    on_hash: str
    seed: int

    def at(self, ratios: float | Sequence[float]) -> pd.DataFrame:
        """Every arm's change where its perplexity ratio on neutral text is the one given.

        Change and strength are interpolated linearly in the log of the ratio between the two neighbouring strengths, at
        the smallest strength that costs so much. Nothing is extrapolated: an arm that was measured nowhere at that
        cost has NaN, and `reason` says what it costs.

        Args:
            ratios: perplexity ratios, above 0.

        Returns:
            A row per ratio and arm: `ppl_ratio`, `arm`, `strength`, `change` with `change_low` and `change_high` by
            Student's t over groups of items (the costs are taken as they are), `vector_less_arm` (the vector's change
            less the arm's, per item) with its ends, `reason`.

        Raises:
            InputError: for something else than ratios.
        """
        return equal_cost(self.rows, self.points, check_ratios(ratios))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Change against cost, a line per arm."""
        from steerlab.experiment.plots import plot_equal_cost

        return plot_equal_cost(self.points, ax, metric=self.metric)

    def sentences(self) -> list[str]:
        """What was found at equal cost, a sentence per ratio and arm."""
        found = []
        for row in self.equal_cost.to_dict("records"):
            if row["reason"]:
                found.append(f"At a perplexity ratio of {row['ppl_ratio']:.4g}, {row['arm']}: {row['reason']}")
            elif row["arm"] != VECTOR:
                ends = (row[f"vector_less_arm{end}"] for end in ("", "_low", "_high"))
                found.append(
                    f"At a perplexity ratio of {row['ppl_ratio']:.4g} {row['arm']} changes {self.metric} by "
                    f"{in_figures(row['change'], '+', 3)}; the vector by {with_ends(*ends)} more."
                )
        return found or [NO_COMMON_COST]

    def _finding(self) -> str:
        names = ", ".join(arm.name for arm in self.arms)
        largest: Any = self.points.loc[self.points.groupby("arm").change.idxmax()]
        rows = largest[["arm", "change", "ppl_ratio"]].itertuples(index=False)
        best = ", ".join(f"{arm} {figure(change)} at ×{ratio:.3g}" for arm, change, ratio in rows)
        return f"vector and {names}, largest change of {self.metric}: {best}"

    def _pieces(self) -> Sequence[Piece]:
        from functools import partial

        from steerlab.experiment._blocks.faces import frame_piece, plot_piece  # which draw
        from steerlab.experiment.plots import describe_equal_cost, plot_equal_cost

        draw = partial(plot_equal_cost, self.points, metric=self.metric)
        texts = pd.DataFrame(
            [(arm.name, s, text) for arm in self.arms for s, text in zip(arm.strengths, arm.texts, strict=True)],
            columns=["arm", "strength", "text"],
        )
        return [
            Remarks(self.sentences()),
            plot_piece("equal-cost", draw, describe_equal_cost(self.points)),
            frame_piece(without_rule(self.points), f"every strength, intervals by {rule_of(self.points)}", fold=False),
            frame_piece(texts, "what stood before the prompts"),
        ]


NO_COMMON_COST = (
    "No perplexity ratio above 1 was reached by every arm, so there is no common cost to compare them at; add doses or "
    "strengths, or ask for ratios that some reach."
)


def check_ratios(ratios: Any) -> list[float]:
    """Ratios as a list of numbers above 0.

    Raises:
        InputError: otherwise.
    """
    given = [as_number(ratio) for ratio in (as_list(ratios) or [ratios])]
    if any(ratio is None or ratio <= 0 for ratio in given):
        raise InputError(f"ratios are perplexity ratios above 0, e.g. 1.05; got {shown(ratios)}.")
    return [ratio for ratio in given if ratio is not None]


def common_ratio(points: pd.DataFrame) -> list[float]:
    """The largest perplexity ratio that every arm reaches, if it is above 1."""
    reached = float(points.groupby("arm").ppl_ratio.max().min())
    return [reached] if reached > 1 else []


def equal_cost(rows: pd.DataFrame, points: pd.DataFrame, ratios: Sequence[float]) -> pd.DataFrame:
    """See `BaselineComparison.at`."""
    arms = {str(name): _Arm(rows, points, str(name)) for name in points.arm.drop_duplicates()}
    found: list[Any] = []
    for ratio in ratios:
        crossings = {name: arm.crossing(ratio) for name, arm in arms.items()}
        at_vector = crossings[VECTOR]
        vector = None if at_vector is None else at_vector.of(arms[VECTOR].changes)
        for name, arm in arms.items():
            crossing = crossings[name]
            if crossing is None:
                found.append((ratio, name, *(math.nan,) * 7, arm.reason(ratio)))
                continue
            changes = crossing.of(arm.changes)
            against = (math.nan,) * 3 if vector is None or name == VECTOR else arm.mean(vector - changes)
            found.append((ratio, name, float(crossing.of(arm.strengths)), *arm.mean(changes), *against, ""))
    return pd.DataFrame(found, columns=EQUAL_COST)


class _Arm:
    """One arm as a path from the plain prompt on: strengths, costs, and every item's changes."""

    def __init__(self, rows: Any, points: Any, name: str) -> None:
        own = points[points.arm == name].sort_values("strength", key=abs)
        self.strengths, self.costs = own.strength.to_numpy(), np.log(own.ppl_ratio.to_numpy())
        wide = rows[rows.arm == name].pivot(index="item", columns="strength", values="change")
        self.changes = wide[sorted(wide.columns, key=abs)].to_numpy()
        self.groups = rows[rows.arm == name].drop_duplicates("item").sort_values("item").group.tolist()

    def crossing(self, ratio: float) -> Crossing | None:
        return first_crossing(self.costs, math.log(ratio))

    def reason(self, ratio: float) -> str:
        low, high = math.exp(self.costs.min()), math.exp(self.costs.max())
        return f"it was measured at perplexity ratios from {low:.4g} to {high:.4g} only; nothing is extrapolated."

    def mean(self, values: np.ndarray) -> tuple[float, float, float]:
        ends = cluster_t_mean(values, self.groups)
        return float(values.mean()), ends.low, ends.high
