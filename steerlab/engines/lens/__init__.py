"""The engine on TransformerLens: hooked generation, exact scores and activations."""

from steerlab._runtime.step import Step, current_step
from steerlab.engines.lens._loading import load
from steerlab.engines.lens.engine import LensEngine
from steerlab.engines.lens.hooked_generate import create_steering_hook, generate_steered_response, hooked_generate

__all__ = [
    "LensEngine",
    "Step",
    "create_steering_hook",
    "current_step",
    "generate_steered_response",
    "hooked_generate",
    "load",
]
