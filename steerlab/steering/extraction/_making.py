"""Vectors whose card says which model they were made on."""

from typing import Any

from torch import Tensor

from steerlab.core._hook_points import HookPoint
from steerlab.core.engine import Engine
from steerlab.steering.low_rank import LowRank
from steerlab.steering.vectors import SteeringVector, VectorCard, model_entries


def made_vector(
    engine: Engine, point: HookPoint, values: Tensor, low_rank: LowRank | None = None, **entries: Any
) -> SteeringVector:
    """A vector that an engine's model gave at a hook point; its card has the median norm there, and these entries."""
    median = engine.median_norm(point.layer, point.site)
    card = VectorCard(**model_entries(engine.info), extracted_at=point.name, median_norm=median, **entries)
    return SteeringVector(values, point, card, low_rank)
