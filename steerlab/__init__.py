"""Steer language models through their residual stream, and measure exactly what changed.

Importing this package is cheap: every public name loads its module the first time it is used, so torch, transformers
and the plotting libraries stay out of a process until something needs them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steerlab.core.engine import Engine
    from steerlab.core.errors import (
        BackendMissingError,
        ContextLengthError,
        DataError,
        HookPointError,
        InputError,
        ModelNotFoundError,
        PlanError,
        PolicyError,
        PromptError,
        ReceiptError,
        RunError,
        SteerlabError,
        TargetError,
        VectorFileError,
        VectorMismatchError,
        VectorShapeError,
        VectorValueError,
    )
    from steerlab.core.pairs import ContrastPairs
    from steerlab.core.policy import SamplingPolicy
    from steerlab.core.results import Activations, Completion, Generations, Scores
    from steerlab.core.targets import Targets
    from steerlab.engines.lens import (
        LensEngine,
        create_steering_hook,
        current_step,
        generate_steered_response,
        hooked_generate,
        load,
    )
    from steerlab.experiment import Controls, Effect, Experiment
    from steerlab.scoring.sliding import Perplexity, perplexity
    from steerlab.steering import where
    from steerlab.steering.extract import extract
    from steerlab.steering.operators import ablate, add, clamp
    from steerlab.steering.plan import Plan
    from steerlab.steering.receipts import Receipt
    from steerlab.steering.vectors import SteeringVector, VectorSet

    __version__: str

# Public name -> the module that holds it. A name equal to the last part of its module is still looked up inside it,
# except in `_MODULES`, whose names stand for the module itself.
_NAMES = {
    "Activations": "steerlab.core.results",
    "BackendMissingError": "steerlab.core.errors",
    "Completion": "steerlab.core.results",
    "ContextLengthError": "steerlab.core.errors",
    "ContrastPairs": "steerlab.core.pairs",
    "Controls": "steerlab.experiment",
    "DataError": "steerlab.core.errors",
    "Effect": "steerlab.experiment",
    "Engine": "steerlab.core.engine",
    "Experiment": "steerlab.experiment",
    "Generations": "steerlab.core.results",
    "HookPointError": "steerlab.core.errors",
    "InputError": "steerlab.core.errors",
    "LensEngine": "steerlab.engines.lens",
    "ModelNotFoundError": "steerlab.core.errors",
    "Perplexity": "steerlab.scoring.sliding",
    "Plan": "steerlab.steering.plan",
    "PlanError": "steerlab.core.errors",
    "PolicyError": "steerlab.core.errors",
    "PromptError": "steerlab.core.errors",
    "Receipt": "steerlab.steering.receipts",
    "ReceiptError": "steerlab.core.errors",
    "RunError": "steerlab.core.errors",
    "SamplingPolicy": "steerlab.core.policy",
    "Scores": "steerlab.core.results",
    "SteeringVector": "steerlab.steering.vectors",
    "SteerlabError": "steerlab.core.errors",
    "TargetError": "steerlab.core.errors",
    "Targets": "steerlab.core.targets",
    "VectorFileError": "steerlab.core.errors",
    "VectorMismatchError": "steerlab.core.errors",
    "VectorSet": "steerlab.steering.vectors",
    "VectorShapeError": "steerlab.core.errors",
    "VectorValueError": "steerlab.core.errors",
    "ablate": "steerlab.steering.operators",
    "add": "steerlab.steering.operators",
    "clamp": "steerlab.steering.operators",
    "create_steering_hook": "steerlab.engines.lens",
    "current_step": "steerlab.engines.lens",
    "extract": "steerlab.steering.extract",
    "generate_steered_response": "steerlab.engines.lens",
    "hooked_generate": "steerlab.engines.lens",
    "load": "steerlab.engines.lens",
    "perplexity": "steerlab.scoring.sliding",
}
_MODULES = {"where": "steerlab.steering.where"}

__all__ = [
    "Activations",
    "BackendMissingError",
    "Completion",
    "ContextLengthError",
    "ContrastPairs",
    "Controls",
    "DataError",
    "Effect",
    "Engine",
    "Experiment",
    "Generations",
    "HookPointError",
    "InputError",
    "LensEngine",
    "ModelNotFoundError",
    "Perplexity",
    "Plan",
    "PlanError",
    "PolicyError",
    "PromptError",
    "Receipt",
    "ReceiptError",
    "RunError",
    "SamplingPolicy",
    "Scores",
    "SteeringVector",
    "SteerlabError",
    "TargetError",
    "Targets",
    "VectorFileError",
    "VectorMismatchError",
    "VectorSet",
    "VectorShapeError",
    "VectorValueError",
    "__version__",
    "ablate",
    "add",
    "clamp",
    "create_steering_hook",
    "current_step",
    "extract",
    "generate_steered_response",
    "hooked_generate",
    "load",
    "perplexity",
    "where",
]


def __getattr__(name: str) -> Any:
    """Load a public name on its first use."""
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name == "__version__":
        from importlib.metadata import version

        value = version("steerlab")
    else:
        raise AttributeError(f"module 'steerlab' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
