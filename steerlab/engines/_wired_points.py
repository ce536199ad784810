"""Which of the hook points that a vLLM was started with a hook point is: one rule, in process and over HTTP."""

from collections.abc import Sequence
from typing import Literal

from steerlab.core._hook_points import SITES, HookPoint
from steerlab.core.errors import PlanError
from steerlab.steering.plan import Plan


def reached_at(
    point: HookPoint,
    layers: Sequence[int],
    sites: Sequence[str],
    *,
    of: str = "this engine",
    stated: Literal["arguments", "options"] = "arguments",
) -> HookPoint:
    """The wired hook point at which a hook point is edited and read.

    Args:
        point: the hook point.
        layers: the layers that are wired.
        sites: where in them.
        of: what was started with them, for the message.
        stated: whether it was started with arguments, as in Python, or with options of a command line.

    Raises:
        PlanError: if its layer or site is not wired; says what to start with.
    """
    if point.site == "resid_pre" and point.layer == 0:
        raise PlanError(
            f"{point.name} cannot be reached inside vLLM, which steers after and inside layers: resid_pre of any layer "
            "but the first is resid_post of the one before. Use the TransformerLens engine for it."
        )
    same = HookPoint(point.layer - 1, "resid_post") if point.site == "resid_pre" else point
    missing = {}
    if same.layer not in layers:
        missing["layers"] = (list(layers), sorted({*layers, same.layer}))
    if same.site not in sites:
        missing["sites"] = (list(sites), [*sites, same.site])
    if not missing:
        return same

    def told(name: str, values: list) -> str:
        return f"{name}={values}" if stated == "arguments" else f"--{name} {','.join(map(str, values))}"

    started, needed = zip(*([told(name, one) for one in pair] for name, pair in missing.items()), strict=True)
    raise PlanError(
        f"{point.name} is not wired: {of} was started with {' and '.join(started)}. Start it with {', '.join(needed)}."
    )


def wiring_for(plan: Plan | None) -> dict[str, list]:
    """What to start a vLLM with so that a plan runs: `layers` and `sites`.

    Examples:
        >>> from steerlab.steering.operators import ablate
        >>> from steerlab.steering.vectors import SteeringVector
        >>> wiring_for(Plan(ablate(SteeringVector.from_tensor([1.0, 2.0], layer=3, site="resid_pre"))))
        {'layers': [2], 'sites': ['resid_post']}
    """
    points = [] if plan is None else [*plan.hook_points, *(condition.hook_point for condition in plan.conditions)]
    reached = [reached_at(point, range(point.layer + 1), SITES) for point in points]
    sites = [site for site in SITES if any(point.site == site for point in reached)]
    return {"layers": sorted({point.layer for point in reached}), **({"sites": sites} if sites else {})}
