"""A cell of a sweep: one vector, one plan, its doses and controls; what names it, and how it is measured."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd
import torch

from steerlab.core._hashing import content_hash
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError, ModelNotFoundError
from steerlab.core.targets import Targets
from steerlab.experiment._store.cells import Cell, StoredCell
from steerlab.experiment._store.fingerprint import engine_versions, numeric_options
from steerlab.experiment._store.session import plain_option
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements._checks import check_doses
from steerlab.experiment.measurements.controls import Controls, check_pairs
from steerlab.experiment.measurements.effect._rows import ROW_COLUMNS
from steerlab.experiment.measurements.effect.result import Effect, EffectSettings
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.models import resolve, weights_hash
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import Where
from steerlab.steering.vectors import SteeringVector

KIND = "sweep"
CELL_COLUMNS = [*ROW_COLUMNS, "ppl_ratio"]


@dataclass(frozen=True)
class EngineRecipe:
    """How the engine of a cell is started. Cells of one recipe share an engine.

    Attributes:
        model: alias, directory or hub id.
        backend: `lens` or `vllm`.
        options: of `steerlab.load` or `steerlab.VLLMEngine`, dtype among them.
    """

    model: str
    backend: str = "lens"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Tells recipes apart; a content hash."""
        return content_hash([self.model, self.backend, plain_option(dict(self.options))])

    def what(self) -> dict[str, Any]:
        """Everything that determines its numbers, as far as it is known before the engine starts."""
        try:
            weights = weights_hash(resolve(self.model, revision=self.options.get("revision")).path)
        except ModelNotFoundError:
            weights = None  # a worker on another machine may have it
        return {
            "model": weights or f"name:{self.model}",
            "backend": self.backend,
            "dtype": str(self.options.get("dtype")),
            "options": numeric_options(self.options),
            "versions": engine_versions(self.backend),
        }


@dataclass(frozen=True)
class VectorRecipe:
    """Where the vector of a cell comes from.

    Attributes:
        layer: its layer.
        pairs: the contrast pairs; label-flip controls need them.
        method: how it is extracted, see `steerlab.extract`.
        site: where in the layer.
        read: positions it is read at; the last prompt token by default.
        vector: a vector that is there already, in place of an extraction.

    Raises:
        DataError: with neither pairs nor a vector.
    """

    layer: int
    pairs: ContrastPairs | None = None
    method: str = "mean_diff"
    site: str = "resid_post"
    read: Where | None = None
    vector: SteeringVector | None = None

    def __post_init__(self) -> None:
        if self.pairs is None and self.vector is None:
            raise DataError("A vector is extracted from pairs=, or is given as vector=; there is neither.")

    def what(self) -> dict[str, Any]:
        """Everything that determines the vector, besides the engine."""
        pairs = None if self.pairs is None else self.pairs.hash
        if self.vector is not None:
            return {"vector": self.vector.hash, "pairs": pairs, "layer": self.layer}
        read = None if self.read is None else self.read.to_json()
        return {"pairs": pairs, "layer": self.layer, "method": self.method, "site": self.site, "read": read}

    def made(self, experiment: Experiment) -> SteeringVector:
        if self.vector is not None or self.pairs is None:
            assert self.vector is not None
            return self.vector
        options = {"method": self.method, "site": self.site, "read": self.read}
        return experiment.extract(self.pairs, layers=[self.layer], **options).by_layer[0]


