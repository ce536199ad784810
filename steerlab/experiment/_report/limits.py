"""What the numbers cannot say, with the figures that make it so."""

from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import count
from steerlab.experiment._wording import CONTROL_NAMES
from steerlab.experiment.measurements.controls import RANK_LEVEL
from steerlab.experiment.measurements.effect._verdicts import FEW_GROUPS
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.measures.intervals import rank_floor


def limits(material: Material) -> list[str]:
    """One sentence or two per limit, for what was measured."""
    found = [sentence for effect in material.of("effects") for sentence in _effect_limits(effect)]
    found += _comparison_limits(material)
    if material.of("effects"):
        found.insert(
            0,
            "An interval over items says how the slope varies over items like these. It does not say that the "
            "direction means what its name says: a random direction also moves items systematically. The nulls decide, "
            "and only against the families that were run.",
        )
        found.append(
            "Cost is measured on neutral text only. Doses past its bound enter neither slope nor rank; control arms "
            "are not filtered by their own cost."
        )
    if any(not selfcheck.passed for selfcheck in material.of("selfchecks")):
        found.insert(0, "A selfcheck failed, and results were measured all the same: none of them can be trusted.")
    if material.of("entropies"):
        found.append(
            "Entropy and divergence are teacher-forced: they describe the given text, not the text that the steered "
            "model would have written."
        )
    if material.of("generations"):
        found.append(
            "Completions are examples. They share random draws across doses, which pairs them; it does not make them "
            "representative."
        )
    if material.of("transfers"):
        found.append(
            "Transfers ran without control arms and without a bound on cost: a slope there says that the items moved, "
            "not that another direction would have moved them less."
        )
    found.append("Results hold for this model, these weights, this precision and these hook points.")
    return found


def _effect_limits(effect: Effect) -> list[str]:
    items = effect.item_slopes
    groups = int(items.group.nunique())
    size = f"{len(items)} items in {groups} groups were measured"
    found = [f"{size}; intervals are over groups, so {groups} is the number that counts."]
    if groups < FEW_GROUPS:
        found[0] += (
            f" With fewer than {FEW_GROUPS} groups an interval is wide, and where items are skewed it covers the truth "
            "less often than stated."
        )
    for family in effect.null_ranks:
        draws = int((effect.null_slopes.family == family).sum())
        floor = rank_floor(draws)
        reach = "" if floor <= RANK_LEVEL else f", so a verdict of effect (rank ≤ {RANK_LEVEL:g}) is out of reach"
        found.append(f"With {draws} draws of {CONTROL_NAMES[family]} a rank cannot be below {floor:.3f}{reach}.")
    missing = [name for family, name in CONTROL_NAMES.items() if family not in set(effect.null_slopes.family)]
    if missing:
        found.append(f"Not compared with: {', '.join(missing)}.")
    return found


def _comparison_limits(material: Material) -> list[str]:
    found = []
    if len(material.of("effects")) > 1:
        adjusted = any(effect.comparisons is not None for effect in material.of("effects"))
        how = "adjusted ranks allow for the plans they name" if adjusted else "ranks are not adjusted for that"
        found.append(
            f"{len(material.of('effects'))} effects are reported; {how}. The best of several looks better than it is."
        )
    tries = sum(len(one.table) for one in material.of("selections"))
    if tries:
        evidence = (
            "none was confirmed on other items"
            if not material.of("confirmations")
            else "only a first look at held-out items is evidence"
        )
        found.append(f"{count(tries)} combinations were tried on development items; {evidence}.")
    total, later = len(material.of("confirmations")), sum(one.look > 1 for one in material.of("confirmations"))
    if later:
        who = "The confirmation" if total == 1 else f"{later} of {total} confirmations"
        found.append(
            f"{who} looked at held-out items for the second time or later, whatever call looked first. Choices made "
            "after a first look were made with knowledge of these items."
        )
    return found
