"""Experiments: extract, steer, measure against nulls, and report."""

from steerlab.experiment.controls import Controls
from steerlab.experiment.effect import Effect
from steerlab.experiment.experiment import Experiment

__all__ = ["Controls", "Effect", "Experiment"]