@dataclass(frozen=True)
class SweepCell:
    """A small experiment: a vector is made, its plan measured at some doses, and against controls.

    Attributes:
        settings: what distinguishes this cell in its sweep, by name; the leading columns of its rows.
        engine: what runs it.
        vector: where the vector comes from.
        make: makes the plan at scale 1 from the vector. It must be picklable to run in another process.
        targets: items it is measured on.
        doses: at least two, as for `Experiment.effect`.
        controls: control arms.
        metric: a name or a function, as for an effect.
        max_ppl_ratio: doses that cost more enter no fit.
        neutral: texts for the cost; shipped neutral prose if None.
        seed: of controls.
        smallest: the size of the smallest slope that matters, as for an effect.

    Raises:
        InputError: for doses, a metric or pairs that cannot be used.
    """

    settings: Mapping[str, Any]
    engine: EngineRecipe
    vector: VectorRecipe
    make: Callable[[SteeringVector], Plan]
    targets: Targets
    doses: tuple[float, ...]
    controls: Controls
    metric: str | Metric = "log_prob_margin"
    max_ppl_ratio: float = 1.5
    neutral: tuple[PromptLike, ...] | None = None
    seed: int = 0
    smallest: float | None = None

    def __post_init__(self) -> None:
        check_doses(self.doses)
        find_metric(self.metric)
        check_pairs(self.controls, self.vector.pairs)
        taken = sorted(set(self.settings) & {*CELL_COLUMNS, "cell"})
        if taken:
            raise InputError(f"settings become columns; {taken[0]!r} is a column of the rows already.")

    def cell(self, engine: Mapping[str, Any]) -> Cell:
        """What this measurement is.

        Args:
            engine: its `engine.what()`, which reads weights and is asked once for all cells of an engine.
        """
        sample = SteeringVector.from_tensor(torch.ones(8), layer=self.vector.layer, site=self.vector.site)
        what = {
            "engine": dict(engine),
            "vector": self.vector.what(),
            "plan": self.make(sample).hash,
            "targets": self.targets.hash,
            "doses": sorted(map(float, self.doses)),
            "controls": asdict(self.controls),
            "metric": metric_identity(self.metric),
            "max_ppl_ratio": float(self.max_ppl_ratio),
            "neutral": None if self.neutral is None else content_hash(list(self.neutral)),
            "seed": self.seed,
        }
        if self.smallest is not None:  # so that cells of versions without it are found again
            what["smallest"] = float(self.smallest)
        return Cell(KIND, what)

    def measure(self, engine: Engine, engine_hash: str) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Measures the cell.

        Args:
            engine: an engine of this cell's recipe.
            engine_hash: hash of what it computes with.

        Returns:
            A row per arm, dose and item: the columns `ROW_COLUMNS` of an effect's rows, and `ppl_ratio` of the dose
            (NaN for control arms, whose cost is not measured); and what an `Effect` is made of besides.
        """
        experiment = Experiment(KIND, engine, seed=self.seed, root=None)
        effect = experiment.effect(
            self.make(self.vector.made(experiment)),
            self.targets,
            self.doses,
            controls=self.controls,
            metric=self.metric,
            pairs=self.vector.pairs,
            max_ppl_ratio=self.max_ppl_ratio,
            neutral=self.neutral,
            smallest=self.smallest,
        )
        ratio = effect.rows.dose.map(effect.cost.set_index("dose").ppl_ratio)
        rows = effect.rows.assign(engine_hash=engine_hash, ppl_ratio=ratio.where(effect.rows.family == "vector"))
        about = {
            "cost": effect.cost.to_dict("list"),
            "settings": asdict(effect.settings),
            "plan_hash": effect.plan_hash,
            "plan_text": effect.plan_text,
            "from_pairs": effect.provenance["from_pairs"],
        }
        return rows, about


def effect_of(stored: StoredCell) -> Effect:
    """The effect that a finished cell holds."""
    about = stored.cell.about
    rows: Any = stored.frame[ROW_COLUMNS]
    provenance = {
        "targets_hash": stored.cell.what["targets"],
        "engine_hash": stored.engine_hash,
        "from_pairs": about.get("from_pairs", False),
    }
    return Effect(
        rows,
        pd.DataFrame(about["cost"]),
        about["plan_hash"],
        about["plan_text"],
        EffectSettings(**({"rule": 1} | about["settings"])),  # versions before rule 2 noted none
        provenance,
    )
