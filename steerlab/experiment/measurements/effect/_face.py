"""What a notebook shows of an effect: the dose-response first, then figures, nulls, items."""

import math
from functools import partial
from typing import Any

from steerlab.display import Facts, Fold, Piece, Remarks, figure, interval
from steerlab.experiment import plots
from steerlab.experiment._blocks.faces import frame_piece, plot_piece
from steerlab.experiment._wording import CONTROL_NAMES, metric_label
from steerlab.experiment.measurements.effect._verdicts import margin_words


def effect_pieces(effect: Any) -> list[Piece]:
    """The pieces of an `Effect`'s face."""
    axis, level = effect.settings.axis, effect.settings.level
    curvature = f"{figure(effect.curvature)} {interval(*effect.curvature_ci)}"
    facts = [
        ("plan", effect.plan_text),
        ("metric", metric_label(effect.settings.metric)),
        (f"slope per unit of {axis}", f"{figure(effect.slope)} {interval(*effect.ci)} ({level:.0%} interval)"),
        ("margin", None if math.isnan(effect.margin) else f"±{figure(effect.margin)}, {margin_words(effect.settings)}"),
        (f"{2 * level - 1:.0%} interval, for being small", interval(*effect.equivalence_ci)),
        ("slope found in 80 % of such runs", effect.detectable if math.isfinite(effect.detectable) else None),
        ("slope over the spread of items", None if math.isnan(effect.size_over_items) else effect.size_over_items),
        ("size over the median null slope", None if math.isnan(effect.size_over_nulls) else effect.size_over_nulls),
        ("anti-steerable items", f"{effect.anti_steerable:.0%}"),
        ("worst null rank", effect.null_rank if effect.null_ranks else None),
        ("curvature", None if math.isnan(effect.curvature) else curvature),
    ]
    nulls = effect.nulls()
    nulls["family"] = [CONTROL_NAMES.get(family, family) for family in nulls.family]
    frontier, bound = effect.by_dose(), effect.settings.max_ppl_ratio
    doses = frontier.rename(columns={"value": effect.settings.metric})
    return [
        Remarks(effect.reasons),
        Facts(facts),
        plot_piece("dose-response", partial(plots.plot_dose_response, effect), plots.describe_dose_response(effect)),
        frame_piece(doses, "per dose", fold=False),
        Fold(
            "against control arms",
            [
                plot_piece("null-slopes", partial(plots.plot_null_slopes, effect), plots.describe_null_slopes(effect)),
                frame_piece(nulls.rename(columns={"family": "arm"}), "", fold=False),
            ],
        ),
        Fold(
            "slope of each item",
            [
                plot_piece("item-slopes", partial(plots.plot_item_slopes, effect), plots.describe_item_slopes(effect)),
                frame_piece(effect.item_slopes.sort_values("slope"), "", fold=False),
            ],
        ),
        Fold(
            "cost of each dose",
            [
                plot_piece(
                    "cost-frontier",
                    partial(plots.plot_cost_frontier, frontier, metric=effect.settings.metric, bound=bound),
                    plots.describe_cost_frontier(frontier, bound=bound),
                )
            ],
        ),
    ]
