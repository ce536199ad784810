"""The report: one self-contained HTML page that opens from disk."""

import base64
import io
import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, StrictUndefined

from steerlab.core.files import write_atomic
from steerlab.experiment.effect import Effect

if TYPE_CHECKING:
    from steerlab.experiment.experiment import Experiment

MAX_TABLE_ROWS = 60
FAMILY_NAMES = {
    "vector": "the vector",
    "random": "random directions",
    "shuffled": "label flips",
    "wrong_layer": "wrong layer",
}


def write_report(experiment: "Experiment", path: Path) -> Path:
    """Renders every effect, cost, entropy and generation of an experiment to a page."""
    template = (files("steerlab.experiment") / "report.html.j2").read_text(encoding="utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    results = experiment.results
    return write_atomic(
        path,
        page.from_string(template).render(
            name=experiment.name,
            seed=experiment.seed,
            effects=[_effect_view(effect) for effect in experiment.effects],
            costs=[_table(frame) for frame in results.costs],
            entropies=[_entropy_view(frame) for frame in results.entropies],
            generations=[_generation_view(frame) for frame in results.generations],
            vectors=[_vector_rows(vectors) for vectors in results.vectors],
        ),
    )


def _effect_view(effect: Effect) -> dict[str, Any]:
    from steerlab.experiment import plots

    drawings = [plots.plot_dose_response, plots.plot_item_slopes, plots.plot_null_slopes, plots.plot_cost]
    drawn = [(d.__doc__ or "").splitlines()[0] for d in drawings]
    return {
        "effect": effect,
        "plots": [{"image": _image(effect, draw), "alt": text} for draw, text in zip(drawings, drawn, strict=True)],
        "doses": _dose_table(effect),
        "nulls": _null_table(effect),
        "receipts": _receipt_table(effect),
        "provenance": _provenance(effect),
    }


def _image(effect: Effect, draw: Callable[..., Any]) -> str:
    """A plot as a data URI."""
    import matplotlib.pyplot as plt

    from steerlab.experiment.plots import style

    with style():
        figure, ax = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
        draw(effect, ax)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _dose_table(effect: Effect) -> dict[str, Any]:
    table = effect.by_dose().rename(columns={"value": effect.settings.metric})
    return _table(table.assign(fitted=["yes" if fitted else "no" for fitted in table.fitted]))


def _null_table(effect: Effect) -> dict[str, Any]:
    table = effect.nulls()
    table["family"] = [FAMILY_NAMES[family] for family in table.family]
    table["rank"] = [None if math.isnan(rank) else f"{rank:.3f}" for rank in table["rank"]]
    return _table(
        table.rename(columns={"family": "arm", "mean_size": "mean |slope|", "largest_size": "largest |slope|"})
    )


def _receipt_table(effect: Effect) -> dict[str, Any]:
    grouped = effect.rows.groupby(["family", "dose"], sort=False)
    table = grouped.agg(draws=("draw", "nunique"), edited_tokens_per_target=("edited_tokens", "mean")).reset_index()
    table["family"] = [FAMILY_NAMES[family] for family in table.family]
    return _table(table.rename(columns={"family": "arm"}))


def _provenance(effect: Effect) -> list[tuple[str, str]]:
    entries = {"plan": effect.plan_text, "plan hash": effect.plan_hash} | dict(effect.provenance)
    entries |= {"metric": effect.settings.metric, "bootstrap draws": effect.settings.n_resamples}
    flat = []
    for key, value in entries.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        flat.append((key.replace("_", " "), text))
    return flat


def _entropy_view(frame: pd.DataFrame) -> dict[str, Any]:
    change = frame.steered - frame.base
    return {
        "tokens": len(frame),
        "texts": int(frame.text.nunique()),
        "base": float(frame.base.mean()),
        "steered": float(frame.steered.mean()),
        "change": float(change.mean()),
    }


def _generation_view(frame: pd.DataFrame) -> list[dict[str, Any]]:
    views = []
    for _, part in frame.groupby(["prompt_index", "sample_index"], sort=False):
        texts = [{"dose": dose, "text": text} for dose, text in zip(part.dose, part.text, strict=True)]
        views.append({"prompt": part.prompt.iloc[0], "texts": texts})
    return views


def _vector_rows(vectors: Any) -> dict[str, Any]:
    rows = [
        (v.hook_point.name, v.card.method, v.card.n_pairs, v.norm, v.card.median_norm, v.card.data_hash, v.hash)
        for v in vectors.values()
    ]
    columns = ["hook point", "method", "pairs", "norm", "median ‖h‖", "data hash", "vector hash"]
    return _table(pd.DataFrame(rows, columns=columns))


def _table(frame: pd.DataFrame) -> dict[str, Any]:
    shown = frame.head(MAX_TABLE_ROWS)
    return {
        "columns": [str(column).replace("_", " ") for column in frame.columns],
        "rows": [[_cell(value) for value in row] for row in shown.itertuples(index=False)],
        "left_out": len(frame) - len(shown),
    }


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    return str(value)
