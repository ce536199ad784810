"""What differs between two runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core.errors import InputError
from steerlab.display import Fold, Piece, Remarks, Shown, Table, count
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.effect import Effect

ROW_KEY = ["family", "draw", "dose", "item"]
SAME_ROW = ["plan_hash", "data_hash"]
MATCHES = {
    "plan": "same plan, targets and metric",
    "words": "plans of the same words, same targets and metric",
    "targets": "same targets",
    "order": "matched by order alone",
}
EFFECT_COLUMNS = [
    "effect_a",
    "effect_b",
    "matched_by",
    "metric_a",
    "metric_b",
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
    "other_draws",
]


@dataclass(frozen=True, repr=False)
class RunComparison(Shown):
    """Two runs side by side.

    Attributes:
        configuration: a row per entry of configuration and versions, and per setting of each pair of effects: `entry`,
            `a`, `b`, `same`.
        effects: a row per pair of effects: their numbers; what they were `matched_by` (`plan`: the same plan, targets
            and metric; `words`: plans that read alike, on the same targets in the same metric; `targets`: the same
            targets; `order`: nothing but their order); metrics, slopes (of the metric, per unit of dose), intervals,
            verdicts; `shared_rows`, the rows of the same arm, dose, item, plan and metric, and the largest difference
            of the metric in them (NaN without any); `other_draws`, the control rows that both have under one number,
            but of different plans, and that were not compared.
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

    def _finding(self) -> str:
        differing = count(len(self.differences), "entry").replace("entrys", "entries")
        pairs = count(len(self.effects), "pair")
        alone = len(self.only_a) + len(self.only_b)
        return f"{differing} of the configuration differ, {pairs} of effects, {alone} in one run only"

    def _pieces(self) -> Sequence[Piece]:
        columns = ["effect_a", "effect_b", "matched_by", "slope_a", "slope_b", "verdict_a", "verdict_b"]
        columns.append("largest_difference")
        return [
            Table.of_frame(self.differences, caption="what differs", more=".differences"),
            Table.of_frame(self.effects[columns], caption="effects", more=".effects"),
            Remarks([line for line in str(self).splitlines() if line.startswith("effect ") and "only in" in line]),
            Fold("all of the configuration", [Table.of_frame(self.configuration, limit=200, more=".configuration")]),
        ]

    def __str__(self) -> str:
        differing = self.differences.to_dict("records")
        lines = [f"{row['entry']}: {row['a']} | {row['b']}" for row in differing] or ["same configuration"]
        lines += [_pair_text(row) for row in self.effects.to_dict("records")]
        for side, numbers in (("first", self.only_a), ("second", self.only_b)):
            lines += [f"effect {number}: only in the {side} run" for number in numbers]
        return "\n".join(lines)


