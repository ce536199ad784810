"""Select: search vectors, layers and doses on development items, within constraints, every try kept."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._hook_points import resolve_layer
from steerlab.core._numbers import as_integer, as_list, as_number, check_number, shown
from steerlab.core._progress import progress
from steerlab.core._text import PromptLike
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.targets import Targets
from steerlab.display import Picture, Piece, Shown, figure
from steerlab.experiment._blocks import Block, Plot, Plots, Section
from steerlab.experiment._blocks.findings import Finding, finding_blocks, numbered
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.cells import Cell, join
from steerlab.experiment._store.looks import prompt_hashes
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import Session
from steerlab.experiment._wording import in_figures
from steerlab.experiment.measurements._checks import check_targets
from steerlab.experiment.measurements._item_values import item_values
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.cost import perplexity_ratio
from steerlab.experiment.measurements.entropy import entropy_change
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.experiment.measurements.texts import neutral_texts
from steerlab.scoring import text_nlls
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector, VectorSet

CONSTRAINTS: Final = ("ppl_ratio", "entropy_change", "anti_steerable")
DEFAULT_POLICY = SamplingPolicy(temperature=0.7, top_p=0.9)
VectorsLike = VectorSet | SteeringVector | Sequence[SteeringVector] | Mapping[str, "VectorSet | SteeringVector"]
TRY_COLUMNS = ["vector", "layer", "dose", "gain", "base_value", "value", *CONSTRAINTS, "plan_hash", "vector_hash"]


def plain_addition(vector: SteeringVector) -> Plan:
    """The plan that `select` tries by default: the vector added, so that a dose scales to median norms."""
    return Plan(add(vector, dose=1.0))


@dataclass(frozen=True, repr=False)
class Selection(Shown):
    """The try that won on development items, and all the others.

    Attributes:
        plan: the winning plan, scaled by its dose.
        vector: the winning vector.
        layer: its layer.
        dose: its dose.
        gain: mean change of the metric over the development items.
        table: a row per try, see `select`; `satisfied` and `chosen` say how it ended.
        metric: name of the metric.
        subject_to: the constraints.
        on_hash: content hash of the development items.
        prompts: hashes of their prompts.
        groups: their groups.
        metric_identity: differs between metrics of one name; None where a run did not note it.
        vector_name: name of the winning vector in the table.
    """

    plan: Plan
    vector: SteeringVector
    layer: int
    dose: float
    gain: float
    table: pd.DataFrame = field(repr=False)
    metric: str
    subject_to: Mapping[str, float]
    on_hash: str
    prompts: frozenset[str] = field(repr=False)
    groups: frozenset[str] = field(repr=False)
    metric_identity: str | None = None
    vector_name: str = ""

    def __post_init__(self) -> None:
        given: Any = self.vector
        if isinstance(given, str):  # in runs of earlier versions it was the name alone
            object.__setattr__(self, "vector_name", given)
            object.__setattr__(self, "vector", self.plan.edits[0].vector if self.plan else None)
        elif not self.vector_name:
            object.__setattr__(self, "vector_name", _name(self.vector))

    @property
    def edges(self) -> list[str]:
        """Where the winner lies at the end of what was tried of its vector, so that a better one may lie beyond.

        Dose 0, the baseline, counts as tried: only the outermost doses on either side of it are ends.
        """
        own: Any = self.table[self.table.vector == self.vector_name]
        doses, layers = sorted({0.0, *map(float, own.dose)}), sorted({*map(int, own.layer)})
        found = []
        if len(doses) > 2 and self.dose in (doses[0], doses[-1]):
            found.append(f"the {'highest' if self.dose == doses[-1] else 'lowest'} dose tried")
        if len(layers) > 1 and self.layer in (layers[0], layers[-1]):
            found.append(f"the {'last' if self.layer == layers[-1] else 'first'} layer tried")
        return found

    def _finding(self) -> str:
        return str(self)

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment._blocks.faces import finding_pieces  # which draws

        found = selection_finding(self, "")
        bounds = [f"{name} ≤ {figure(bound)}" for name, bound in self.subject_to.items()]
        said = [f"Within {', '.join(bounds)}." if bounds else "Without constraints.", f"Plan: {self.plan}."]
        said.append("The gain is that of the best of many tries, hence too large; confirm measures it anew.")
        remarks, *table = finding_pieces(replace(found, sentences=said))
        maps = [plot for name, frame in selection_maps(self).items() for plot in layer_dose_plots(frame, name)]
        return [remarks, *(Picture(plot.svg, plot.alt) for plot in maps), *table]

    def __str__(self) -> str:
        edge = f"; at {' and '.join(self.edges)}, so a better one may lie beyond the grid" if self.edges else ""
        bounds = ", ".join(f"{name} ≤ {bound:g}" for name, bound in self.subject_to.items())
        satisfying = f"of which {int(self.table.satisfied.sum())} satisfy {bounds}" if bounds else "with no constraint"
        return (
            f"{self.vector_name} at layer {self.layer}, dose {self.dose:g}: "
            f"{self.metric} {in_figures(self.gain, '+', 3)} on development items; best of "
            f"{len(self.table)} {'tries' if len(self.table) != 1 else 'try'}, {satisfying}{edge}"
        )


@dataclass(frozen=True)
class Try:
    """One candidate of a search.

    Attributes:
        name: name of the vector.
        vector: the vector.
        dose: what its plan is scaled by.
        plan: the plan, scaled by the dose.
    """

    name: str
    vector: SteeringVector
    dose: float
    plan: Plan


def list_tries(
    vectors: VectorsLike,
    doses: Sequence[float],
    *,
    layers: Iterable[int] | None = None,
    make: Callable[[SteeringVector], Plan] = plain_addition,
) -> list[Try]:
    """Every candidate of a search, in order of vector, layer and dose.

    Args:
        vectors: a vector, several, a set with one per layer, or sets and vectors by name.
        doses: doses to try; 0 is the baseline and is no try.
        layers: layers to try; all that the vectors have by default.
        make: makes the plan at dose 1 from a vector.

    Raises:
        InputError: if nothing is left to try, or a dose is 0, not finite, or there twice.
    """
    found = [as_number(dose) for dose in as_list(doses) or ()]
    values = [value for value in found if value is not None]
    if not values or 0 in values or len(set(values)) < len(found):
        raise InputError(f"Doses to select from are distinct finite numbers other than 0, got {shown(doses)}.")
    named = _named_vectors(vectors)
    wanted = None if layers is None else set(layers)
    chosen = [(name, v) for name, v in named if wanted is None or v.layer in wanted]
    missing = set() if wanted is None else wanted - {v.layer for _, v in chosen}
    if missing or not chosen:
        have = sorted({v.layer for _, v in named})
        raise InputError(
            f"There is no vector for layers {sorted(missing) or 'asked for'}; there are vectors for {have}."
        )
    return [Try(name, v, dose, make(v).scaled(dose)) for name, v in chosen for dose in values]


def select(
    engine: Engine,
    vectors: VectorsLike,
    doses: Sequence[float],
    on: Targets,
    *,
    layers: Iterable[int] | None = None,
    subject_to: Mapping[str, float] | None = None,
    metric: "str | Metric" = "log_prob_margin",
    texts: Sequence[PromptLike] = (),
    policy: SamplingPolicy = DEFAULT_POLICY,
    make: Callable[[SteeringVector], Plan] = plain_addition,
) -> Selection:
    """Searches vectors × layers × doses on development items for the largest gain within the constraints.

    The winner is the best of many, so its gain here is too good; `confirm` measures it on items of its own. Ties go to
    the lower perplexity ratio if that was measured, then to the smaller dose, then to the earlier try.

    Args:
        engine: the engine.
        vectors: a vector, several, a set with one per layer, or sets and vectors by name.
        doses: doses to try, other than 0.
        on: development items.
        layers: layers to try, negative ones counted from the end; all that the vectors have by default.
        subject_to: upper bounds by name: `ppl_ratio` of `texts`, `entropy_change` (mean change of policy entropy on
            `texts` in nats, either way), `anti_steerable` (share of items whose metric falls).
        metric: `log_prob_margin`, `choice_prob` or a function, as for an effect.
        texts: neutral texts for the first two constraints.
        policy: the policy of `entropy_change`.
        make: makes the plan at dose 1 from a vector; adds it by default.

    Returns:
        A `Selection`. Its table has a row per try, in order: `vector`, `layer`, `dose`, `gain` (mean of value −
        base_value), `base_value`, `value`, `ppl_ratio`, `entropy_change` (both NaN unless constrained),
        `anti_steerable`, `plan_hash`, `vector_hash`, `satisfied`, `chosen`.

    Raises:
        InputError: for an unknown constraint, texts that are missing, or if no try satisfies the constraints; the
            message then names the closest.
    """
    bounds = check_constraints(subject_to, texts)
    tries = list_tries(vectors, doses, layers=_layers(layers, engine), make=make)
    return _search(engine, tries, on, bounds=bounds, metric=metric, texts=texts, policy=policy)


def measure_selection(
    run: Run,
    vectors: VectorsLike,
    doses: Sequence[float],
    on: Targets,
    *,
    layers: Iterable[int] | None,
    subject_to: Mapping[str, float] | None,
    metric: "str | Metric",
    texts: Sequence[PromptLike] | None,
    policy: SamplingPolicy,
    make: Callable[[SteeringVector], Plan],
) -> Selection:
    """See `steerlab.experiment.Experiment.select`; every try is a cell."""
    session = run.session
    check_targets(on)
    SamplingPolicy.check(policy)
    session.open()
    tries = list_tries(vectors, doses, layers=_layers(layers, session), make=make)
    neutral = neutral_texts(texts)
    bounds, own = check_constraints(subject_to, neutral), None if texts is None else neutral
    named, identity = [[one.plan.hash, one.name] for one in tries], metric_identity(metric)
    with run.measuring("select", lambda: ([on, own], [named, identity, bounds, str(policy)])):
        _, measure = find_metric(metric)
        engine = cell_engine_for(session)
        item_values(engine, [None, *(one.plan for one in tries)], on, measure)  # in one call, which some engines batch
        same = {
            "on": on.hash,
            "metric": identity,
            "texts": session.inputs.add_data(list(neutral)),
            "constraints": sorted(bounds),
            "policy": asdict(policy),
        }
        found = _search(
            engine,
            tries,
            on,
            bounds=bounds,
            metric=metric,
            texts=neutral,
            policy=policy,
            kept=lambda one, row: session.cells.get(_cell(one, same), session.engine_hash, row),
        )
    return run.keep("selection", [named, on.hash, identity, bounds, neutral, str(policy)], found)


def _search(
    engine: Engine,
    tries: Sequence[Try],
    on: Targets,
    *,
    bounds: Mapping[str, float],
    metric: "str | Metric",
    texts: Sequence[PromptLike],
    policy: SamplingPolicy,
    kept: Callable[[Try, Callable[[], pd.DataFrame]], pd.DataFrame] = lambda one, row: row(),
) -> Selection:
    """Measures every try and chooses.

    Args:
        engine: the engine.
        tries: the tries.
        on: development items.
        bounds: checked constraints.
        metric: as in `select`.
        texts: as in `select`.
        policy: as in `select`.
        kept: gives the row of a try, from where it is kept or from the function that measures it.
    """
    _, measure = find_metric(metric)

    @functools.cache
    def baseline() -> Baseline:  # needs the model, so only if a try is missing
        return Baseline.of(engine, on, measure, texts if "ppl_ratio" in bounds else ())

    def row(one: Try) -> pd.DataFrame:
        found = measure_try(engine, one, on, measure, baseline(), bounds=bounds, texts=texts, policy=policy)
        return pd.DataFrame([found], columns=TRY_COLUMNS)

    rows = []
    with progress(len(tries), "select", "try") as bar:
        for one in tries:
            rows.append(kept(one, partial(row, one)))
            bar.update()
    return choose(tries, join(rows), on, metric=metric, subject_to=bounds)


def _cell(one: Try, same: Mapping[str, Any]) -> Cell:
    return Cell("tries", {"plan": one.plan.hash, "vector": one.vector.hash, "name": one.name, "dose": one.dose, **same})


@dataclass(frozen=True)
class Baseline:
    """The unsteered model's figures, which every try is compared with.

    Attributes:
        values: metric per development item.
        nlls: per neutral text, nats per token; empty if perplexity is not asked for.
    """

    values: np.ndarray
    nlls: Sequence[np.ndarray]

    @classmethod
    def of(cls, engine: Engine, on: Targets, metric: Metric, texts: Sequence[PromptLike]) -> "Baseline":
        """Measures them."""
        return cls(item_values(engine, [None], on, metric)[0], text_nlls(engine, texts) if texts else ())


def measure_try(
    engine: Engine,
    one: Try,
    on: Targets,
    metric: Metric,
    baseline: Baseline,
    *,
    bounds: Mapping[str, float],
    texts: Sequence[PromptLike] = (),
    policy: SamplingPolicy = DEFAULT_POLICY,
) -> dict[str, Any]:
    """One row of a selection's table; see `select`."""
    values = item_values(engine, [one.plan], on, metric)[0]
    change = values - baseline.values
    ratio = shift = math.nan
    if "ppl_ratio" in bounds:
        ratio = perplexity_ratio(text_nlls(engine, texts, plan=one.plan), baseline.nlls)
    if "entropy_change" in bounds:
        rows = entropy_change(engine, one.plan, texts, policy)
        shift = float((rows.steered - rows.base).mean())
    figures = (float(change.mean()), float(baseline.values.mean()), float(values.mean()), ratio, shift)
    row = (one.name, one.vector.layer, one.dose, *figures, float((change < 0).mean()), one.plan.hash, one.vector.hash)
    return dict(zip(TRY_COLUMNS, row, strict=True))


