"""Made-up result rows with known slopes."""

import numpy as np
import pandas as pd

from steerlab.experiment.measurements.effect._rows import ROW_COLUMNS
from steerlab.experiment.measurements.effect._settings import RULE, EffectSettings
from steerlab.experiment.measurements.effect.result import Effect

DOSES = [-0.2, -0.1, 0.0, 0.1, 0.2]


def make_effect(
    item_slopes: list[float],
    *,
    nulls: dict[str, list[float]] | None = None,
    ratios: dict[float, float] | None = None,
    groups: list[str] | None = None,
    noise: float = 0.0,
    smallest: float | None = None,
    rule: int = RULE,
) -> Effect:
    """An effect whose items respond linearly with the given slopes, and control draws with theirs."""
    rng = np.random.default_rng(0)
    names = groups or [f"g{i}" for i in range(len(item_slopes))]
    rows = []
    for dose in DOSES:
        for item, slope in enumerate(item_slopes):
            rows.append(_row("vector", 0, dose, item, names[item], 1.0 + slope * dose + noise * rng.standard_normal()))
    for family, slopes in (nulls or {}).items():
        for draw, slope in enumerate(slopes):
            for dose in DOSES:
                rows += [_row(family, draw, dose, i, name, 1.0 + slope * dose) for i, name in enumerate(names)]
    ratio = [(ratios or {}).get(dose, 1.0) for dose in DOSES]
    cost = pd.DataFrame({"dose": DOSES, "nll": 3.0, "perplexity": 20.0, "ppl_ratio": ratio, "num_tokens": 100})
    settings = EffectSettings(n_resamples=500, smallest=smallest, rule=rule)
    return Effect(pd.DataFrame(rows, columns=ROW_COLUMNS), cost, "hash", "plan", settings)


def _row(family: str, draw: int, dose: float, item: int, group: str, value: float) -> tuple:
    return (family, draw, dose, item, group, value, value, 0.0, 1.0, "plan", "vector", "data", "model", "engine")
