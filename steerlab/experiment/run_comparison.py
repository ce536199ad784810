"""What differs between two runs."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from steerlab.core.errors import InputError
from steerlab.experiment.effect import Effect

if TYPE_CHECKING:
    from steerlab.experiment.experiment import Experiment

ROW_KEY = ["family", "draw", "dose", "item"]
EFFECT_COLUMNS = [
    "effect_a",
    "effect_b",
    "matched_by",
    "metric",
    "slope_a",
    "slope_b",
    "low_a",
    "high_a",
    "low_b",
    "high_b",
    "verdict_a",
    "verdict_b",
    "shared_rows",
    "largest_difference",
]


@dataclass(frozen=True)
class RunComparison:
    """Two runs side by side.

    Attributes:
        configuration: a row per entry of configuration, versions and data: `entry`, `a`, `b`, `same`.
        effects: a row per pair of matching effects: their numbers, what they were `matched_by` (`plan`: the same plan,
            `words`: plans that read alike), slopes, intervals, verdicts, rows both have, and the largest difference of
            the metric in them.
        only_a: numbers of the effects that only the first run has.
        only_b: numbers of those that only the second has.
    """

    configuration: pd.DataFrame
    effects: pd.DataFrame
    only_a: list[int]
    only_b: list[int]

    @property
    def differences(self) -> pd.DataFrame:
        """The entries of `configuration` that differ."""
        return self.configuration.loc[~self.configuration.same].reset_index(drop=True)

    def __str__(self) -> str:
        differing = self.differences.to_dict("records")
        lines = [f"{row['entry']}: {row['a']} | {row['b']}" for row in differing] or ["same configuration"]
        for row in self.effects.to_dict("records"):
            lines.append(
                f"effect {row['effect_a']} | {row['effect_b']}: slope {row['slope_a']:+.4g} | {row['slope_b']:+.4g}, "
                f"{row['shared_rows']} shared rows differ by at most {row['largest_difference']:.3g}"
            )
        for side, numbers in (("first", self.only_a), ("second", self.only_b)):
            lines += [f"effect {number}: only in the {side} run" for number in numbers]
        return "\n".join(lines)


def compare(run_a: "str | Path | Experiment", run_b: "str | Path | Experiment") -> RunComparison:
    """What differs between two runs: configuration, versions, data, and the effects both have measured.

    Effects match if metric and items are the same, and the plan is; or, where the plan's vectors or norms differ
    because the models do, if the plans read alike.

    Args:
        run_a: a run directory or an experiment.
        run_b: another.

    Raises:
        RunError: for a directory that holds no run.

    Examples:
        >>> print(sl.compare("runs/monday", "runs/tuesday"))  # doctest: +SKIP
    """
    a, b = _opened(run_a), _opened(run_b)
    pairs, only_a, only_b = _matched(a.effects, b.effects)
    rows = [_effect_row(a.effects, b.effects, i, j, how) for i, j, how in pairs]
    return RunComparison(_configuration(a, b), pd.DataFrame(rows, columns=EFFECT_COLUMNS), only_a, only_b)


def _opened(run: Any) -> "Experiment":
    from steerlab.experiment.experiment import Experiment

    if isinstance(run, Experiment):
        return run
    if isinstance(run, str | Path):
        return Experiment.load(run)
    raise InputError(f"compare takes run directories or experiments, got {type(run).__name__}.")


def _configuration(a: "Experiment", b: "Experiment") -> pd.DataFrame:
    left, right = _entries(a), _entries(b)
    rows = [(name, left.get(name, "–"), right.get(name, "–")) for name in dict.fromkeys([*left, *right])]
    frame = pd.DataFrame(rows, columns=["entry", "a", "b"])
    return frame.assign(same=[one == other for _, one, other in rows])


def _entries(experiment: "Experiment") -> dict[str, str]:
    stated = experiment.configuration()
    flat = {name: str(stated[name]) for name in ("model", "backend", "seed", "weights_hash", "dtype")}
    flat |= {f"option {name}": str(value) for name, value in stated["load_options"].items()}
    flat |= {f"version {name}": str(value) for name, value in stated["versions"].items()}
    for index, effect in enumerate(experiment.effects):
        for name in ("targets_hash", "pairs_hash", "neutral_hash"):
            flat[f"effect {index} {name}"] = str(effect.provenance.get(name))
    return flat


def _matched(a: list[Effect], b: list[Effect]) -> tuple[list[tuple[int, int, str]], list[int], list[int]]:
    pairs: list[tuple[int, int, str]] = []
    left, right = list(range(len(a))), list(range(len(b)))
    for how in ("plan", "words"):
        for i in list(left):
            found = next((j for j in right if _key(a[i], how) == _key(b[j], how)), None)
            if found is not None:
                pairs.append((i, found, how))
                left.remove(i)
                right.remove(found)
    return sorted(pairs), left, right


def _key(effect: Effect, how: str) -> tuple[Any, ...]:
    plan = effect.plan_hash if how == "plan" else effect.plan_text
    return plan, effect.provenance.get("targets_hash"), effect.settings.metric_identity


def _effect_row(a: list[Effect], b: list[Effect], i: int, j: int, how: str) -> tuple[Any, ...]:
    one, other = a[i], b[j]
    shared, largest = _row_differences(one, other)
    ends = (*one.ci, *other.ci)
    verdicts = (one.verdict, other.verdict)
    return (i, j, how, one.settings.metric, one.slope, other.slope, *ends, *verdicts, shared, largest)


def _row_differences(one: Effect, other: Effect) -> tuple[int, float]:
    """How many rows two effects share, and the largest difference of the metric in them; NaN without any."""
    both = one.rows.merge(other.rows, on=ROW_KEY, suffixes=("_a", "_b"))
    if both.empty:
        return 0, math.nan
    return len(both), float((both.value_a - both.value_b).abs().max())