def choose(
    tries: Sequence[Try],
    table: pd.DataFrame,
    on: Targets,
    *,
    metric: "str | Metric",
    subject_to: Mapping[str, float],
) -> Selection:
    """The best row of a table of tries.

    Args:
        tries: the tries, in the table's order.
        table: rows of `measure_try`.
        on: the development items they were measured on.
        metric: the metric.
        subject_to: upper bounds by name.

    Raises:
        InputError: if no try satisfies the constraints; names the closest.
    """
    satisfied = np.all([table[name].abs() <= bound for name, bound in subject_to.items()], axis=0)
    table = table.assign(satisfied=np.broadcast_to(satisfied, len(table)).astype(bool))
    if not table.satisfied.any():
        raise InputError(_nothing_satisfies(table, subject_to))
    order = table.assign(size=table.dose.abs()).sort_values(
        ["satisfied", "gain", "ppl_ratio", "size"], ascending=[False, False, True, True], kind="stable"
    )
    best = int(order.index[0])
    return Selection(
        plan=tries[best].plan,
        vector=tries[best].vector,
        layer=tries[best].vector.layer,
        dose=tries[best].dose,
        gain=float(table.gain[best]),
        table=table.assign(chosen=table.index == best),
        metric=find_metric(metric)[0],
        subject_to=dict(subject_to),
        on_hash=on.hash,
        prompts=prompt_hashes(on),
        groups=frozenset(on.groups),
        metric_identity=metric_identity(metric),
        vector_name=tries[best].name,
    )


