"""Baselines: what an instruction or a few examples do on the same items, compared with a vector at equal cost."""

from steerlab.experiment._store.results import finding_kind
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.baselines._measure import measure_baselines
from steerlab.experiment.measurements.baselines._section import baseline_sections
from steerlab.experiment.measurements.baselines.arms import PromptArm, few_shot, prompting
from steerlab.experiment.measurements.baselines.comparison import BaselineComparison

__all__ = ["BASELINES", "BaselineComparison", "PromptArm", "few_shot", "measure_baselines", "prompting"]

BASELINES = Measurement(
    finding_kind("baseline", "baselines", BaselineComparison, [PromptArm]),
    baseline_sections,
)
