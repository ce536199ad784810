"""Completions paired by prompt and draw: side by side, and differences between doses."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.errors import DataError
from steerlab.measures.intervals import cluster_t_mean

KEY = ["prompt_index", "sample_index"]


def side_by_side(rows: pd.DataFrame, column: str = "text") -> pd.DataFrame:
    """One column per dose, one row per prompt and sample.

    Args:
        rows: as `generate_paired` makes them.
        column: what to show, e.g. `text` or a judge's opinion.

    Returns:
        `prompt_index`, `sample_index`, `prompt`, and one column per dose, named by it.

    Raises:
        DataError: if a completion is missing at a dose, or there twice.
    """
    wide = _wide(rows, column)
    prompts = rows.drop_duplicates(KEY).set_index(KEY).prompt
    named = wide.rename(columns={dose: f"{dose:g}" for dose in wide.columns})
    named.columns.name = None
    named.insert(0, "prompt", prompts.reindex(named.index))
    return named.reset_index()


@dataclass(frozen=True)
class PairedDifference:
    """How a figure of generated texts differs between two doses, over the same prompts and draws.

    Attributes:
        column: the figure.
        dose: the dose compared.
        base_dose: what it is compared with.
        base_mean: mean at the base dose, over the pairs.
        mean: mean at the dose, over the pairs.
        difference: mean − base_mean.
        low: lower end of its interval, Student's t over prompts with all their samples; NaN for one prompt.
        high: upper end.
        num_pairs: pairs of completions that have the figure at both doses.
        num_missing: pairs left out because one side has none (NaN).
        num_prompts: prompts of those pairs.
    """

    column: str
    dose: float
    base_dose: float
    base_mean: float
    mean: float
    difference: float
    low: float
    high: float
    num_pairs: int
    num_missing: int
    num_prompts: int


def paired_differences(
    rows: pd.DataFrame,
    column: str,
    *,
    base_dose: float = 0.0,
    level: float = 0.95,
) -> list[PairedDifference]:
    """The mean difference of a figure from its value at the base dose, at each other dose.

    Args:
        rows: a row per prompt, sample and dose.
        column: a numeric column, e.g. `num_tokens`, `repetition` or `judge`.
        base_dose: the dose to compare with.
        level: coverage of the intervals.

    Returns:
        One entry per other dose, in order of dose; `pd.DataFrame(entries)` is a table.

    Raises:
        DataError: if a completion is missing at a dose, or the base dose was not run.
    """
    wide = _wide(rows, column)
    if base_dose not in wide.columns:
        raise DataError(f"There are no completions at dose {base_dose:g}; doses here: {wide.columns.tolist()}.")
    others = [dose for dose in wide.columns if dose != base_dose]
    return [_difference(wide, column, float(dose), base_dose, level) for dose in others]


def _difference(wide: Any, column: str, dose: float, base_dose: float, level: float) -> PairedDifference:
    table = wide[[base_dose, dose]].astype(float)
    pairs = table.dropna()
    change = (pairs[dose] - pairs[base_dose]).to_numpy()
    prompts = pairs.index.get_level_values("prompt_index").astype(str).tolist()
    ends = cluster_t_mean(change, prompts, level=level)
    return PairedDifference(
        column=column,
        dose=dose,
        base_dose=base_dose,
        base_mean=_mean(pairs[base_dose]),
        mean=_mean(pairs[dose]),
        difference=_mean(change),
        low=ends.low,
        high=ends.high,
        num_pairs=len(pairs),
        num_missing=len(table) - len(pairs),
        num_prompts=len(set(prompts)),
    )


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _wide(rows: pd.DataFrame, column: str) -> Any:
    """Prompts and samples down, doses across; every cell filled exactly once."""
    missing = [name for name in (*KEY, "dose", column) if name not in rows.columns]
    if missing:
        raise DataError(f"The frame of completions lacks {missing}; it has {list(rows.columns)}.")
    counts = rows.groupby(KEY).dose.agg(["size", "nunique"])
    n_doses = rows.dose.nunique()
    if not ((counts["size"] == n_doses) & (counts["nunique"] == n_doses)).all():
        raise DataError("Each prompt and sample needs exactly one completion at each dose, so that they can be paired.")
    return rows.set_index([*KEY, "dose"])[column].unstack("dose")