def _nothing_satisfies(table: pd.DataFrame, bounds: Mapping[str, float]) -> str:
    """Names the try whose constraints are exceeded by the least, relative to the bounds, added up."""
    excess = sum(
        (table[name].abs() / max(bound, 1e-9) - 1).clip(lower=0).fillna(math.inf) for name, bound in bounds.items()
    )
    row = table.loc[int(np.argmin(np.asarray(excess)))]
    seen = ", ".join(f"{name} {row[name]:.4g} (bound {bound:g})" for name, bound in bounds.items())
    return (
        f"None of the {len(table)} tries satisfies the constraints. Closest: {row.vector} at layer {row.layer}, dose "
        f"{row.dose:g}, with {seen}. Try smaller doses or other layers, or loosen the bounds."
    )


def check_constraints(subject_to: Mapping[str, float] | None, texts: Sequence[PromptLike]) -> dict[str, float]:
    """The constraints, if they are known, finite, and can be measured.

    Raises:
        InputError: otherwise.
    """
    bounds = dict(subject_to or {})
    for name, bound in bounds.items():
        if name not in CONSTRAINTS:
            raise InputError(f"Unknown constraint {name!r}; known: {', '.join(CONSTRAINTS)}.")
        bounds[name] = check_number(bound, f"The bound on {name}", least=0)
        if name != "anti_steerable" and not texts:
            raise InputError(f"{name} is measured on neutral texts; pass texts=.")
    return bounds


