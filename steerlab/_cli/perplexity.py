"""`steerlab perplexity`: how well a model predicts a text."""

from pathlib import Path
from typing import Annotated

import typer

import steerlab as sl
from steerlab._cli.console import say, show_json
from steerlab._cli.loading import check_writable, make_plan
from steerlab._cli.options import (
    DEFAULT_MODEL,
    CoefOption,
    DoseOption,
    Dtype,
    JsonOption,
    LayerOption,
    ModelOption,
    Position,
    VectorOption,
    WhereOption,
)
from steerlab._cli.texts import (
    Backend,
    BosOption,
    ColumnOption,
    ConfigOption,
    ContextOption,
    DatasetOption,
    FileOption,
    SplitOption,
    StrideOption,
    TextOption,
    chosen_text,
    opened,
)


def perplexity(
    file: FileOption = None,
    text: TextOption = None,
    dataset: DatasetOption = None,
    dataset_config: ConfigOption = None,
    split: SplitOption = None,
    column: ColumnOption = None,
    model: ModelOption = DEFAULT_MODEL,
    engine: Annotated[Backend, typer.Option(help="What runs the model.")] = Backend.LENS,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of weights and activations; float32 by default, with vLLM the weights' own (half precision for "
            "float32 weights).",
            show_default=False,
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="vLLM's quantization, if the checkpoint names none.", show_default=False),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share each layer (vLLM).")] = 1,
    context_length: ContextOption = None,
    stride: StrideOption = None,
    bos_each_window: BosOption = False,
    vector: VectorOption = None,
    layer: LayerOption = None,
    dose: DoseOption = None,
    coef: CoefOption = None,
    where: WhereOption = Position.DEFAULT,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep finished windows here, and go on from them.", show_default=False),
    ] = None,
    distributions: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write every full next-token distribution here.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the perplexity of a text.

    Every token but the first is scored once, in windows of the context length. Models that were trained with BOS before
    every text, such as Gemma, need --bos-each-window.
    """
    content = chosen_text(file, text, dataset, dataset_config, split, column)
    plan = make_plan(vector, layer, dose, coef, where)
    if distributions is not None:
        check_writable(distributions, folder=True)
        if dataset is not None:
            content = "".join(content)  # their size must be known before
    options = {"quantization": quantization, "tensor_parallel_size": tensor_parallel_size}
    with opened(model, engine, dtype, plan, **options, max_model_len=context_length) as running:
        found = sl.perplexity(
            running,
            content,
            context_length=context_length,
            stride=stride,
            bos_each_window=bos_each_window,
            plan=plan,
            resume=resume,
            distributions=distributions,
        )
    if as_json:
        names = ["perplexity", "nll", "num_tokens", "bits_per_byte", "dtype", "context_length", "stride"]
        show_json({name: getattr(found, name) for name in names})
        return
    say(f"perplexity      {found.perplexity:.4f}")
    say(f"nll             {found.nll:.4f} nats per token")
    say(f"tokens          {found.num_tokens}")
    say(f"bits per byte   {found.bits_per_byte:.4f}")
    say(f"dtype           {found.dtype}")
