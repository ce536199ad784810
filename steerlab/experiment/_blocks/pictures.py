"""Pictures of a report: vector graphics, with the finding in words beside each."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from steerlab.experiment._blocks import Plot
from steerlab.experiment.plots.style import lay_out, style


def picture(name: str, draw: Callable[[], Axes], alt: str, caption: str) -> Plot:
    """Draws a plot into an SVG picture; the same data give the same bytes.

    Args:
        name: short, for file names.
        draw: draws on a new figure and returns its axes.
        alt: the finding in words.
        caption: how to read it.
    """
    buffer = io.BytesIO()
    with plt.ioff(), style():
        figure: Any = draw().figure
        try:
            lay_out(figure)
            figure.set_layout_engine("none")  # or saving would draw twice, the first time for the layout alone
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        finally:
            plt.close(figure)
    return Plot(name, buffer.getvalue(), alt, caption)
