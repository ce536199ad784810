"""Exact scores of targets, kept as cells."""

from steerlab.core.results import Scores
from steerlab.core.targets import Targets
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.run import Run
from steerlab.experiment.measurements._checks import check_targets
from steerlab.steering.plan import Plan


def measure_scores(run: Run, plan: Plan | None, targets: Targets) -> Scores:
    """See `steerlab.experiment.Experiment.score`."""
    check_targets(targets)
    run.session.open()
    with run.measuring("score", lambda: ([targets], None if plan is None else plan.hash)):
        ready = None if plan is None else resolved(run.session, plan)
        engine = cell_engine_for(run.session)
        return engine.score(targets.prompts, [item.targets for item in targets], plan=ready)
