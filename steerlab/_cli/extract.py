"""`steerlab extract`: a steering vector from contrast pairs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import steerlab as sl
from steerlab._cli.console import say
from steerlab._cli.loading import check_writable, loaded
from steerlab._cli.options import DEFAULT_MODEL, Dtype, DtypeOption, ModelOption


def extract(
    pairs: Annotated[Path, typer.Option(metavar="FILE", help="File of contrast pairs: JSON lines, or one JSON array.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Vector file to write (.safetensors).")],
    layer: Annotated[
        list[str],
        typer.Option(
            "--layer",
            "--layers",
            help="Layer to read; several (again, or 10,12,14), or all. Negative ones count from the end.",
        ),
    ],
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = Dtype.FLOAT32,
    method: Annotated[str, typer.Option(help="Estimator.")] = "mean_diff",
    site: Annotated[str, typer.Option(help="Site within the layer.")] = "resid_post",
    positive: Annotated[str, typer.Option(metavar="KEY", help="Key of the positive prompt.")] = "positive",
    negative: Annotated[str, typer.Option(metavar="KEY", help="Key of the negative prompt.")] = "negative",
    group: Annotated[str | None, typer.Option(metavar="KEY", help="Key of the group name.", show_default=False)] = None,
    split: Annotated[str | None, typer.Option(help="Use only rows whose `split` is this.", show_default=False)] = None,
) -> None:
    """Extract a steering vector from contrast pairs."""
    check_writable(out)
    layers = _layers(layer)
    data = sl.ContrastPairs.from_jsonl(pairs, positive=positive, negative=negative, group=group, split=split)
    with loaded(model, dtype) as engine:
        vectors = sl.extract(engine, data, method, site, layers, name=out.stem)
    vectors.save(out)
    for vector in vectors.values():
        say(f"vector       {vector.hook_point.name}, {method} of {len(data)} pairs")
        say(f"norm         {vector.norm:.4f}")
        say(f"dose unit    {vector.card.median_norm:.4f} (median norm of the stream there)")
        say(f"hash         {vector.hash}")
    say(f"written to   {out}")


def _layers(given: list[str]) -> "list[int] | Literal['all']":
    """Layers as they are typed.

    Raises:
        InputError: for one that is no number.
    """
    parts = [part.strip() for text in given for part in text.split(",")]
    if parts == ["all"]:
        return "all"
    try:
        return [int(part) for part in parts]
    except ValueError as error:
        shown = ",".join(given)
        raise sl.InputError(f"--layer takes a layer's number, several as 10,12,14, or all; got {shown}.") from error
