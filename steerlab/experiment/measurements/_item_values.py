"""The metric of every item under each of several plans."""

from collections.abc import Sequence

import numpy as np

from steerlab.core.engine import Engine
from steerlab.core.targets import Targets
from steerlab.experiment.measurements.metrics import Metric, value_of
from steerlab.steering.plan import Plan


def item_values(engine: Engine, plans: Sequence[Plan | None], targets: Targets, metric: Metric) -> np.ndarray:
    """One value per plan and item, shape [plans, items].

    Args:
        engine: the engine; all plans run in one call of its `score`.
        plans: the plans; None is the unsteered model.
        targets: the items.
        metric: function of an item's positive and negative log-probs.

    Raises:
        InputError: if the metric gives something else than a finite number.
    """
    items = [item.targets for item in targets]
    assigned = [plan for plan in plans for _ in items]
    log_probs = engine.score(targets.prompts * len(plans), items * len(plans), plan=assigned).log_prob
    cuts = np.cumsum([len(row) for row in items])[:-1]
    return np.array(
        [
            [
                value_of(metric, found[: len(item.positives)], found[len(item.positives) :], index)
                for index, (item, found) in enumerate(zip(targets, np.split(part, cuts), strict=True))
            ]
            for part in np.split(log_probs, len(plans))
        ]
    )
