"""Published protocols, each a function of an experiment: on any engine, resumable, its table in the paper's shape."""

from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.protocols.choices import ChoiceItems
from steerlab.protocols.steerability import steerability

__all__ = ["ChoiceItems", "ProtocolResult", "steerability"]
