"""The text and the engine of the commands that score whole texts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import steerlab as sl
from steerlab._cli.loading import quiet_transformers
from steerlab._cli.options import Dtype

SEPARATOR = "\n\n"  # between the rows of a data set, as is usual for WikiText


class Backend(StrEnum):
    """What runs the model."""

    LENS = "lens"
    VLLM = "vllm"


FileOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Text file, of any size.", show_default=False)]
TextOption = Annotated[str | None, typer.Option(metavar="TEXT", help="The text itself instead.", show_default=False)]
DatasetOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Or a data set of the `datasets` library, or a folder.", show_default=False),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The data set's configuration, e.g. wikitext-2-raw-v1.", show_default=False),
]
SplitOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The data set's split; test by default.", show_default=False)
]
ColumnOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The data set's column that holds the text; text by default.", show_default=False
    ),
]
ContextOption = Annotated[
    int | None, typer.Option(help="Tokens per window; the model's context by default.", show_default=False)
]
StrideOption = Annotated[
    int | None, typer.Option(help="New tokens per window; the whole window by default.", show_default=False)
]
BosOption = Annotated[
    bool, typer.Option("--bos-each-window", help="Put BOS before every window, and score the first token too.")
]


def chosen_text(
    file: Path | None,
    text: str | None,
    dataset: str | None,
    config: str | None,
    split: str | None,
    column: str | None,
) -> Any:
    """The one text that was named: a string, a path, or an iterator over a data set's rows, a blank line between them.

    Raises:
        InputError: if none or several were named.
        DataError: if it cannot be read.
    """
    if sum(given is not None for given in (file, text, dataset)) != 1:
        raise sl.InputError("Say which text: either --file or --text or --dataset.")
    for name, given in (("--dataset-config", config), ("--split", split), ("--column", column)):
        if given is not None and dataset is None:
            raise sl.InputError(f"{name} needs --dataset, the data set that it belongs to.")
    if file is not None:
        _check_readable(file)
        return file
    if dataset is None:
        return text
    from steerlab.sequences.datasets import load_texts

    return separated(load_texts(dataset, split or "test", config=config, column=column or "text"))


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise sl.DataError(f"Cannot read {path}: {error.strerror}.") from error


def separated(texts: Iterator[str]) -> Iterator[str]:
    """Texts in order with a blank line between each two."""
    for index, text in enumerate(texts):
        yield SEPARATOR + text if index else text


@contextmanager
def opened(
    model: str,
    backend: Backend,
    dtype: Dtype | None,
    plan: "sl.Plan | None",
    *,
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
) -> Iterator[Any]:
    """The engine, closed at the end.

    Raises:
        InputError: for options of vLLM on another engine.
    """
    if backend is Backend.VLLM:
        from steerlab.engines.vllm._client.log_file import is_users

        if is_users(()):
            os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the result
        options: dict[str, Any] = {"quantization": quantization, "max_model_len": max_model_len}
        given = {name: value for name, value in options.items() if value is not None}
        layers = sorted({point.layer for point in plan.hook_points}) if plan is not None else []
        with sl.VLLMEngine(
            model,
            layers=layers,
            tensor_parallel_size=tensor_parallel_size,
            dtype=None if dtype is None else dtype.value,
            **given,
        ) as engine:
            yield engine
        return
    if quantization is not None or tensor_parallel_size != 1:
        raise sl.InputError("--quantization and --tensor-parallel-size need --engine vllm.")
    with quiet_transformers(), sl.load(model, dtype=(dtype or Dtype.FLOAT32).value) as engine:
        yield engine
