"""Writing a report by the suffix of its path."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from steerlab.core.errors import InputError
from steerlab.core.files import write_atomic
from steerlab.experiment.report.document import document
from steerlab.experiment.report.markdown import markdown, picture_folder
from steerlab.experiment.report.material import Material
from steerlab.experiment.report.page import html_page
from steerlab.experiment.results import Results
from steerlab.steering.vectors import SteeringVector

if TYPE_CHECKING:
    from steerlab.experiment.experiment import Experiment


def write_report(experiment: "Experiment", path: str | Path) -> Path:
    """Writes everything an experiment found so far.

    Args:
        experiment: the experiment; its model is not needed.
        path: `….html` for one self-contained page; `….md` for Markdown, with pictures in the folder `…_files`.

    Returns:
        The path written.

    Raises:
        InputError: for another suffix.
    """
    return write_material(material_of(experiment), path)


def write_material(material: Material, path: str | Path) -> Path:
    """Writes a report of material that need not come from an experiment; see `write_report`."""
    path = Path(path)
    if path.suffix.lower() in (".html", ".htm"):
        return write_atomic(path, html_page(document(material)))
    if path.suffix.lower() in (".md", ".markdown"):
        text, pictures = markdown(document(material), picture_folder(path))
        for name, data in pictures.items():
            write_atomic(path.parent / picture_folder(path) / name, data)
        return write_atomic(path, text)
    raise InputError(f"A report is written as .html or .md; {path.name!r} is neither.")


def material_of(experiment: "Experiment") -> Material:
    """What an experiment has found, as a report takes it.

    Where a frame of `entropy` has the column `token` (the tokens' text), its first text is shown token by token.
    """
    results, stated = experiment.results, experiment.configuration()
    return Material(
        name=experiment.name,
        seed=experiment.seed,
        effects=experiment.effects,
        vectors=results.vectors,
        used=_used_otherwise(results),
        costs=results.costs,
        entropies=results.entropies,
        generations=results.generations,
        token_texts=[_first_text(frame) for frame in results.entropies if "token" in frame.columns],
        selfchecks=results.selfchecks,
        selections=results.selections,
        confirmations=results.confirmations,
        looks=experiment.looks,
        parities=results.parities,
        interactions=results.interactions,
        transfers=results.transfers,
        facts={"experiment": experiment.name} | {key: stated[key] for key in ("backend", "dtype", "seed")},
    )


def _used_otherwise(results: Results) -> list[SteeringVector]:
    """Vectors of effects and selections that the experiment did not extract itself, each once."""
    own = {vector.hash for vectors in results.vectors for vector in vectors.values()}
    plans = [plan for _, plan in results.effects] + [selection.plan for selection in results.selections]
    found = {(v.hash, v.name): v for plan in plans for edit in plan for v in edit.vectors if v.hash not in own}
    return list(found.values())


def _first_text(frame: pd.DataFrame) -> pd.DataFrame:
    rows: Any = frame[frame.text == frame.text.iloc[0]]
    names = {"log_prob_base": "base", "log_prob_steered": "steered"}
    return rows[["token", *names]].rename(columns=names).reset_index(drop=True)
