"""Cells of small sweeps on the tiny models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import steerlab as sl
from steerlab.experiment.scaling import EngineRecipe, SweepCell, VectorRecipe
from tests.experiment.data import PAIRS, TARGETS, TEXTS


def added(vector: sl.SteeringVector) -> sl.Plan:
    """The vector added, so that a scale is a dose."""
    return sl.Plan(sl.add(vector, dose=1.0))


def cell(model: Path | str, layer: int = 1, seed: int = 0, **changes: Any) -> SweepCell:
    """A cell that takes a fraction of a second."""
    given = {
        "settings": {"model": Path(model).name, "seed": seed, "layer": layer},
        "engine": EngineRecipe(str(model), "lens", {"dtype": "float32", "device": "cpu"}),
        "vector": VectorRecipe(layer, PAIRS),
        "make": added,
        "targets": TARGETS,
        "doses": (-0.1, 0.0, 0.1),
        "controls": sl.Controls(random=0, wrong_layer=True),
        "max_ppl_ratio": 50.0,
        "neutral": tuple(TEXTS),
        "seed": seed,
    }
    return SweepCell(**{**given, **changes})


def cells(models: Sequence[Path | str], layers: Sequence[int] = (1, 2)) -> list[SweepCell]:
    return [cell(model, layer) for model in models for layer in layers]
