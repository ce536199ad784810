"""Modules that have moved and whose old path stood in the documentation: notebooks that import them still work."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "steerlab.core.pairs": "steerlab.core.contrast_pairs",
    "steerlab.experiment.entropies": "steerlab.experiment.measurements.entropy",
    "steerlab.scoring.show_tokens": "steerlab.exploring.show_tokens",
    "steerlab.steering.edit": "steerlab.steering.operators._edit",
    "steerlab.steering.extract": "steerlab.steering.extraction.extract",
    "steerlab.steering.operator": "steerlab.steering.operators._base",
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
