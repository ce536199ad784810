"""Writing a report by the suffix of its path."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core._files import write_atomic
from steerlab.core.errors import InputError
from steerlab.display import escaped
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._report.document import document
from steerlab.experiment._report.markdown import markdown, picture_folder
from steerlab.experiment._report.page import html_page
from steerlab.experiment._store.results import Results
from steerlab.experiment._store.run import Run
from steerlab.experiment.measurements.confirmation import all_looks
from steerlab.experiment.measurements.effect import Effect
from steerlab.steering.vectors import SteeringVector


class ReportPath(type(Path())):
    """The path of a written report; a notebook shows the page itself, apart from the notebook's own styles."""

    def _repr_html_(self) -> str:
        if self.suffix.lower() not in (".html", ".htm") or not self.is_file():
            return f"<p>{escaped(self)}</p>"
        page = escaped(self.read_text(encoding="utf-8"))
        return (
            f'<p>{escaped(self)}</p><iframe title="report" sandbox="allow-popups" srcdoc="{page}" '
            'style="width:100%;height:40rem;border:1px solid currentColor;background:#fff"></iframe>'
        )


def write_material(material: Material, path: str | Path) -> ReportPath:
    """Writes a report.

    Args:
        material: what it shows.
        path: `….html` for one self-contained page; `….md` for Markdown, with pictures in the folder `…_files`.

    Returns:
        The path written; in a notebook it shows the page.

    Raises:
        InputError: for another suffix.
    """
    path = Path(path)
    if path.suffix.lower() in (".html", ".htm"):
        return ReportPath(write_atomic(path, html_page(document(material))))
    if path.suffix.lower() in (".md", ".markdown"):
        text, pictures = markdown(document(material), picture_folder(path))
        for name, data in pictures.items():
            write_atomic(path.parent / picture_folder(path) / name, data)
        return ReportPath(write_atomic(path, text))
    raise InputError(f"A report is written as .html or .md; {path.name!r} is neither.")


def material_of(run: Run) -> Material:
    """What a run has found, as a report takes it.

    Where a frame of `entropy` has the column `token` (the tokens' text), its first text is shown token by token.
    """
    results, session = run.results, run.session
    stated = session.stated()
    return Material(
        session.name,
        session.seed,
        used=_used_otherwise(results),
        token_texts=[_first_text(frame) for frame in results.entropies if "token" in frame.columns],
        looks=all_looks(run),
        prompts={effect.provenance["targets_hash"]: _prompts(run, effect) for effect, _ in results.effects},
        facts={"experiment": session.name, "date": f"{date.today():%-d %B %Y}"}
        | {key: stated[key] for key in ("model", "backend", "dtype", "seed")},
        results=results.by_attribute() | {"effects": [effect for effect, _ in results.effects]},
    )


def _prompts(run: Run, effect: Effect) -> list[str]:
    """The prompts of an effect's items as text: of a chat its last message."""
    return [_prompt_text(item.prompt) for item in run.session.inputs.targets(effect.provenance["targets_hash"])]


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if len(prompt) else ""
    return str(last["content"]) if isinstance(last, Mapping) else f"tokens {', '.join(map(str, prompt))}"


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
