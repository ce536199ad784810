"""Several plans on the same items: how many were tried, and what that does to each one's rank."""

from collections.abc import Sequence

from steerlab.experiment.effect import Comparisons, Effect
from steerlab.measures.intervals import holm


def with_comparisons(effects: Sequence[Effect]) -> list[Effect]:
    """The effects, each told how many plans were tested on its items with its metric.

    A plan that was measured several times counts once, with the rank of its last measurement.
    """
    families: dict[tuple[str, str], dict[str, Effect]] = {}
    for effect in effects:
        families.setdefault(_family(effect), {})[effect.plan_hash] = effect
    return [effect.among(_comparisons(effect, families[_family(effect)])) for effect in effects]


def _family(effect: Effect) -> tuple[str, str]:
    return str(effect.provenance.get("targets_hash")), effect.settings.metric_identity


def _comparisons(effect: Effect, last: dict[str, Effect]) -> Comparisons | None:
    if len(last) < 2:
        return None
    tested = {**last, effect.plan_hash: effect}
    adjusted = dict(zip(tested, holm([other.null_rank for other in tested.values()]), strict=True))
    return Comparisons(len(tested), adjusted[effect.plan_hash])
