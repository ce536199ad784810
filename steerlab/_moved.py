"""Modules that have moved: code, notebooks and pickled objects that name one by its old path still find it."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "steerlab.steering.operator": "steerlab.steering.operators.base",
    "steerlab.steering.edit": "steerlab.steering.operators.edit",
    "steerlab.steering.registry": "steerlab.steering.operators.registry",
    "steerlab.steering.projection": "steerlab.steering.operators",
    "steerlab.steering.translation": "steerlab.steering.operators",
    "steerlab.steering.rotation": "steerlab.steering.operators",
    "steerlab.steering.sets": "steerlab.steering.positions.sets",
    "steerlab.steering.where": "steerlab.steering.positions.where",
    "steerlab.steering.schedule": "steerlab.steering.positions.schedule",
    "steerlab.steering.condition": "steerlab.steering.positions.condition",
    "steerlab.steering.content": "steerlab.steering.positions.prompt_lookup",
    "steerlab.steering.learned": "steerlab.steering.extraction.bipo",
    "steerlab.steering.reading": "steerlab.steering.extraction.pair_activations",
    "steerlab.steering.extract": "steerlab.steering.extraction.extract",
    "steerlab.steering.estimators": "steerlab.steering.extraction.estimators",
    "steerlab.steering.axes": "steerlab.steering.extraction.axes",
    "steerlab.steering.moments": "steerlab.steering.extraction.moments",
    "steerlab.steering.diagnostics": "steerlab.steering.extraction.diagnostics",
    "steerlab.steering.assign": "steerlab.steering.plan_assignment",
    "steerlab.steering.strengths": "steerlab.steering.checks",
    "steerlab.steering.rows": "steerlab.steering.row_values",
    "steerlab.core.pairs": "steerlab.core.contrast_pairs",
    "steerlab.core.pairing": "steerlab.core.encoded_pairs",
    "steerlab.core.endings": "steerlab.core.stopping",
}
"""Old path -> the module that holds its names now."""


class MovedModules(MetaPathFinder, Loader):
    """Imports a module of `MOVED` as the module it has become."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that has moved; None for any other."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module of today in the place of the one asked for."""
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])
