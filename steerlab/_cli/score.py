"""`steerlab score`: exact log-probabilities of targets."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import steerlab as sl
from steerlab._cli import options
from steerlab._cli.console import quoted, say, show_json, show_table
from steerlab._cli.loading import loaded, make_plan

FIGURES = ("variant", "log_prob", "num_tokens", "mean_log_prob", "perplexity", "bits_per_byte", "boundary")


class Cut(StrEnum):
    """How prompt and target are encoded."""

    JOINT = "joint"
    SEPARATE = "separate"


def score(
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Prompt; repeatable.", show_default=False)
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Target, scored after each prompt; repeatable.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Instead, JSON lines (or an array) of `prompt` and `target`.", show_default=False
        ),
    ] = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    dtype: options.DtypeOption = options.Dtype.FLOAT32,
    vector: options.VectorOption = None,
    layer: options.LayerOption = None,
    dose: options.DoseOption = None,
    coef: options.CoefOption = None,
    where: options.WhereOption = options.Position.DEFAULT,
    boundary: Annotated[
        Cut, typer.Option(help="Encode prompt and target together (joint) or each alone (separate).")
    ] = Cut.JOINT,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREFIX",
            help="Score each target with this before it; repeatable: --variant '' --variant ' '.",
            show_default=False,
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Score targets exactly, steered or not.

    Prints the log-probability of each target after its prompt, in nats, and its perplexity per token.
    """
    variants = variant or [""]
    prompts, targets = _read_pairs(prompt, target, file)
    plan = make_plan(vector, layer, dose, coef, where)
    with loaded(model, dtype) as engine:
        scores = engine.score(prompts, targets, plan=plan, boundary=boundary.value, variants=variants)
    rows = [
        {"prompt": prompts[row.prompt_index], "target": targets[row.prompt_index][row.target_index]}
        | {name: getattr(row, name) for name in FIGURES}
        | {"dtype": scores.dtype}
        for row in scores
    ]
    if as_json:
        show_json(rows)
        return
    _show(rows, several=len(prompts) > 1)
    say(f"log-probs in nats, computed in {scores.dtype}")


def _read_pairs(prompts: list[str] | None, targets: list[str] | None, file: Path | None) -> tuple[list, list[list]]:
    if file is not None:
        if prompts or targets:
            raise sl.InputError("Give either --file or --prompt with --target, not both.")
        return _from_file(file)
    if not prompts or not targets:
        raise sl.InputError("Say what to score: --prompt and --target, or --file.")
    return prompts, [list(targets)] * len(prompts)


def _from_file(path: Path) -> tuple[list, list[list]]:
    """Prompts in order of first appearance, and the targets of each."""
    from steerlab.core._records import prompt_field, read_jsonl, target_field

    found: dict[str, tuple[Any, list]] = {}
    for place, row in read_jsonl(path):
        prompt = prompt_field(row, "prompt", place)
        found.setdefault(_label(prompt), (prompt, []))[1].append(target_field(row, "target", place))
    if not found:
        raise sl.DataError(f"{path} holds no targets.")
    return [prompt for prompt, _ in found.values()], [targets for _, targets in found.values()]


def _show(rows: list[dict[str, Any]], *, several: bool) -> None:
    names = ["target", "tokens", "log prob", "perplexity", "boundary"]
    cells = [
        [
            *([_label(row["prompt"])] if several else []),
            _label(row["variant"] + row["target"] if row["variant"] else row["target"]),
            str(row["num_tokens"]),
            f"{row['log_prob']:.4f}",
            f"{row['perplexity']:.4g}",
            row["boundary"],
        ]
        for row in rows
    ]
    show_table(["prompt", *names] if several else names, cells, text_columns=1 + several)


def _label(value: Any) -> str:
    return quoted(value) if isinstance(value, str) else str(value)
