"""The exact scores of every item, for every arm and dose, and the metric made of them."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from steerlab.core.engine import Engine
from steerlab.core.targets import Targets
from steerlab.experiment.measurements.controls import Arm
from steerlab.experiment.measurements.metrics import Metric, value_of
from steerlab.steering.plan import Plan

HASH_COLUMNS = ["plan_hash", "vector_hash", "data_hash", "model_hash", "engine_hash"]
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
    *HASH_COLUMNS,
]


def score_plans(engine: Engine, plans: Sequence[Plan], targets: Targets) -> list[pd.DataFrame]:
    """Scores of all targets under each of several plans, in one call of the engine.

    Returns:
        Per plan a row per item and target, positives before negatives: `item`, `target`, `log_prob` (nats),
        `num_tokens`, `boundary`, `edited_tokens` (the receipt's).
    """
    items = [item.targets for item in targets]
    scores = engine.score(
        targets.prompts * len(plans), items * len(plans), plan=[plan for plan in plans for _ in targets]
    )
    edited = [receipt.edited for receipt in scores.receipts]
    per_plan = sum(map(len, items))
    return [
        pd.DataFrame(
            {
                "item": np.repeat(np.arange(len(items)), [len(row) for row in items]),
                "target": np.concatenate([np.arange(len(row)) for row in items]),
                "log_prob": scores.log_prob[start : start + per_plan],
                "num_tokens": scores.num_tokens[start : start + per_plan],
                "boundary": scores.boundary[start : start + per_plan],
                "edited_tokens": edited[start : start + per_plan],
            }
        )
        for start in range(0, per_plan * len(plans), per_plan)
    ]


def item_rows(
    scores: pd.DataFrame, arm: Arm, dose: float, targets: Targets, metric: Metric, hashes: Mapping[str, str]
) -> pd.DataFrame:
    """One row per item of one arm at one dose.

    Args:
        scores: as `score_plans` gives them.
        arm: the arm.
        dose: what its plan was scaled by.
        targets: the items.
        metric: the metric.
        hashes: `data_hash`, `model_hash` and `engine_hash`, the same in every row.

    Returns:
        Columns `ROW_COLUMNS`: `value` is the metric; the two log-probs are means over an item's positive and negative
        targets, in nats; `edited_tokens` is the receipts' mean per target, 0 at dose 0.

    Raises:
        InputError: if the metric gives something else than a finite number.
    """
    log_probs = scores.log_prob.to_numpy()
    edited = scores.edited_tokens.to_numpy() * (dose != 0)  # at dose 0 operators reach tokens and change nothing
    plan_hash = arm.plan.scaled(dose).hash
    vectors = "+".join(dict.fromkeys(edit.vector.hash for edit in arm.plan))
    same = (plan_hash, vectors, *(hashes[name] for name in HASH_COLUMNS[2:]))
    rows, start = [], 0
    for index, item in enumerate(targets):
        cut, stop = start + len(item.positives), start + len(item.targets)
        positive, negative = log_probs[start:cut], log_probs[cut:stop]
        value = value_of(metric, positive, negative, index)
        means = (float(positive.mean()), float(negative.mean()), float(edited[start:stop].mean()))
        rows.append((arm.family, arm.draw, dose, index, item.group, value, *means, *same))
        start = stop
    return pd.DataFrame(rows, columns=ROW_COLUMNS)
