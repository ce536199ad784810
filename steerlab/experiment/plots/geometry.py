"""Geometry of vectors: which of them point the same way, and how long they are."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from steerlab.core.errors import DataError
from steerlab.experiment._wording import number
from steerlab.experiment.plots._palette import BASE, DIVERGING, REAL
from steerlab.experiment.plots.style import direct_labels, new_axes, styled

if TYPE_CHECKING:
    from steerlab.steering.vectors import SteeringVector

_PRINTED_UP_TO = 8
_TICKS = 12
_MARKED_UP_TO = 40

Vectors: TypeAlias = "Mapping[int, SteeringVector] | Mapping[str, SteeringVector] | Sequence[SteeringVector]"


def cosine_frame(vectors: Vectors) -> pd.DataFrame:
    """Cosines between vectors, labelled on both sides.

    Args:
        vectors: a `VectorSet` (labelled by layer), a mapping of your own labels to vectors, or a sequence of vectors
            (labelled by name and layer).

    Raises:
        DataError: if there are none, or their widths differ.
    """
    labels, values = _labelled(vectors)
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    return pd.DataFrame(unit @ unit.T, index=labels, columns=labels)


@styled
def plot_cosines(cosines: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The cosine of every two vectors, from −1 (orange) over 0 (white) to 1 (blue); printed if there are at most 8.

    Args:
        cosines: a square frame with the same labels on both sides; `cosine_frame(vectors)` is one.
        ax: axes to draw on; a new figure by default.

    Raises:
        DataError: if the frame is not square.
    """
    if cosines.shape[0] != cosines.shape[1] or cosines.empty:
        raise DataError(f"plot_cosines takes a square frame of cosines, got shape {cosines.shape}.")
    ax = new_axes(ax, height=3.1)
    image = ax.imshow(cosines.to_numpy(), cmap=DIVERGING, norm=Normalize(-1, 1))
    step = -(-len(cosines) // _TICKS)
    names = [str(label) for label in cosines.index[::step]]
    turned = max(map(len, names)) > 4
    ax.set_xticks(range(0, len(cosines), step), names, rotation=35 if turned else 0, ha="right" if turned else "center")
    ax.set_yticks(range(0, len(cosines), step), names)
    if len(cosines) <= _PRINTED_UP_TO:
        _print_cosines(ax, cosines)
    figure: Any = ax.figure
    bar = figure.colorbar(image, ax=ax, label="cosine", fraction=0.045, pad=0.03)
    bar.outline.set_visible(False)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if _are_layers(cosines):
        ax.set_xlabel("layer")
        ax.set_ylabel("layer")
    ax.set_title("Cosines between vectors")
    return ax


@styled
def plot_norms(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The vectors' norm at each layer, beside the median norm of the stream there, on a log axis.

    Args:
        frame: a row per layer: `layer`, `norm`, `median_norm` (NaN where unknown); `norm_frame(vectors)` is one.
        ax: axes to draw on; a new figure by default.
    """
    ax = new_axes(ax)
    marker, square = ("o", "s") if len(frame) <= _MARKED_UP_TO else (None, None)
    ax.plot(frame.layer, frame.norm, color=REAL, marker=marker, markersize=3, label="vector")
    ends = [(frame.norm.iloc[-1], "vector", REAL)]
    if frame.median_norm.notna().any():
        ax.plot(
            frame.layer,
            frame.median_norm,
            color=BASE,
            linestyle="--",
            marker=square,
            markersize=3,
            label="median of the stream",
        )
        ends.append((frame.median_norm.dropna().iloc[-1], "stream\n(median)", BASE))
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ax.set_xlabel("layer")
    ax.set_ylabel("norm (residual units)")
    ax.set_title("Norm by layer")
    direct_labels(ax, ends)
    return ax


def norm_frame(vectors: "Mapping[int, SteeringVector] | Sequence[SteeringVector]") -> pd.DataFrame:
    """Norms by layer.

    Returns:
        A row per vector, in order of layer: `layer`, `norm`, `median_norm` (of the stream; NaN if not measured).
    """
    found = list(vectors.values()) if isinstance(vectors, Mapping) else list(vectors)
    rows = [(v.layer, v.norm, np.nan if v.card.median_norm is None else v.card.median_norm) for v in found]
    return pd.DataFrame(rows, columns=["layer", "norm", "median_norm"]).sort_values("layer", ignore_index=True)


def describe_cosines(cosines: pd.DataFrame) -> str:
    """The nearest and the farthest two vectors, in a sentence."""
    if len(cosines) < 2:
        return "There is one vector, so nothing to compare."
    rows, columns = np.triu_indices(len(cosines), k=1)
    values = cosines.to_numpy()[rows, columns]
    parts = []
    for word, place in (("largest", int(values.argmax())), ("smallest", int(values.argmin()))):
        first, second = cosines.index[rows[place]], cosines.index[columns[place]]
        parts.append(f"the {word} cosine is {number(round(float(values[place]), 2), '+.2f')} ({first} and {second})")
    return f"Among {len(cosines)} vectors {parts[0]}; {parts[1]}."


def describe_norms(frame: pd.DataFrame) -> str:
    """The range of norms, in a sentence."""
    known: Any = frame
    low, high = known.loc[known.norm.idxmin()], known.loc[known.norm.idxmax()]
    return (
        f"Norms run from {number(low.norm, '.3g')} at layer {low.layer:.0f} to {number(high.norm, '.3g')} at layer "
        f"{high.layer:.0f}."
    )


def _labelled(vectors: Vectors) -> tuple[list[Any], np.ndarray]:
    found = list(vectors.values()) if isinstance(vectors, Mapping) else list(vectors)
    labels = list(vectors) if isinstance(vectors, Mapping) else [_label(vector) for vector in found]
    widths = sorted({vector.d_model for vector in found})
    if len(widths) != 1:
        raise DataError(f"Cosines need vectors of one width; the widths here: {widths}.")
    return labels, np.stack([vector.values.double().numpy() for vector in found])


def _label(vector: "SteeringVector") -> str:
    return f"{vector.card.name or 'vector'} L{vector.layer}"


def _are_layers(cosines: pd.DataFrame) -> bool:
    return pd.api.types.is_integer_dtype(cosines.index)


def _print_cosines(ax: Axes, cosines: pd.DataFrame) -> None:
    for (row, column), value in np.ndenumerate(cosines.to_numpy()):
        colour = "white" if abs(value) > 0.6 else "#222222"
        ax.text(column, row, number(round(float(value), 2), ".2f"), ha="center", va="center", color=colour, fontsize=7)
