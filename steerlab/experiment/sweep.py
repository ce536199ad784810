"""Sweeps: the metric of every item, for every arm and dose."""

from collections.abc import Sequence
from numbers import Real

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.targets import Targets
from steerlab.experiment.controls import Arm
from steerlab.experiment.metrics import Metric

ROW_COLUMNS = [
    "family",
    "draw",
    "dose",
    "item",
    "group",
    "value",
    "positive_log_prob",
    "negative_log_prob",
    "edited_tokens",
    "plan_hash",
    "vector_hash",
]


def check_doses(doses: Sequence[float]) -> list[float]:
    """Sorted doses, if there are at least two and all are finite and distinct.

    Raises:
        InputError: otherwise.
    """
    try:
        values = [] if isinstance(doses, str) else [float(dose) for dose in doses]
    except (TypeError, ValueError) as error:
        raise InputError(f"doses are two or more distinct finite numbers, got {doses!r}.") from error
    if len(values) < 2 or len(set(values)) < len(values) or not np.isfinite(values).all():
        raise InputError(f"doses are two or more distinct finite numbers, got {doses!r}.")
    return sorted(values)


def sweep(
    engine: Engine, cells: Sequence[tuple[Arm, float]], targets: Targets, metric: Metric, *, description: str = "effect"
) -> pd.DataFrame:
    """One row per cell (arm at a dose) and item.

    Returns:
        Columns `ROW_COLUMNS`: `value` is the metric; the two log-probs are means over an item's positive and negative
        targets, in nats; `edited_tokens` is the receipts' mean per target.
    """
    rows: list[tuple] = []
    for arm, dose in tqdm(cells, desc=description, delay=2.0, leave=False, disable=None):
        rows += _cell(engine, arm, dose, targets, metric)
    return pd.DataFrame(rows, columns=ROW_COLUMNS)


def _cell(engine: Engine, arm: Arm, dose: float, targets: Targets, metric: Metric) -> list[tuple]:
    plan = arm.plan.scaled(dose)
    scores = engine.score(targets.prompts, [item.targets for item in targets], plan=plan)
    edited = np.array([receipt.edited for receipt in engine.receipts])
    log_probs = scores.log_prob
    vectors = "+".join(dict.fromkeys(edit.vector.hash for edit in arm.plan))
    rows, start = [], 0
    for index, item in enumerate(targets):
        cut, stop = start + len(item.positives), start + len(item.targets)
        positive, negative = log_probs[start:cut], log_probs[cut:stop]
        rows.append(
            (
                arm.family,
                arm.draw,
                dose,
                index,
                item.group,
                _value(metric, positive, negative, index),
                float(positive.mean()),
                float(negative.mean()),
                float(edited[start:stop].mean()),
                plan.hash,
                vectors,
            )
        )
        start = stop
    return rows


def _value(metric: Metric, positive: np.ndarray, negative: np.ndarray, item: int) -> float:
    value = metric(positive, negative)
    if not isinstance(value, Real) or not np.isfinite(float(value)):
        raise InputError(f"The metric gave {value!r} for item {item}; it must give a finite number.")
    return float(value)
