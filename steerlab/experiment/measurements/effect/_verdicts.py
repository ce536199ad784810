"""The verdict on an effect from its figures, and the reasons for it, a sentence each."""

import math
from collections.abc import Collection

from steerlab.experiment._wording import in_figures
from steerlab.experiment.measurements.controls import RANK_LEVEL
from steerlab.experiment.measurements.effect._figures import Figures
from steerlab.experiment.measurements.effect._settings import ADJUSTMENTS, RULES, Comparisons, EffectSettings
from steerlab.measures.intervals import Interval, rank_floor

MIN_DOSES = 3
NO_NULLS = "No null family was run, so nothing tells this from a random direction."
NOTHING_MOVES = (
    "No item changes at any dose, under this plan or under its controls: the plan edits nothing that reaches the "
    "metric. Look at its strength and its positions."
)
FEW_GROUPS = 10
"""Below that many, an interval over groups is wide, and wrong more often than stated where items are skewed."""


def judge(figures: Figures, settings: EffectSettings) -> tuple[str, list[str]]:
    """The verdict by the rule of the settings, with its reasons."""
    fitted, ranks = figures.fitted_doses, figures.null_ranks
    unshown = "no effect" if settings.rule == 1 else "inconclusive"
    if figures.n_doses < MIN_DOSES:
        reason = f"Only {figures.n_doses} doses were run; a fit needs {MIN_DOSES}."
        return (unshown, [reason]) if ranks else ("not tested", [reason, NO_NULLS])
    if len(fitted) < MIN_DOSES:
        return "collapsed", [
            f"Only {len(fitted)} doses keep the perplexity ratio within {settings.max_ppl_ratio:g}; a fit needs "
            f"{MIN_DOSES}. Use smaller doses."
        ]
    excludes = Interval(*figures.ci, settings.level).excludes_zero
    reasons = [_interval_reason(figures, settings, excludes)]
    if not ranks:
        return "not tested", [*reasons, NO_NULLS]
    nulls = figures.null_slopes
    for family, rank in ranks.items():
        reasons.append(_rank_reason(family, rank, int((nulls.family == family).sum())))
    passed = excludes and all(rank <= RANK_LEVEL for rank in ranks.values())
    if settings.rule == 1:
        return ("effect" if passed else unshown), reasons
    return _with_size(figures, settings, passed, reasons)


def _with_size(figures: Figures, settings: EffectSettings, passed: bool, reasons: list[str]) -> tuple[str, list[str]]:
    """The verdict where being small must be shown too."""
    if not passed and _nothing_moves(figures):
        return "no effect", [*reasons, NOTHING_MOVES]
    small = _is_small(figures)
    if passed and not small:
        return "effect", reasons
    reasons = [*reasons, _size_reason(figures, settings, small)]
    if small and not passed:
        return "no effect", reasons
    if small:
        reasons.append("The vector moves the items beyond its nulls, and by less than what was said to matter.")
    return "inconclusive", [*reasons, *_sight_reasons(figures, settings)]


def _nothing_moves(figures: Figures) -> bool:
    """Whether no item and no control has any slope at all: coefficient 0, or positions that no prompt has."""
    nulls = figures.null_slopes
    return bool((figures.item_slopes.slope == 0).all() and (nulls.slope == 0).all())


def _is_small(figures: Figures) -> bool:
    """Whether the equivalence interval lies inside the margin; False where one of them is missing."""
    low, high = figures.equivalence_ci
    return -figures.margin < low and high < figures.margin


def _interval_reason(figures: Figures, settings: EffectSettings, excludes: bool) -> str:
    low, high = figures.ci
    if math.isnan(low):
        return "All items share one group, so no interval exists; use items of several groups."
    side = "excludes" if excludes else "includes"
    return f"The {settings.level:.0%} interval [{in_figures(low)}, {in_figures(high)}] {side} 0."


def _rank_reason(family: str, rank: float, draws: int) -> str:
    floor = rank_floor(draws)
    names = {"random": "random directions", "shuffled": "vectors of balanced label flips"}
    beyond = "beyond" if rank <= RANK_LEVEL else "not beyond"
    reason = f"Rank {rank:.3f} against {draws} {names[family]} (it cannot be below {floor:.3f}): {beyond} this null."
    return reason if floor <= RANK_LEVEL else reason + " Too few draws for a verdict of effect; use at least 19."


