"""What a sweep file may say: a base experiment, and a grid of what differs from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

import steerlab as sl
from steerlab._cli.spec import AnyPlace, ExperimentSpec, FilePath, Number, Place, PlanSpec, Section
from steerlab._cli.yaml_file import checked, experiment_of, model_from, read_mapping, read_spec


class GridSpec(Section):
    """What differs between cells; every combination is a cell. What is left out is as in the base.

    Cells are in this order, the last key varying fastest.

    Attributes:
        models: aliases, directories or hub ids.
        seeds: seeds of controls.
        vectors: names out of the base's `vectors`; by default all of them.
        methods: extraction methods.
        sites: where in a layer the vector is read and added.
        reads: positions it is read at.
        layers: layers.
        plans: plans by name, each with the keys of an experiment's `plan`.
        positions: positions that are edited, in place of the plan's `where`.
        doses: each a number, which is measured against the unsteered model, or a list of doses.
        metrics: metrics.
    """

    models: list[str] | None = None
    seeds: list[int] | None = None
    vectors: list[str] | None = None
    methods: list[str] | None = None
    sites: list[str] | None = None
    reads: list[Place] | None = None
    layers: list[int] | None = None
    plans: dict[str, PlanSpec] | None = None
    positions: list[AnyPlace] | None = None
    doses: list[Number | list[Number]] | None = None
    metrics: list[str] | None = None

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        for key in self.model_fields_set:
            values = getattr(self, key)
            if values is not None and not values:
                raise ValueError(f"{key} is empty; leave it out, or give at least one")
            listed = list(values or ())
            for position, value in enumerate(listed):
                if value in listed[:position]:
                    raise ValueError(f"{key} names {value!r} twice")
        return self


class SweepSpec(Section):
    """A sweep, as its file says it.

    Attributes:
        name: names the sweep's folder.
        base: an experiment file, whose paths count from itself, or the keys of one.
        grid: what differs between cells.
        root: the folder that it lies in.
    """

    name: str
    base: FilePath | dict[str, Any]
    grid: GridSpec
    root: FilePath = Path("runs")


@dataclass(frozen=True)
class Sweep:
    """A sweep with its base read.

    Attributes:
        name: names the sweep's folder.
        base: the experiment that cells are variations of.
        grid: what differs between cells.
        root: the folder that it lies in.
    """

    name: str
    base: ExperimentSpec
    grid: GridSpec
    root: Path


def is_sweep(data: dict[Any, Any]) -> bool:
    """Whether a file's keys are those of a sweep."""
    return "grid" in data or "base" in data


def sweep_of(data: dict[Any, Any], path: Path) -> Sweep:
    """The sweep that a YAML file describes.

    Args:
        data: its keys and values.
        path: the file.

    Raises:
        DataError: for a key that is unknown, missing or of the wrong kind, in it or in its base.
    """
    spec = checked(SweepSpec, data, f"{path}")
    folder, models = path.parent, spec.grid.models
    found = None if models is None else [model_from(folder, model) for model in models]
    return Sweep(spec.name, _base(spec, path), spec.grid.model_copy(update={"models": found}), folder / spec.root)


def _base(spec: SweepSpec, path: Path) -> ExperimentSpec:
    if isinstance(spec.base, dict):
        return experiment_of(_filled(spec.base, spec), path, key="base")
    place = path.parent / spec.base
    if is_sweep(read_mapping(place)):
        raise sl.DataError(f"{path}: base: {place} is a sweep; a base is an experiment.")
    return read_spec(place)


def _filled(base: dict[Any, Any], spec: SweepSpec) -> dict[Any, Any]:
    """The keys of a base, with those that the grid states anyway; each cell replaces them."""
    grid, filled = spec.grid, {"name": spec.name, **base}
    if grid.doses and "doses" not in filled:
        filled["doses"] = doses_of(grid.doses[0])
    if grid.layers:
        filled |= {"vector": _with_layer(filled["vector"], grid.layers[0])} if "vector" in filled else {}
        if isinstance(filled.get("vectors"), dict):
            filled["vectors"] = {name: _with_layer(one, grid.layers[0]) for name, one in filled["vectors"].items()}
    return filled


def _with_layer(vector: Any, layer: int) -> Any:
    stated = not isinstance(vector, dict) or "layer" in vector or "layers" in vector
    return vector if stated else {**vector, "layer": layer}


def doses_of(entry: "float | list[float]") -> list[float]:
    """The doses of a cell: a list as it stands, one dose with the unsteered model."""
    return list(entry) if isinstance(entry, list) else [0.0, entry]