def _layers(layers: Any, of: Engine | Session) -> list[int] | None:
    """The layers asked for, counted from the front; the model is asked for its depth only where one is negative."""
    if layers is None:
        return None
    found = [as_integer(layer) for layer in ([layers] if as_list(layers) is None else as_list(layers) or ())]
    if None in found:
        raise InputError(f"layers is a list of layers, integers, got {shown(layers)}.")
    return [layer if layer >= 0 else resolve_layer(layer, of.info.n_layers) for layer in found if layer is not None]


def _named_vectors(vectors: VectorsLike) -> list[tuple[str, SteeringVector]]:
    if isinstance(vectors, SteeringVector):
        return [(_name(vectors), vectors)]
    if isinstance(vectors, VectorSet):
        return [(_name(vector), vector) for vector in vectors.by_layer]
    if isinstance(vectors, Mapping):
        return [(name, vector) for name, part in vectors.items() for _, vector in _named_vectors(part)]
    found: list[Any] = list(vectors)
    for vector in found:
        if not isinstance(vector, SteeringVector):
            raise InputError(f"select takes steering vectors or sets of them, got {type(vector).__name__}.")
    return [(_name(vector), vector) for vector in found]


def _name(vector: SteeringVector) -> str:
    return vector.name or vector.card.method or vector.hash


