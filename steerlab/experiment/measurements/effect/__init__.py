"""Effects: dose-responses with intervals, control arms and verdicts."""

from steerlab.experiment._store.results import Kind
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.effect._comparisons import relate
from steerlab.experiment.measurements.effect._measure import measure_effect, scores_again
from steerlab.experiment.measurements.effect._section import effect_sections
from steerlab.experiment.measurements.effect._settings import Comparisons, EffectSettings
from steerlab.experiment.measurements.effect._stored import check_effect, read_effect, write_effect
from steerlab.experiment.measurements.effect.result import Effect

__all__ = ["EFFECT", "Comparisons", "Effect", "EffectSettings", "measure_effect"]

EFFECT = Measurement(
    Kind("effect", "effects", "effects/{:03d}", write_effect, read_effect, relate),
    effect_sections,
    {"scores": scores_again},
    check_effect,
)
