"""The figures of an effect, computed from its rows: slopes, intervals, nulls, margin, what could have been found."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from steerlab.experiment.measurements.controls import RANK_LEVEL
from steerlab.experiment.measurements.effect._settings import EffectSettings
from steerlab.measures.intervals import (
    cluster_bootstrap_mean,
    cluster_standard_error,
    cluster_t_mean,
    least_squares_curvatures,
    least_squares_slopes,
    null_rank,
    rank_floor,
)
from steerlab.measures.power import Design, NullDraws

RANKED_FAMILIES = ("random", "shuffled")
MARGIN_QUANTILE = 0.95


@dataclass(frozen=True)
class Figures:
    """What an effect's rows say; see the properties of `Effect`."""

    n_doses: int
    fitted_doses: list[float]
    item_slopes: pd.DataFrame
    slope: float
    ci: tuple[float, float]
    equivalence_ci: tuple[float, float]
    curvature: float
    curvature_ci: tuple[float, float]
    collapse_dose: float
    anti_steerable: float
    null_slopes: pd.DataFrame
    rank_slope: float
    null_ranks: dict[str, float]
    margin: float
    detectable: float
    needed_groups: float


def figures_of(rows: pd.DataFrame, cost: pd.DataFrame, settings: EffectSettings) -> Figures:
    real: Any = rows[rows.family == "vector"]
    items = real.drop_duplicates("item").sort_values("item")[["item", "group"]].reset_index(drop=True)
    affordable = set(cost[cost.ppl_ratio <= settings.max_ppl_ratio].dose)
    fitted = sorted(float(dose) for dose in real.dose.unique() if dose in affordable)
    groups: list[str] = items.group.tolist()
    slopes, curvatures = np.full(len(items), np.nan), np.full(len(items), np.nan)
    if len(fitted) >= 2:
        table = item_table(real, fitted)
        slopes = least_squares_slopes(np.array(fitted), table)
        if len(fitted) >= 3:
            curvatures = least_squares_curvatures(np.array(fitted), table)
    nulls, rank_slope = _null_slopes(rows, fitted)
    families = {
        family: nulls[nulls.family == family].slope.to_numpy()
        for family in RANKED_FAMILIES
        if (nulls.family == family).any()
    }
    design = design_of(slopes, groups, families, settings)
    sizes = cluster_t_mean(slopes, groups, level=2 * settings.level - 1)
    return Figures(
        n_doses=int(real.dose.nunique()),
        fitted_doses=fitted,
        item_slopes=items.assign(slope=slopes),
        slope=float(slopes.mean()),
        ci=_interval(slopes, groups, settings),
        equivalence_ci=(sizes.low, sizes.high),
        curvature=float(curvatures.mean()),
        curvature_ci=_interval(curvatures, groups, settings),
        collapse_dose=float(cost[cost.ppl_ratio > settings.max_ppl_ratio].dose.abs().min()),
        anti_steerable=float((slopes < 0).mean()) if np.isfinite(slopes).all() else math.nan,
        null_slopes=nulls,
        rank_slope=rank_slope,
        null_ranks={family: null_rank(rank_slope, drawn) for family, drawn in families.items()},
        margin=margin_of(families, settings),
        detectable=math.nan if design is None else design.detectable(),
        needed_groups=math.nan if design is None or settings.smallest is None else design.groups_for(settings.smallest),
    )


def _interval(values: np.ndarray, groups: Sequence[str], settings: EffectSettings) -> tuple[float, float]:
    if settings.rule == 1:
        options = {"level": settings.level, "n_resamples": settings.n_resamples, "seed": settings.seed}
        found = cluster_bootstrap_mean(values, groups, **options)
    else:
        found = cluster_t_mean(values, groups, level=settings.level)
    return found.low, found.high


def margin_of(families: dict[str, np.ndarray], settings: EffectSettings) -> float:
    """The size that counts as small; NaN with too few random directions for its quantile."""
    if settings.smallest is not None:
        return settings.smallest
    drawn = families.get("random", np.array([]))
    if rank_floor(len(drawn)) > RANK_LEVEL:
        return math.nan
    return float(np.quantile(np.abs(drawn), MARGIN_QUANTILE))


def design_of(
    slopes: np.ndarray, groups: Sequence[str], families: dict[str, np.ndarray], settings: EffectSettings
) -> Design | None:
    """What decides how large a slope must be; None without slopes, nulls or a second group."""
    error, n_groups = cluster_standard_error(slopes, groups)
    if math.isnan(error) or not families:
        return None
    drawn = {family: NullDraws.of(found) for family, found in families.items()}
    return Design(error, n_groups, drawn, 1 - settings.level)


def item_table(arm: Any, doses: Sequence[float]) -> np.ndarray:
    """Metric values of one arm's rows, shape [items, doses]."""
    return np.stack([arm[arm.dose == dose].sort_values("item").value.to_numpy() for dose in doses], axis=1)


def outermost(doses: Sequence[float]) -> list[float]:
    """The two doses farthest apart; control arms run at these."""
    return [min(doses), max(doses)]


def _null_slopes(rows: pd.DataFrame, fitted: Sequence[float]) -> tuple[pd.DataFrame, float]:
    columns = ["family", "draw", "slope"]
    if len(fitted) < 2:
        return pd.DataFrame([], columns=columns), math.nan
    ends = outermost(fitted)
    real: Any = rows[rows.family == "vector"]
    rank_slope = _mean_slope(ends, item_table(real, ends))
    arms: Any = rows[rows.family != "vector"]
    if arms.empty:
        return pd.DataFrame([], columns=columns), rank_slope
    baseline = real[real.dose == 0].sort_values("item").value.to_numpy()
    slopes = [_mean_slope(ends, table) for table in _tables_by_arm(arms, baseline, ends)]
    return arms[columns[:2]].drop_duplicates(ignore_index=True).assign(slope=slopes), rank_slope


def _mean_slope(doses: Sequence[float], table: np.ndarray) -> float:
    return float(least_squares_slopes(np.array(doses), table).mean())


def _tables_by_arm(arms: pd.DataFrame, baseline: np.ndarray, doses: Sequence[float]) -> Iterator[np.ndarray]:
    """What `item_table` gives of each arm, in the order in which the arms come; there may be thousands.

    Dose 0 is every arm's baseline.
    """
    numbers = arms.groupby(["family", "draw"], sort=False).ngroup().to_numpy()
    order = np.lexsort([arms.item.to_numpy(), numbers])
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    columns = (np.split(arms[name].to_numpy()[order], cuts) for name in ("dose", "value"))
    for dose, value in zip(*columns, strict=True):
        found = [value[dose == one] for one in doses]
        chosen = [baseline if one == 0 and not len(own) else own for one, own in zip(doses, found, strict=True)]
        yield np.stack(chosen, axis=1)