def selection_finding(selection: Selection, place: str) -> Finding:
    """What was chosen, from how many tries, and every try with the chosen one first."""
    table: Any = selection.table
    ordered = table.sort_values(["chosen", "satisfied", "gain"], ascending=False, kind="stable")
    kept = [column for column in ordered.columns if column not in ("plan_hash", "vector_hash")]
    return Finding([f"{selection}."], ordered[kept], place=place, caption=f"All {len(table)} tries, best first")


def selection_maps(selection: Selection) -> dict[str, pd.DataFrame]:
    """For each vector tried at several layers: `layer`, `dose`, `value` (the gain)."""
    table: Any = selection.table
    maps = {}
    for name, part in table.groupby("vector", sort=False):
        if part.layer.nunique() > 1 and not part.duplicated(["layer", "dose"]).any():
            maps[str(name)] = part[["layer", "dose", "gain"]].rename(columns={"gain": "value"})
    return maps


def layer_dose_plots(frame: pd.DataFrame, name: str) -> list[Plot]:
    """A map of layers and doses.

    Args:
        frame: `layer`, `dose`, `value` (change of the metric).
        name: of the vector, or empty.
    """
    from steerlab.experiment import plots
    from steerlab.experiment._blocks.pictures import picture

    of = f"{name}: " if name else ""
    caption = f"{of}Change of the metric from the unsteered model. The best of many tries looks better than it is."
    draw = partial(plots.plot_layer_dose, frame)
    return [picture("layer-dose", draw, of + plots.describe_layer_dose(frame), caption)]


def _sections(m: Material) -> list[Section]:
    parts: list[list[Block]] = []
    for k, selection in enumerate(m.of("selections")):
        maps = [plot for name, frame in selection_maps(selection).items() for plot in layer_dose_plots(frame, name)]
        drawn: list[Block] = [Plots(maps)] if maps else []
        finding = selection_finding(selection, f"findings/selection-{k:03d}/table.parquet")
        parts.append([*drawn, *finding_blocks(finding)])
    sections = numbered("Selection on development items", parts, "Selection")
    given = [Plots(layer_dose_plots(frame, "")) for frame in m.layer_doses]
    return [*sections, *([Section("Layers and doses", given)] if given else [])]


SELECTION = Measurement(finding_kind("selection", "selections", Selection), _sections)
