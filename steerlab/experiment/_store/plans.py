"""Plans made ready for the engine of a session."""

from typing import Any

from steerlab.core.errors import PlanError
from steerlab.experiment._store.cells import StoredCell
from steerlab.experiment._store.session import Session
from steerlab.steering.plan import Plan


def resolved(session: Session, plan: Plan) -> Plan:
    """The plan, checked against the model, its doses tied to the model's norms.

    Raises:
        PlanError: for something that is not a plan, or layers that vLLM was not started with.
    """
    check_plan(plan)
    check_wired(session, plan)
    return plan.check(session.info).resolved(session.median_norm, session.info.weights_hash)


def check_plan(plan: Any) -> None:
    """Checks that this is a plan.

    Raises:
        PlanError: if it is not.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"This measurement takes a Plan, got {type(plan).__name__}; wrap edits in Plan().")


def check_wired(session: Session, plan: Plan) -> None:
    """Checks that the engine can edit every hook point of a plan; vLLM edits the layers it was started with.

    Raises:
        PlanError: if it cannot; says which `layers` to start with.
    """
    if session.loaded:
        engine: Any = session.engine
        if hasattr(engine, "check_wired"):
            engine.check_wired(plan)


def stored_plan(session: Session, stored: StoredCell) -> Plan | None:
    """The plan that a cell was measured under, as it was written; None for the unsteered model."""
    about = stored.cell.about
    if about.get("plan") is None:
        return None
    plan = session.inputs.stored_plan(about["plan"])
    return plan.scaled(about["scale"]) if "scale" in about else plan
