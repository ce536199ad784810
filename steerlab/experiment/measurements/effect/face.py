"""What a notebook shows of an effect: the dose-response first, then figures, nulls, items."""

import math
from functools import partial
from typing import Any

from steerlab.display import Facts, Piece, Remarks, figure, interval
from steerlab.experiment.blocks.faces import frame_piece, plot_piece
from steerlab.experiment.plots import describe_dose_response, plot_dose_response
from steerlab.experiment.wording import CONTROL_NAMES, metric_label


def effect_pieces(effect: Any) -> list[Piece]:
    """The pieces of an `Effect`'s face."""
    axis, level = effect.settings.axis, effect.settings.level
    curvature = f"{figure(effect.curvature)} {interval(*effect.curvature_ci)}"
    facts = [
        ("plan", effect.plan_text),
        ("metric", metric_label(effect.settings.metric)),
        (f"slope per unit of {axis}", f"{figure(effect.slope)} {interval(*effect.ci)} ({level:.0%} interval)"),
        ("anti-steerable items", f"{effect.anti_steerable:.0%}"),
        ("worst null rank", effect.null_rank if effect.null_ranks else None),
        ("curvature", None if math.isnan(effect.curvature) else curvature),
    ]
    nulls = effect.nulls()
    nulls["family"] = [CONTROL_NAMES.get(family, family) for family in nulls.family]
    doses = effect.by_dose().rename(columns={"value": effect.settings.metric})
    return [
        Remarks(effect.reasons),
        Facts(facts),
        plot_piece("dose-response", partial(plot_dose_response, effect), describe_dose_response(effect)),
        frame_piece(doses, "per dose", fold=False),
        frame_piece(nulls.rename(columns={"family": "arm"}), "against control arms", fold=True),
        frame_piece(effect.item_slopes.sort_values("slope"), "slope of each item", fold=True),
    ]