def _size_reason(figures: Figures, settings: EffectSettings, small: bool) -> str:
    low, high = figures.equivalence_ci
    if math.isnan(figures.margin):
        return (
            "Nothing says which slope is small: fewer than 19 random directions ran, and no smallest= was given. So "
            "none can be shown to be."
        )
    if math.isnan(low):
        return "Without an interval nothing can be shown to be small."
    where = "lies inside" if small else "reaches outside"
    return (
        f"The {2 * settings.level - 1:.0%} interval [{in_figures(low)}, {in_figures(high)}] {where} "
        f"±{in_figures(figures.margin)}, {margin_words(settings)}."
    )


def margin_words(settings: EffectSettings) -> str:
    """Where the margin comes from."""
    if settings.smallest is not None:
        return "the smallest slope that matters"
    return "the size that 95 % of this run's random directions stay below"


def _sight_reasons(figures: Figures, settings: EffectSettings) -> list[str]:
    """What the design could have seen, and what it would need."""
    found = [sight(figures.detectable)] if not math.isnan(figures.detectable) else []
    if settings.smallest is not None and not math.isnan(figures.needed_groups):
        found.append(need(figures, settings.smallest))
    return found


def sight(detectable: float) -> str:
    """What the design could have seen, in a sentence."""
    if math.isinf(detectable):
        return "With so few control draws or groups, no slope of any size is found in 80 % of such runs."
    return (
        f"A design like this one finds a slope of {in_figures(detectable)} in 80 % of runs, given how the items "
        "differ and how far control slopes reach."
    )


def need(figures: Figures, smallest: float) -> str:
    """How many groups and items the smallest slope that matters needs, in a sentence."""
    if math.isinf(figures.needed_groups):
        return (
            f"No number of items finds a slope of {in_figures(smallest)} in 80 % of runs: control directions "
            "alone reach that far. Use another strength, metric or kind of item."
        )
    groups, items = int(figures.needed_groups), needed_items(figures)
    needed = f"{groups} groups like these ({items:.0f} items)"
    return f"To find a slope of {in_figures(smallest)} in 80 % of runs takes {needed}."


def needed_items(figures: Figures) -> float:
    """Items that the needed groups hold, at as many a group as here."""
    return math.ceil(figures.needed_groups * len(figures.item_slopes) / figures.item_slopes.group.nunique())


def rule_reasons(settings: EffectSettings, by_present_rule: str) -> list[str]:
    """That an earlier rule judged, and what the present one would say."""
    if settings.rule != 1:
        return []
    return [
        f"This run was judged by rule 1, under which {RULES[1]}; by the present rule the verdict is {by_present_rule}."
    ]


def baseline_reasons(doses: Collection[float]) -> list[str]:
    """What is missing where the unsteered model was not measured; no part of the verdict."""
    if 0 in doses:
        return []
    return ["Dose 0 was not among the doses, so nothing here shows the unsteered model, only how doses differ."]


def few_groups_reasons(figures: Figures, settings: EffectSettings) -> list[str]:
    """A caution for an interval that rests on few groups; no part of the verdict."""
    groups = int(figures.item_slopes.group.nunique())
    if groups >= FEW_GROUPS or math.isnan(figures.ci[0]):
        return []
    few = f"with fewer than {FEW_GROUPS} it "
    few += "is wide, and " * (settings.rule != 1) + "covers the truth less often than it says"
    return [f"The interval rests on {groups} groups; {few}{' if items are skewed' * (settings.rule != 1)}."]


def unasked_reasons(families: Collection[str], from_pairs: bool) -> list[str]:
    """What random directions alone leave open about a vector that labels made; no part of the verdict."""
    if not from_pairs or "random" not in families or "shuffled" in families:
        return []
    return [
        "Only random directions were asked. The vector comes from pairs, and whether their labels make it, rather than "
        "their texts, is what label flips ask: controls with shuffled=20, and the pairs."
    ]


def comparison_reasons(comparisons: Comparisons | None) -> list[str]:
    """How many plans were tested on the items, and what that does to the rank; no part of the verdict."""
    if comparisons is None or comparisons.n_tested < 2:
        return []
    adjusted = comparisons.adjusted_rank
    tested = f"{comparisons.n_tested} plans were tested on these items with this metric"
    if math.isnan(adjusted):
        return [f"{tested}; this one has no null rank to adjust."]
    beyond = "within" if adjusted <= RANK_LEVEL else "not within"
    name = ADJUSTMENTS[comparisons.adjustment]
    return [f"{tested}; {name} makes its rank {adjusted:.3f}, {beyond} {RANK_LEVEL:g}."]
