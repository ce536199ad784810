"""Running a sweep: from its file to cells, and from the cells' rows to what is printed."""

import difflib
import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import typer

import steerlab as sl
from steerlab._cli.console import complain, say, show_table
from steerlab._cli.inputs import Blame, Inputs, NamedVector, load_options, read_inputs
from steerlab._cli.loading import check_writable, quiet_transformers
from steerlab._cli.options import Position
from steerlab._cli.spec import ExperimentSpec, PlanSpec, VectorSpec, positions_of
from steerlab._cli.sweep_spec import GridSpec, Sweep, doses_of
from steerlab.core._hook_points import check_site
from steerlab.experiment._wording import in_figures
from steerlab.experiment.scaling import (
    EngineRecipe,
    RayWorkers,
    SweepCell,
    SweepCheck,
    SweepResult,
    VectorRecipe,
    run_locally,
    run_sweep,
)
from steerlab.experiment.scaling._folder import SUMMARY_FILE
from steerlab.steering.extraction.estimators import estimator

FAILED = 1
SHOWN = 30
# Keys of a base that a sweep has no use for.
_UNUSED = ("select", "confirm", "cost", "entropy", "generations", "baselines")


def run_sweep_file(spec: Sweep, *, source: Path, ray: RayWorkers | None, overwrite: bool) -> None:
    """Runs a sweep and prints what came of its cells.

    Args:
        spec: the sweep.
        source: the file it was read from.
        ray: the Ray workers; None runs it in this process.
        overwrite: remove what lies in the sweep's folder first.

    Raises:
        SteerlabError: for whatever in it cannot be used.
        typer.Exit: with status 1 if a cell failed.
    """
    started = time.perf_counter()
    if ray is not None:
        from steerlab.experiment.scaling._ray_workers import require_ray

        require_ray()
    cells = cells_of(spec, Blame(source))
    left_out = [key for key in _UNUSED if getattr(spec.base, key)]
    if left_out:
        say(f"A sweep measures effects; of the base it leaves out: {', '.join(left_out)}")
    say(f"{len(cells)} cells, {'in this process' if ray is None else 'on Ray'}")
    check = SweepCheck(**spec.base.selfcheck.model_dump())
    with quiet_transformers():
        result = run_sweep(
            cells,
            spec.root / spec.name,
            run=run_locally if ray is None else ray,
            check=check,
            overwrite=overwrite,
            about={"name": spec.name, "grid": spec.grid.model_dump(mode="json", exclude_none=True)},
        )
    _show(result)
    say(f"{time.perf_counter() - started:.0f} seconds")
    if len(result.failed):
        raise typer.Exit(FAILED)


# --- from a file to cells -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Point:
    """One combination of the grid."""

    model: str
    seed: int
    vector: NamedVector
    spec: VectorSpec
    layer: int
    plan_name: str
    plan: PlanSpec
    doses: list[float]
    metric: str


