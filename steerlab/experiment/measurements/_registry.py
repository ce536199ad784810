"""The kinds of measurement there are, in the order in which a report shows them."""

from typing import Final

from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements._vectors import VECTORS
from steerlab.experiment.measurements.baselines import BASELINES
from steerlab.experiment.measurements.confirmation import CONFIRMATION
from steerlab.experiment.measurements.cost import COST
from steerlab.experiment.measurements.effect import EFFECT
from steerlab.experiment.measurements.entropy import ENTROPY
from steerlab.experiment.measurements.generations import GENERATIONS
from steerlab.experiment.measurements.interaction import INTERACTION
from steerlab.experiment.measurements.judgements import JUDGEMENT
from steerlab.experiment.measurements.parity import PARITY
from steerlab.experiment.measurements.preregistration import PREREGISTRATION
from steerlab.experiment.measurements.protocols import PROTOCOL
from steerlab.experiment.measurements.selection import SELECTION
from steerlab.experiment.measurements.selfcheck import SELFCHECK
from steerlab.experiment.measurements.transfer import TRANSFER

MEASUREMENTS: Final[tuple[Measurement, ...]] = (
    PREREGISTRATION,
    EFFECT,
    BASELINES,
    SELFCHECK,
    SELECTION,
    CONFIRMATION,
    ENTROPY,
    COST,
    GENERATIONS,
    JUDGEMENT,
    PARITY,
    INTERACTION,
    TRANSFER,
    PROTOCOL,
    VECTORS,
)
KINDS: Final = tuple(measurement.kind for measurement in MEASUREMENTS)
