"""What the package must know of a kind of measurement."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from steerlab.experiment._blocks import Section
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._store.cells import StoredCell
from steerlab.experiment._store.results import Kind
from steerlab.experiment._store.session import Session


@dataclass(frozen=True)
class Measurement:
    """One kind of measurement; `steerlab.experiment.measurements._registry` lists them all.

    Attributes:
        kind: how its results are listed and stored.
        sections: makes the sections of a report on them.
        reruns: per kind of cell, what measures such a cell again.
        check: raises a `RunError` if the figures stored in a folder do not follow from its rows; None for no check.
    """

    kind: Kind
    sections: Callable[[Material], list[Section]]
    reruns: Mapping[str, Callable[[Session, StoredCell], pd.DataFrame]] = field(default_factory=dict)
    check: Callable[[Path], None] | None = None
