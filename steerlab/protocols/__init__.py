"""Published protocols, each a function of an experiment: on any engine, resumable, its table in the paper's shape."""

from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.protocols.axbench import axbench
from steerlab.protocols.axbench_data import Concept, read_concepts, read_instructions
from steerlab.protocols.caa import against_published, caa
from steerlab.protocols.cast import cast
from steerlab.protocols.choices import ChoiceItems
from steerlab.protocols.iti import iti
from steerlab.protocols.refusal import ablation_everywhere, refusal
from steerlab.protocols.steerability import steerability
from steerlab.protocols.truth_questions import TruthQuestion, TruthQuestions

__all__ = [
    "ChoiceItems",
    "Concept",
    "ProtocolResult",
    "TruthQuestion",
    "TruthQuestions",
    "ablation_everywhere",
    "against_published",
    "axbench",
    "caa",
    "cast",
    "iti",
    "read_concepts",
    "read_instructions",
    "refusal",
    "steerability",
]
