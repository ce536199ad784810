"""Vectors: extracted for an experiment, kept in its run, and shown in its report."""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from steerlab.core._numbers import check_flag
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import DataError
from steerlab.core.targets import Targets
from steerlab.experiment._blocks import Block, Folded, Plots, Section, Table
from steerlab.experiment._blocks.findings import LONG_TABLE, numbered
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import table_of
from steerlab.experiment._store.cells import Cell
from steerlab.experiment._store.results import Kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.run_folder import RunFolder, read_bytes
from steerlab.experiment._store.session import Session, plain_option
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.steering.extraction._pair_activations import Origin, Reading
from steerlab.steering.extraction.extract import extract
from steerlab.steering.positions.where import Where, WhereLike, as_where, last_prompt
from steerlab.steering.positions.where import default as default_where
from steerlab.steering.vectors import SteeringVector, VectorSet


def measure_vectors(
    run: Run,
    pairs: ContrastPairs | Targets,
    *,
    method: str,
    site: str,
    layers: Any,
    read: WhereLike,
    chat: bool,
    options: Mapping[str, Any],
) -> VectorSet:
    """See `steerlab.experiment.Experiment.extract`."""
    if not isinstance(pairs, ContrastPairs | Targets):
        raise DataError(
            f"An experiment takes ContrastPairs or Targets, got {type(pairs).__name__}; make them with "
            "sl.ContrastPairs.from_lists(positives, negatives), say."
        )
    where, chat = None if read is None else as_where(read, last_prompt(), argument="read"), check_flag(chat, "chat")
    options = {"name": run.session.name, "seed": run.session.seed} | dict(options)
    if "where" in options:
        options["where"] = as_where(options["where"], default_where())
    run.session.open()
    given = {k: one.to_json() if isinstance(one, Where) else plain_option(one) for k, one in options.items()}
    what = {"data": pairs.hash, "method": method, "site": site, "layers": plain_option(layers), "chat": chat}
    what |= {"read": None if where is None else where.to_json(), "options": given}
    key = Cell("vectors", what).key(run.session.engine_hash)
    found = run.results.find("vectors", key)
    if found is None:
        with run.look("extract", lambda: ([pairs if isinstance(pairs, Targets) else None], key)):
            found = extract(run.session.engine, pairs, method, site, layers, where, chat=chat, **options)
        run.keep_as("vectors", key, found)
    elif found.origin is None and isinstance(pairs, ContrastPairs):
        found = _with_origin(run.session, found, where, chat, options)
        run.results.put("vectors", key, found)
    return found


def _with_origin(
    session: Session, vectors: VectorSet, read: Where | None, chat: bool, options: Mapping[str, Any]
) -> VectorSet:
    """Vectors from contrast pairs, read back from disk, that remember their making as those just extracted do."""
    sites = {vector.site for vector in vectors.values()}
    where = last_prompt() if read is None else read
    reading = Reading(sites.pop(), tuple(vectors), where, str(options.get("pool", "mean")), chat)
    return VectorSet(vectors.by_layer, Origin(weakref.ref(session.lazy), reading, int(options["seed"])))


def _write(folder: RunFolder, place: str, vectors: VectorSet) -> None:
    vectors.save(folder.path / place)
    folder.enter(place, read_bytes(folder.path / place))


def vector_blocks(vectors: Any) -> list[Block]:
    """Geometry and origin of a set of vectors."""
    found = list(vectors.values())
    table = vector_table(found)
    if len(found) < 2:
        return [table]
    from steerlab.experiment import plots
    from steerlab.experiment._blocks.pictures import picture

    cosines, norms = plots.cosine_frame(vectors), plots.norm_frame(vectors)
    pictures = [
        picture(
            "cosines",
            partial(plots.plot_cosines, cosines),
            plots.describe_cosines(cosines),
            "Cosine between the vectors of every two layers.",
        ),
        picture(
            "norms",
            partial(plots.plot_norms, norms),
            plots.describe_norms(norms),
            "Norm of each layer's vector, beside the stream's median norm there (log scale).",
        ),
    ]
    return [Plots(pictures), Folded(f"The {len(found)} vectors", [table]) if len(found) > LONG_TABLE else table]


def vector_table(vectors: Sequence[SteeringVector]) -> Table:
    """Name, place and origin of vectors, a row each."""
    columns = ["hook_point", "name", "method", "pairs", "norm", "median_norm_of_the_stream", "data_hash", "vector_hash"]
    rows = [_origin(vector) for vector in vectors]
    return table_of(pd.DataFrame(rows, columns=columns), "Vectors and where they come from")


def _origin(vector: SteeringVector) -> tuple[Any, ...]:
    card = vector.card
    origin = (vector.name, card.method, card.n_pairs, vector.norm, card.median_norm, card.data_hash)
    return (vector.hook_point.name, *origin, vector.hash)


def _sections(m: Material) -> list[Section]:
    return numbered("Vectors", [*map(vector_blocks, m.of("vectors")), *([[vector_table(m.used)]] if m.used else [])])


VECTORS = Measurement(Kind("vectors", "vectors", "vectors/{:03d}.safetensors", _write, VectorSet.load), _sections)