def cells_of(spec: Sweep, blame: Blame) -> list[SweepCell]:
    """The cells of a sweep, in the grid's order.

    Args:
        spec: the sweep.
        blame: names its file in errors.

    Raises:
        DataError: for what cannot be read or used.
    """
    with blame("name"):
        if not spec.name or Path(spec.name).name != spec.name or spec.name in (".", ".."):
            raise sl.InputError(f"name becomes a folder name; {spec.name!r} cannot be one.")
    with blame("root"):
        check_writable(spec.root, folder=True)
    base = spec.base.model_copy(update={**dict.fromkeys(_UNUSED), "root": spec.root})
    inputs = read_inputs(base, Blame(None if blame.source is None else Path(f"{blame.source}: base")))
    with blame("grid.vectors"):
        named = _chosen(spec.grid.vectors, inputs.vectors)
    points = list(_points(spec, named, blame))
    layers = "all" if base.controls.wrong_layer else sorted({point.layer for point in points})
    options = load_options(base, layers=layers)
    with blame("grid"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few draws were warned of when the controls were read
        return [_cell(point, base, inputs, options) for point in points]


def _cell(point: _Point, base: ExperimentSpec, inputs: Inputs, options: dict[str, Any]) -> SweepCell:
    spec, named = point.spec, point.vector
    given = None if named.vectors is None else named.vectors[point.layer]
    settings = {
        "model": point.model,
        "backend": base.backend,
        "dtype": base.dtype,
        "seed": point.seed,
        "vector": named.name,
        "method": (given.card.method or "") if given is not None else spec.method,
        "site": given.site if given is not None else spec.site,
        "read": spec.read.value if given is None else "",
        "layer": point.layer,
        "plan": point.plan_name,
        "where": _place(point.plan.where),
        "metric": point.metric,
    }
    return SweepCell(
        settings=settings,
        engine=EngineRecipe(point.model, base.backend, options),
        vector=VectorRecipe(point.layer, named.pairs, spec.method, spec.site, spec.read.where(), given),
        make=point.plan.plan,
        targets=inputs.targets,
        doses=tuple(point.doses),
        controls=inputs.controls,
        metric=point.metric,
        max_ppl_ratio=base.max_ppl_ratio,
        smallest=base.smallest,
        neutral=None if inputs.neutral is None else tuple(inputs.neutral),
        seed=point.seed,
    )


def _place(place: Position | dict[str, Any]) -> str:
    return str(positions_of(place)) if isinstance(place, dict) else place.value


def _points(spec: Sweep, named: list[NamedVector], blame: Blame) -> Iterator[_Point]:
    base, grid = spec.base, spec.grid
    models, seeds = grid.models or [base.model], grid.seeds or [base.seed]
    plans = grid.plans or {base.plan.operator: base.plan}
    doses = [doses_of(entry) for entry in grid.doses] if grid.doses else [base.doses]
    vectors = [point for one in named for point in _vectors(one, grid, blame)]
    axes = (models, seeds, vectors, plans.items(), grid.positions or [None], doses, grid.metrics or [base.metric])
    for model, seed, (vector, own, layer), (name, plan), position, run, metric in itertools.product(*axes):
        placed = plan if position is None else plan.model_copy(update={"where": position})
        yield _Point(model, seed, vector, own, layer, name, placed, run, metric)


def _vectors(named: NamedVector, grid: GridSpec, blame: Blame) -> Iterator[tuple[NamedVector, VectorSpec, int]]:
    """A vector in every way the grid has it made, at every layer."""
    for key in ("methods", "sites", "reads"):
        if getattr(grid, key) and named.vectors is not None:
            with blame(f"grid.{key}"):
                raise sl.InputError(f"{named.key} comes from a file, which says this already.")
    with blame("grid.layers"):
        layers = _layers(named, grid)
    own = named.spec
    axes = (grid.methods or [own.method], grid.sites or [own.site], grid.reads or [own.read])
    for method, site, read in itertools.product(*axes):
        with blame("grid.methods"):
            estimator(method)
        with blame("grid.sites"):
            check_site(site)
        spec = own.model_copy(update={"method": method, "site": site, "read": read})
        yield from ((named, spec, layer) for layer in layers)


def _layers(named: NamedVector, grid: GridSpec) -> list[int]:
    if named.vectors is not None:
        return [named.vectors[layer].layer for layer in grid.layers or named.vectors]
    if grid.layers:
        return grid.layers
    if named.spec.asked_layers == "all":
        raise sl.InputError(f"a sweep names its layers; {named.key}.layers is 'all'.")
    return [layer for layer in named.spec.asked_layers if isinstance(layer, int)]


def _chosen(wanted: list[str] | None, named: list[NamedVector]) -> list[NamedVector]:
    by_name = {one.name: one for one in named}
    for name in wanted or ():
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(by_name)}."
            raise sl.InputError(f"the base has no vector {name!r}; {hint}")
    return [by_name[name] for name in wanted or by_name]


# --- what came of it ----------------------------------------------------------------------------------------------


def _show(result: SweepResult) -> None:
    for text in result.warnings:
        complain("warning", text)
    for row in result.failed.to_dict("records"):
        complain("failed", f"cell {row['cell']} ({_told(row, result.summary)}): {row['error']}")
    done: Any = result.summary[result.summary.status == "done"]
    varied = _varied(result.summary)
    say()
    rows = [[str(row["cell"]), *(str(row[name]) for name in varied), *_figures(row)] for row in done.to_dict("records")]
    headings = ["cell", *varied, "slope", "interval", "rank", "verdict"]
    show_table(headings, rows[:SHOWN], text_columns=1 + len(varied))
    if len(rows) > SHOWN:
        say(f"… and {len(rows) - SHOWN} more, in {result.path / SUMMARY_FILE}")
    say()
    say(str(result), style="bold")


def _figures(row: dict[Any, Any]) -> list[str]:
    ranked = "" if math.isnan(row["null_rank"]) else f"{row['null_rank']:.3f}"
    return [
        in_figures(row["slope"], "+"),
        f"{in_figures(row['low'], '+')} {in_figures(row['high'], '+')}",
        ranked,
        row["verdict"],
    ]


def _varied(summary: pd.DataFrame) -> list[str]:
    """Settings in which cells differ; they stand between the key and the status."""
    columns = list(summary.columns)
    return [name for name in columns[2 : columns.index("status")] if len(set(summary[name])) > 1]


def _told(row: dict[Any, Any], summary: pd.DataFrame) -> str:
    return ", ".join(f"{name} {row[name]}" for name in _varied(summary)) or f"model {row['model']}"
