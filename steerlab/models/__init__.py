"""From a model's name to a local directory that every engine can load.

One resolver serves all engines, so that they run the same weights.
"""

from steerlab.models._hashing import weights_hash
from steerlab.models._resolver import ALIASES, ResolvedModel, prepare, resolve

__all__ = ["ALIASES", "ResolvedModel", "prepare", "resolve", "weights_hash"]
