"""Effects: dose-responses with intervals, control arms and verdicts."""

from steerlab.experiment.measurements.effect.comparisons import relate
from steerlab.experiment.measurements.effect.measure import measure_effect, scores_again
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.experiment.measurements.effect.section import effect_sections
from steerlab.experiment.measurements.effect.settings import Comparisons, EffectSettings
from steerlab.experiment.measurements.effect.stored import check_effect, read_effect, write_effect
from steerlab.experiment.measurements.measurement import Measurement
from steerlab.experiment.store.results import Kind

__all__ = ["EFFECT", "Comparisons", "Effect", "EffectSettings", "measure_effect"]

EFFECT = Measurement(
    Kind("effect", "effects", "effects/{:03d}", write_effect, read_effect, relate),
    effect_sections,
    {"scores": scores_again},
    check_effect,
)
