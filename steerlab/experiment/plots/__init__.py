"""Plots. Each function takes `ax=` and returns the axes, and `describe_…` says the same finding in a sentence.

Colours are safe for the colour-blind and remain distinct in grey print; a new figure is one column of a paper wide.
"""

from steerlab.experiment._wording import axis_label
from steerlab.experiment.plots.cost import describe_cost, plot_cost
from steerlab.experiment.plots.dose_response import describe_dose_response, null_band, plot_dose_response
from steerlab.experiment.plots.entropy import describe_entropy, plot_entropy
from steerlab.experiment.plots.equal_cost import describe_equal_cost, plot_equal_cost
from steerlab.experiment.plots.frontier import describe_cost_frontier, frontier_points, plot_cost_frontier
from steerlab.experiment.plots.geometry import (
    cosine_frame,
    describe_cosines,
    describe_norms,
    norm_frame,
    plot_cosines,
    plot_norms,
)
from steerlab.experiment.plots.item_slopes import describe_item_slopes, plot_item_slopes
from steerlab.experiment.plots.layer_dose import describe_layer_dose, plot_layer_dose
from steerlab.experiment.plots.null_slopes import describe_null_slopes, plot_null_slopes
from steerlab.experiment.plots.style import new_axes, style
from steerlab.experiment.plots.token_differences import (
    describe_token_differences,
    plot_token_differences,
    token_differences_html,
    token_frame,
)

__all__ = [
    "axis_label",
    "cosine_frame",
    "describe_cosines",
    "describe_cost",
    "describe_cost_frontier",
    "describe_dose_response",
    "describe_entropy",
    "describe_equal_cost",
    "describe_item_slopes",
    "describe_layer_dose",
    "describe_norms",
    "describe_null_slopes",
    "describe_token_differences",
    "frontier_points",
    "new_axes",
    "norm_frame",
    "null_band",
    "plot_cosines",
    "plot_cost",
    "plot_cost_frontier",
    "plot_dose_response",
    "plot_entropy",
    "plot_equal_cost",
    "plot_item_slopes",
    "plot_layer_dose",
    "plot_norms",
    "plot_null_slopes",
    "plot_token_differences",
    "style",
    "token_differences_html",
    "token_frame",
]
