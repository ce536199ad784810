"""The part of a report on baselines: change against cost, every arm beside the vector."""

from functools import partial

import pandas as pd

from steerlab.experiment._blocks import Block, Folded, Paragraph, Plots, Section
from steerlab.experiment._blocks.findings import numbered
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import table_of
from steerlab.experiment.measurements._interval_rule import rule_of, without_rule
from steerlab.experiment.measurements.baselines.comparison import BaselineComparison


def baseline_sections(m: Material) -> list[Section]:
    """One section of all comparisons."""
    return numbered("Against prompting, at equal cost", [_blocks(one) for one in m.of("baselines")], "Comparison")


def _blocks(found: BaselineComparison) -> list[Block]:
    from steerlab.experiment import plots
    from steerlab.experiment._blocks.pictures import picture

    names = " and ".join(arm.name for arm in found.arms)
    drawn = picture(
        "equal-cost",
        partial(plots.plot_equal_cost, found.points, metric=found.metric),
        plots.describe_equal_cost(found.points),
        "Mean change over items against the perplexity ratio of neutral text, a line per arm in order of strength.",
    )
    texts = pd.DataFrame(
        [(arm.name, s, text) for arm in found.arms for s, text in zip(arm.strengths, arm.texts, strict=True)],
        columns=["arm", "strength", "text"],
    )
    about = (
        f"{found.plan_text} beside {names}, on the same items. Cost is the perplexity of neutral text as a multiple "
        "of what it is without the arm: under the plan against no plan, after the arm's words against neutral prose "
        "of as many tokens. Arms are compared where they cost the same, interpolated between strengths and never "
        "beyond them."
    )
    equal = [] if found.equal_cost.empty else [table_of(found.equal_cost, "At equal cost")]
    return [
        Paragraph(about),
        *[Paragraph(sentence) for sentence in found.sentences()],
        Plots([drawn]),
        *equal,
        table_of(without_rule(found.points), f"Every strength, with intervals by {rule_of(found.points)}"),
        Folded("What stood before the prompts", [table_of(texts, "Texts of the arms")]),
    ]
