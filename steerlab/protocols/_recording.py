"""What every protocol does alike: measure through the cells of an experiment, and keep its result in the run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.targets import Targets
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.run import Run
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements._item_values import item_values
from steerlab.experiment.measurements.metrics import log_prob_margin
from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.steering.plan import Plan


def run_of(exp: Any) -> Run:
    """The run of an experiment, ready to be written.

    Raises:
        InputError: for something else than an experiment.
    """
    if not isinstance(exp, Experiment):
        raise InputError(f"A protocol runs in an experiment, sl.Experiment(…), got {type(exp).__name__}.")
    exp._run.session.open()
    return exp._run


def scoring_engine(run: Run) -> Engine:
    """The experiment's engine, its scores kept as cells."""
    return cell_engine_for(run.session)


def margins(run: Run, plans: Sequence[Plan | None], targets: Targets) -> np.ndarray:
    """Log p of the positive target less that of the negative one, nats, shape [plans, items]; a cell per plan."""
    ready = [None if plan is None else resolved(run.session, plan) for plan in plans]
    return item_values(scoring_engine(run), ready, targets, log_prob_margin)


def kept(run: Run, what: Any, result: ProtocolResult) -> ProtocolResult:
    """The result, written to the run directory."""
    return run.keep("protocol", [result.protocol, what], result)