def compare(run_a: str | Path | Experiment, run_b: str | Path | Experiment) -> RunComparison:
    """What differs between two runs: configuration, versions, data, and the effects both have measured.

    Effects are paired by what they are: first those of the same plan, targets and metric; then those whose plans read
    alike (vectors or norms differ if the models do); then those on the same targets; the rest by order. Rows are
    compared only where both are of the same plan: control arms of another seed are other vectors.

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
    left, right = _entries(a), _entries(b)
    for i, j, _ in pairs:
        name = f"effect {i}" if i == j else f"effect {i} | {j}"
        left |= {f"{name} {key}": value for key, value in _described(a.effects[i]).items()}
        right |= {f"{name} {key}": value for key, value in _described(b.effects[j]).items()}
    return RunComparison(_side_by_side(left, right), pd.DataFrame(rows, columns=EFFECT_COLUMNS), only_a, only_b)


def _opened(run: Any) -> Experiment:
    if isinstance(run, Experiment):
        return run
    if isinstance(run, str | Path):
        return Experiment.load(run)
    raise InputError(f"compare takes run directories or experiments, got {type(run).__name__}.")


def _side_by_side(left: Mapping[str, str], right: Mapping[str, str]) -> pd.DataFrame:
    rows = [(name, left.get(name, "–"), right.get(name, "–")) for name in dict.fromkeys([*left, *right])]
    frame = pd.DataFrame(rows, columns=["entry", "a", "b"])
    return frame.assign(same=[one == other for _, one, other in rows])


def _entries(experiment: Experiment) -> dict[str, str]:
    stated = experiment.configuration()
    flat = {name: str(stated[name]) for name in ("model", "backend", "seed", "weights_hash", "dtype")}
    flat |= {f"option {name}": str(value) for name, value in stated["load_options"].items()}
    return flat | {f"version {name}": str(value) for name, value in stated["versions"].items()}


def _described(effect: Effect) -> dict[str, str]:
    """An effect's plan, metric, data and settings in words. Its seed is its run's, and stands there."""
    stated = {"plan": effect.plan_text, "plan_hash": effect.plan_hash, "metric": effect.settings.metric_identity}
    return stated | {"targets_hash": str(effect.provenance.get("targets_hash"))} | _settings(effect)


def _settings(effect: Effect) -> dict[str, str]:
    settings, data = effect.settings, effect.provenance
    return {
        "doses": ", ".join(f"{dose:g}" for dose in effect.doses),
        "controls": _controls_text(effect),
        "max_ppl_ratio": f"{settings.max_ppl_ratio:g}",
        "axis": settings.axis,
        "level": f"{settings.level:g}",
        "n_resamples": str(settings.n_resamples),
        "smallest": "none" if settings.smallest is None else f"{settings.smallest:g}",
        "adjustment": settings.adjustment,
        "rule": str(settings.rule),
        "pairs_hash": str(data.get("pairs_hash")),
        "neutral_hash": str(data.get("neutral_hash")),
    }


def _controls_text(effect: Effect) -> str:
    """The control draws that ran, by family."""
    arms: Any = effect.rows.loc[effect.rows.family != "vector", ["family", "draw"]]
    counts = arms.drop_duplicates().groupby("family").size()
    return ", ".join(f"{count} {family}" for family, count in counts.items()) or "none"


def _matched(a: Sequence[Effect], b: Sequence[Effect]) -> tuple[list[tuple[int, int, str]], list[int], list[int]]:
    pairs: list[tuple[int, int, str]] = []
    keys_a, keys_b = [_keys(effect) for effect in a], [_keys(effect) for effect in b]
    left, right = list(range(len(a))), list(range(len(b)))
    for stage in range(len(keys_a[0]) if a else 0):
        for i in list(left):
            found = next((j for j in right if keys_a[i][stage] == keys_b[j][stage]), None)
            if found is not None:
                pairs.append((i, found, keys_a[i][stage][0]))
                left.remove(i)
                right.remove(found)
    return sorted(pairs), left, right


def _keys(effect: Effect) -> list[tuple[str, ...]]:
    """What an effect is matched by, one stage after the other; each begins with the name of its match."""
    targets, metric = str(effect.provenance.get("targets_hash")), effect.settings.metric_identity
    plan = ("plan", effect.plan_hash, targets, metric)
    words = ("words", effect.plan_text, targets, metric)
    settings = tuple(_settings(effect).values())  # of several that fit, the one with the same settings
    same_items = ("targets", targets)
    by_items = [(*same_items, effect.plan_hash), same_items]
    return [(*plan, *settings), plan, (*words, *settings), words, *by_items, ("order",)]


def _effect_row(a: Sequence[Effect], b: Sequence[Effect], i: int, j: int, how: str) -> tuple[Any, ...]:
    one, other = a[i], b[j]
    metrics, slopes = (one.settings.metric, other.settings.metric), (one.slope, other.slope)
    verdicts = (one.verdict, other.verdict)
    return (i, j, how, *metrics, *slopes, *one.ci, *other.ci, *verdicts, *_row_differences(one, other))


def _row_differences(one: Effect, other: Effect) -> tuple[int, float, int]:
    """Rows two effects share, the largest difference of the metric in them, and control rows of other draws."""
    both: Any = one.rows.merge(other.rows, on=ROW_KEY, suffixes=("_a", "_b"))
    same = pd.Series(one.settings.metric_identity == other.settings.metric_identity, index=both.index)
    for name in SAME_ROW:
        same &= both[f"{name}_a"] == both[f"{name}_b"]
    shared = both[same]
    other_draws = int(((both.family != "vector") & (both.plan_hash_a != both.plan_hash_b)).sum())
    largest = math.nan if shared.empty else float((shared.value_a - shared.value_b).abs().max())
    return len(shared), largest, other_draws


def _pair_text(row: Mapping[Any, Any]) -> str:
    named = row["metric_a"] != row["metric_b"]
    sides = " | ".join(_side_text(row, side, named) for side in ("a", "b"))
    title = f"effect {row['effect_a']} | {row['effect_b']} ({MATCHES[row['matched_by']]})"
    return "\n".join([title, f"  slope {sides}", f"  {_rows_text(row)}"])


def _side_text(row: Mapping[Any, Any], side: str, named: bool) -> str:
    slope, low, high = row[f"slope_{side}"], row[f"low_{side}"], row[f"high_{side}"]
    interval = "no interval" if math.isnan(low) else f"[{low:+.4g}, {high:+.4g}]"
    metric = f" {row[f'metric_{side}']}" if named else ""
    return f"{slope:+.4g}{metric} {interval}, {row[f'verdict_{side}']}"


def _rows_text(row: Mapping[Any, Any]) -> str:
    if not row["shared_rows"]:
        return "no rows of the same plan, dose, item and metric to compare"
    text = f"{row['shared_rows']} shared rows differ by at most {row['largest_difference']:.3g}"
    if row["other_draws"]:
        text += f"; {row['other_draws']} control rows are of other draws and were not compared"
    return text
