"""Several plans on the same items: how many were tried, and what that does to each one's rank."""

from collections.abc import Sequence

from steerlab.experiment.measurements.effect._settings import Comparisons
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.measures.intervals import false_discovery, holm
from steerlab.steering.plan import Plan


def with_comparisons(effects: Sequence[Effect]) -> list[Effect]:
    """The effects, each with the number of plans tested on its items with its metric.

    A plan that was measured several times counts once, with the rank of its last measurement.
    """
    families: dict[tuple[str, ...], dict[str, Effect]] = {}
    for effect in effects:
        families.setdefault(_family(effect), {})[effect.plan_hash] = effect
    ways = {(_family(effect), effect.settings.adjustment) for effect in effects}
    adjusted = {(name, way): _adjusted(families[name], way) for name, way in ways}
    named = [(effect, _family(effect)) for effect in effects]
    return [
        effect.among(_comparisons(effect, families[name], adjusted[name, effect.settings.adjustment]))
        for effect, name in named
    ]


def _adjusted(tested: dict[str, Effect], way: str) -> dict[str, float]:
    adjust = {"holm": holm, "fdr": false_discovery}[way]
    return dict(zip(tested, adjust([effect.null_rank for effect in tested.values()]), strict=True))


def _family(effect: Effect) -> tuple[str, ...]:
    return str(effect.provenance.get("targets_hash")), effect.settings.metric_identity


def _comparisons(effect: Effect, last: dict[str, Effect], adjusted: dict[str, float]) -> Comparisons | None:
    if len(last) < 2:
        return None
    way = effect.settings.adjustment
    if effect is not last[effect.plan_hash]:  # an earlier measurement of its plan: it stands in for the last one
        adjusted = _adjusted({**last, effect.plan_hash: effect}, way)
    return Comparisons(len(last), adjusted[effect.plan_hash], way)


def relate(measured: list[tuple[Effect, Plan]]) -> list[tuple[Effect, Plan]]:
    """Effects with their plans, compared by `with_comparisons`."""
    compared = with_comparisons([effect for effect, _ in measured])
    return [(effect, plan) for effect, (_, plan) in zip(compared, measured, strict=True)]
