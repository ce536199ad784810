"""`steerlab divergence`: how far two models, or a steered and an unsteered one, disagree on a text."""

from contextlib import ExitStack
from typing import Annotated

import typer

import steerlab as sl
from steerlab._cli import options, texts
from steerlab._cli.console import say, show_json
from steerlab._cli.loading import loaded, make_plan

_FIGURES = {
    "mean_kl": "KL(a ‖ b)",
    "mean_reverse_kl": "KL(b ‖ a)",
    "mean_jensen_shannon": "Jensen-Shannon",
    "mean_nll_a": "nll of a",
    "mean_nll_b": "nll of b",
}


def divergence(
    file: texts.FileOption = None,
    text: texts.TextOption = None,
    dataset: texts.DatasetOption = None,
    dataset_config: texts.ConfigOption = None,
    split: texts.SplitOption = None,
    column: texts.ColumnOption = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model b, of the same vocabulary; the same model by default.", show_default=False
        ),
    ] = None,
    dtype: options.DtypeOption = options.Dtype.FLOAT32,
    context_length: texts.ContextOption = None,
    stride: texts.StrideOption = None,
    bos_each_window: texts.BosOption = False,
    vector: options.VectorOption = None,
    layer: options.LayerOption = None,
    dose: options.DoseOption = None,
    coef: options.CoefOption = None,
    where: options.WhereOption = options.Position.DEFAULT,
    as_json: options.JsonOption = False,
) -> None:
    """Compare next-token distributions on a text, in nats per position.

    a is the model, steered if a vector is given; b is the same model unsteered, or the one named by --against.
    """
    plan = make_plan(vector, layer, dose, coef, where)
    if plan is None and against is None:
        raise sl.InputError("Say what to compare: --vector steers the model, --against names another one.")
    content = texts.chosen_text(file, text, dataset, dataset_config, split, column)
    with ExitStack() as stack:
        a = stack.enter_context(loaded(model, dtype))
        b = a if against is None else stack.enter_context(loaded(against, dtype))
        found = sl.divergence(
            a,
            b,
            content,
            plan_a=plan,
            context_length=context_length,
            stride=stride,
            bos_each_window=bos_each_window,
        )
    if as_json:
        names = [*_FIGURES, "dtypes", "num_tokens", "context_length", "stride"]
        show_json({name: getattr(found, name) for name in names})
        return
    for name, shown in _FIGURES.items():
        say(f"{shown:<16}{getattr(found, name):.4f} nats per token")
    say(f"{'tokens':<16}{found.num_tokens}")
    say(f"{'dtype':<16}{' and '.join(dict.fromkeys(found.dtypes or ()))}")
