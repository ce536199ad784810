"""`steerlab perplexity`: how well a model predicts a text."""

from pathlib import Path
from typing import Annotated

import typer

import steerlab as sl
from steerlab.cli.console import say, show_json
from steerlab.cli.loading import loaded, make_plan, read_text
from steerlab.cli.options import (
    DEFAULT_MODEL,
    CoefOption,
    DoseOption,
    Dtype,
    DtypeOption,
    JsonOption,
    LayerOption,
    ModelOption,
    Position,
    VectorOption,
    WhereOption,
)


def perplexity(
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Text file.", show_default=False)] = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The text itself instead.", show_default=False)
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = Dtype.FLOAT32,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens per window; the model's context by default.", show_default=False)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="New tokens per window; the whole window by default.", show_default=False)
    ] = None,
    vector: VectorOption = None,
    layer: LayerOption = None,
    dose: DoseOption = None,
    coef: CoefOption = None,
    where: WhereOption = Position.DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Measure the perplexity of a text.

    Every token but the first is scored once, in windows of the context length.
    """
    if (file is None) == (text is None):
        raise sl.InputError("Say which text: either --file or --text.")
    content = read_text(file) if file is not None else str(text)
    plan = make_plan(vector, layer, dose, coef, where)
    with loaded(model, dtype) as engine:
        found = sl.perplexity(engine, content, context_length=context_length, stride=stride, plan=plan)
    if as_json:
        names = ["perplexity", "nll", "num_tokens", "bits_per_byte", "context_length", "stride"]
        show_json({name: getattr(found, name) for name in names})
        return
    say(f"perplexity      {found.perplexity:.4f}")
    say(f"nll             {found.nll:.4f} nats per token")
    say(f"tokens          {found.num_tokens}")
    say(f"bits per byte   {found.bits_per_byte:.4f}")
