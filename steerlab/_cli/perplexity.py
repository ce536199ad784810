"""`steerlab perplexity`: how well a model predicts a text."""

from pathlib import Path
from typing import Annotated

import typer

import steerlab as sl
from steerlab._cli import options, texts
from steerlab._cli.console import say, show_json
from steerlab._cli.loading import check_writable, make_plan


def perplexity(
    file: texts.FileOption = None,
    text: texts.TextOption = None,
    dataset: texts.DatasetOption = None,
    dataset_config: texts.ConfigOption = None,
    split: texts.SplitOption = None,
    column: texts.ColumnOption = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    engine: Annotated[texts.Backend, typer.Option(help="What runs the model.")] = texts.Backend.LENS,
    dtype: Annotated[
        options.Dtype | None,
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
    context_length: texts.ContextOption = None,
    stride: texts.StrideOption = None,
    bos_each_window: texts.BosOption = False,
    vector: options.VectorOption = None,
    layer: options.LayerOption = None,
    dose: options.DoseOption = None,
    coef: options.CoefOption = None,
    where: options.WhereOption = options.Position.DEFAULT,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep finished windows here, and go on from them.", show_default=False),
    ] = None,
    distributions: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write every full next-token distribution here.", show_default=False),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the perplexity of a text.

    Every token but the first is scored once, in windows of the context length. Models that were trained with BOS before
    every text, such as Gemma, need --bos-each-window.
    """
    content = texts.chosen_text(file, text, dataset, dataset_config, split, column)
    plan = make_plan(vector, layer, dose, coef, where)
    if distributions is not None:
        check_writable(distributions, folder=True)
        if dataset is not None:
            content = "".join(content)  # their size must be known before
    of_vllm = {"quantization": quantization, "tensor_parallel_size": tensor_parallel_size}
    with texts.opened(model, engine, dtype, plan, **of_vllm, max_model_len=context_length) as running:
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
