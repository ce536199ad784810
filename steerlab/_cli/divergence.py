"""`steerlab divergence`: how far two models, or a steered and an unsteered one, disagree on a text."""

from contextlib import ExitStack
from typing import Annotated

import typer

import steerlab as sl
from steerlab._cli.console import say, show_json
from steerlab._cli.loading import loaded, make_plan
from steerlab._cli.options import (
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
from steerlab._cli.texts import (
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
)

_FIGURES = {
    "mean_kl": "KL(a ‖ b)",
    "mean_reverse_kl": "KL(b ‖ a)",
    "mean_jensen_shannon": "Jensen-Shannon",
    "mean_nll_a": "nll of a",
    "mean_nll_b": "nll of b",
}


def divergence(
    file: FileOption = None,
    text: TextOption = None,
    dataset: DatasetOption = None,
    dataset_config: ConfigOption = None,
    split: SplitOption = None,
    column: ColumnOption = None,
    model: ModelOption = DEFAULT_MODEL,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model b, of the same vocabulary; the same model by default.", show_default=False
        ),
    ] = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    context_length: ContextOption = None,
    stride: StrideOption = None,
    bos_each_window: BosOption = False,
    vector: VectorOption = None,
    layer: LayerOption = None,
    dose: DoseOption = None,
    coef: CoefOption = None,
    where: WhereOption = Position.DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Compare next-token distributions on a text, in nats per position.

    a is the model, steered if a vector is given; b is the same model unsteered, or the one named by --against.
    """
    plan = make_plan(vector, layer, dose, coef, where)
    if plan is None and against is None:
        raise sl.InputError("Say what to compare: --vector steers the model, --against names another one.")
    content = chosen_text(file, text, dataset, dataset_config, split, column)
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
