"""A plot of diagnostics: how well each layer's vector separates held-out pairs, and how large and reliable they are."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from steerlab.core.errors import InputError
from steerlab.experiment.plots._palette import AGAINST, ELSEWHERE, INK, RANDOM, REAL
from steerlab.experiment.plots.style import direct_labels, new_axes, note, styled
from steerlab.steering.vector_diagnostics import Diagnostics

# column → colour, marker, line and label; markers and lines distinguish them where colours do not
_LINES = {
    "auc": (REAL, "o", "-", "AUC"),
    "split_half_cosine": (AGAINST, "s", "--", "split-half\ncosine"),
    "cosine_to_mean_diff": (ELSEWHERE, "^", "-.", "cosine to mean\ndifference"),
    "relative_norm": (RANDOM, "D", ":", "norm / median\nof the stream"),
}
_MARKERS_UP_TO = 40


@styled
def plot_diagnostics(diagnostics: Diagnostics, ax: Axes | None = None) -> Axes:
    """Per layer: AUC, split-half cosine, cosine to the mean difference, and norm in median norms of the stream.

    All four are pure numbers on one axis; the dotted line is chance for the AUC.

    Args:
        diagnostics: what `vectors.diagnostics(dev)` gave.
        ax: axes to draw on; a new figure by default.

    Raises:
        InputError: for anything else.
    """
    if not isinstance(diagnostics, Diagnostics):
        raise InputError(f"Expected what vectors.diagnostics(dev) gives; got {type(diagnostics).__name__}.")
    ax = new_axes(ax)
    frame = diagnostics.to_frame()
    ends = []
    marked = len(frame) <= _MARKERS_UP_TO
    for column, (colour, marker, line, label) in _LINES.items():
        values = frame[column].to_numpy()
        if np.isfinite(values).any():
            shape = marker if marked else None
            ax.plot(frame.layer, values, color=colour, marker=shape, markersize=3, linestyle=line, label=label)
            ends.append((values[np.isfinite(values)][-1], label, colour))
    ax.axhline(0.5, color=INK, linewidth=0.8, linestyle=":")
    note(ax, "chance (AUC)", (1, 0.5), (-3, 2), xycoords=ax.get_yaxis_transform(), ha="right")
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]), top=max(1.05, ax.get_ylim()[1]))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ax.set_xlabel(f"layer ({diagnostics.site})")
    ax.set_ylabel("AUC, cosine, or ratio of norms")
    ax.set_title(f"{diagnostics.method or 'vectors'} on {diagnostics.n_pairs} held-out pairs")
    direct_labels(ax, ends)
    return ax
