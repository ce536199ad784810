"""The engine on TransformerLens: hooked generation, exact scores and activations."""

from steerlab.engines.lens.engine import LensEngine
from steerlab.engines.lens.loading import load

__all__ = ["LensEngine", "load"]
