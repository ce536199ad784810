"""From what is typed on the command line to engines and plans."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import steerlab as sl
from steerlab._cli.options import Dtype, Position


@contextmanager
def loaded(model: str, dtype: Dtype) -> "Iterator[sl.LensEngine]":
    """The engine, closed at the end, with transformers kept quiet meanwhile."""
    with quiet_transformers(), sl.load(model, dtype=dtype.value) as engine:
        yield engine


def make_plan(
    vector: Path | None, layer: int | None, dose: float | None, coef: float | None, where: Position
) -> "sl.Plan | None":
    """The plan that the steering options ask for; None without any.

    Raises:
        InputError: for a strength or layer without a vector, or a vector without a strength.
        VectorFileError: if the file cannot be used.
    """
    if vector is None:
        stated = {"--dose": dose, "--coef": coef, "--layer": layer, "--where": None if where == "default" else where}
        for option, value in stated.items():
            if value is not None:
                raise sl.InputError(f"{option} needs --vector FILE, the vector to steer with.")
        return None
    if (dose is None) == (coef is None):
        raise sl.InputError(f"--vector {vector} needs one strength: either --dose or --coef.")
    return sl.Plan(sl.add(read_vector(vector, layer), dose=dose, coef=coef, where=where.where()))


def read_vector(path: Path, layer: int | None) -> "sl.SteeringVector":
    """The vector in a file, or that of one layer where there are several.

    Raises:
        InputError: if there are several and no layer is given.
        HookPointError: if the file has no vector for the layer.
    """
    vectors = sl.VectorSet.load(path)
    if layer is not None:
        return vectors[layer]
    if len(vectors) > 1:
        layers = ", ".join(map(str, vectors))
        raise sl.InputError(f"{path} holds vectors for the layers {layers}; choose one with --layer.")
    return vectors.by_layer[0]


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Refuses a place that cannot be written, before any work is spent on it.

    Args:
        path: a file to be written, or a folder.
        folder: whether it is a folder.

    Raises:
        InputError: if it cannot be written.
    """
    if path.exists() and path.is_dir() != folder:
        kind, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise sl.InputError(f"{path} is a {kind}; name a {wanted}.")
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if nearest != path.absolute() and not nearest.is_dir():
        raise sl.InputError(f"Cannot write {path}: {nearest} is a file.")
    if not os.access(nearest, os.W_OK):
        raise sl.InputError(f"Cannot write {path}: no permission at {nearest}.")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off transformers' log lines and bars for a while; the bars of a download stay."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
