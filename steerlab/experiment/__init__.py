"""Experiments: extract, steer, measure against nulls, and report."""

from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.controls import Controls
from steerlab.experiment.measurements.effect import Effect
from steerlab.experiment.run_comparison import RunComparison, compare
from steerlab.experiment.verify import Verification

__all__ = ["Controls", "Effect", "Experiment", "RunComparison", "Verification", "compare"]
