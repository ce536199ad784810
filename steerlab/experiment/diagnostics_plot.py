"""A plot of diagnostics: which layers' vectors tell held-out pairs apart, and how large and reliable they are."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from steerlab.experiment.plots import new_axes

if TYPE_CHECKING:
    from steerlab.steering.diagnostics import Diagnostics

# column → colour, marker and label; the colours are safe for the colour-blind, the markers tell them apart in print
_LINES = {
    "auc": ("#0072B2", "o", "AUC on held-out pairs"),
    "split_half_cosine": ("#E69F00", "s", "split-half cosine"),
    "cosine_to_mean_diff": ("#009E73", "^", "cosine to their mean difference"),
    "relative_norm": ("#777777", "D", "norm / median norm of the stream"),
}
_MARKERS_UP_TO = 40


def plot_diagnostics(diagnostics: "Diagnostics", ax: Axes | None = None) -> Axes:
    """Per layer: AUC, split-half cosine, cosine to the mean difference, and norm in median norms of the stream.

    All four are pure numbers on one axis; the dotted line is chance for the AUC.

    Args:
        diagnostics: what `vectors.diagnostics(dev)` gave.
        ax: axes to draw on; a new figure by default.
    """
    ax = new_axes(ax, width=6.4, height=3.8)
    frame = diagnostics.to_frame()
    marked = len(frame) <= _MARKERS_UP_TO
    for column, (colour, marker, label) in _LINES.items():
        values = frame[column].to_numpy()
        if np.isfinite(values).any():
            ax.plot(frame.layer, values, color=colour, marker=marker if marked else None, markersize=4, label=label)
    ax.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    ax.annotate(
        "chance (AUC)", (1, 0.5), (-3, 2), ("axes fraction", "data"), "offset points", ha="right", fontsize="small"
    )
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]), top=max(1.05, ax.get_ylim()[1]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(f"layer ({diagnostics.site})")
    ax.set_title(f"{diagnostics.method or 'vectors'} on {diagnostics.n_pairs} held-out pairs")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return ax
