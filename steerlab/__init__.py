"""Steer language models through their residual stream, and measure exactly what changed.

Importing this package is cheap: every public name loads its module the first time it is used, so torch, transformers
and the plotting libraries stay out of a process until something needs them.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from steerlab._moved import MovedModules

if TYPE_CHECKING:
    from steerlab import display
    from steerlab.core import shipped
    from steerlab.core.contrast_pairs import ContrastPairs
    from steerlab.core.engine import Engine
    from steerlab.core.errors import (
        BackendMissingError,
        ContextLengthError,
        DataError,
        EngineError,
        HookPointError,
        InputError,
        ModelNotFoundError,
        NonFiniteError,
        PlanError,
        PolicyError,
        PromptError,
        ReceiptError,
        RewardError,
        RunError,
        SteerlabError,
        TargetError,
        UnknownOperatorError,
        VectorFileError,
        VectorMismatchError,
        VectorShapeError,
        VectorValueError,
    )
    from steerlab.core.policy import SamplingPolicy
    from steerlab.core.receipts import Receipt
    from steerlab.core.results import Activations, Completion, Generations, Scores
    from steerlab.core.targets import Targets
    from steerlab.engines.lens import (
        LensEngine,
        create_steering_hook,
        current_step,
        generate_steered_response,
        hooked_generate,
    )
    from steerlab.engines.loading import load
    from steerlab.engines.vllm import VLLMEngine
    from steerlab.experiment import Controls, Effect, Experiment, plots
    from steerlab.experiment.plots.diagnostics import plot_diagnostics
    from steerlab.experiment.run_comparison import compare
    from steerlab.exploring.completions import side_by_side
    from steerlab.exploring.dose_slider import dose_slider
    from steerlab.exploring.logit_lens import logit_lens
    from steerlab.exploring.projections import project_pairs, project_text
    from steerlab.exploring.show_tokens import show_tokens
    from steerlab.scoring.distributions import read_distributions
    from steerlab.scoring.divergence import Divergence, divergence
    from steerlab.scoring.sliding import Perplexity, perplexity
    from steerlab.sequences import (
        BatchedSequences,
        DiagnosticsPack,
        DiagnosticsResults,
        DistributionDiagnostics,
        GenerationConfig,
        LogprobResults,
        SequenceDiagnostics,
        SequenceProcessor,
        TokenStepDiagnostics,
        register_dataset,
    )
    from steerlab.steering.explain import explain
    from steerlab.steering.extraction.extract import extract
    from steerlab.steering.formats.gguf import export_gguf
    from steerlab.steering.formats.loreft import import_loreft
    from steerlab.steering.formats.sae import import_sae
    from steerlab.steering.operators import ablate, add, clamp, rotate
    from steerlab.steering.operators import set as set
    from steerlab.steering.operators.registry import register_operator
    from steerlab.steering.plan import Plan
    from steerlab.steering.positions import schedule, where
    from steerlab.steering.positions.condition import when
    from steerlab.steering.vectors import SteeringVector, VectorSet

    __version__: str

sys.meta_path.append(MovedModules())

# Public name -> the module that holds it. A name equal to the last part of its module is still looked up inside it,
# except in `_MODULES`, whose names stand for the module itself.
_NAMES = {
    "Activations": "steerlab.core.results",
    "BackendMissingError": "steerlab.core.errors",
    "BatchedSequences": "steerlab.sequences",
    "Completion": "steerlab.core.results",
    "ContextLengthError": "steerlab.core.errors",
    "ContrastPairs": "steerlab.core.contrast_pairs",
    "Controls": "steerlab.experiment",
    "DataError": "steerlab.core.errors",
    "DiagnosticsPack": "steerlab.sequences",
    "DiagnosticsResults": "steerlab.sequences",
    "DistributionDiagnostics": "steerlab.sequences",
    "Divergence": "steerlab.scoring.divergence",
    "Effect": "steerlab.experiment",
    "Engine": "steerlab.core.engine",
    "EngineError": "steerlab.core.errors",
    "Experiment": "steerlab.experiment",
    "GenerationConfig": "steerlab.sequences",
    "Generations": "steerlab.core.results",
    "HookPointError": "steerlab.core.errors",
    "InputError": "steerlab.core.errors",
    "LensEngine": "steerlab.engines.lens",
    "LogprobResults": "steerlab.sequences",
    "ModelNotFoundError": "steerlab.core.errors",
    "NonFiniteError": "steerlab.core.errors",
    "Perplexity": "steerlab.scoring.sliding",
    "Plan": "steerlab.steering.plan",
    "PlanError": "steerlab.core.errors",
    "PolicyError": "steerlab.core.errors",
    "PromptError": "steerlab.core.errors",
    "Receipt": "steerlab.core.receipts",
    "ReceiptError": "steerlab.core.errors",
    "RewardError": "steerlab.core.errors",
    "RunError": "steerlab.core.errors",
    "SamplingPolicy": "steerlab.core.policy",
    "Scores": "steerlab.core.results",
    "SequenceDiagnostics": "steerlab.sequences",
    "SequenceProcessor": "steerlab.sequences",
    "SteeringVector": "steerlab.steering.vectors",
    "SteerlabError": "steerlab.core.errors",
    "TargetError": "steerlab.core.errors",
    "Targets": "steerlab.core.targets",
    "TokenStepDiagnostics": "steerlab.sequences",
    "UnknownOperatorError": "steerlab.core.errors",
    "VLLMEngine": "steerlab.engines.vllm",
    "VectorFileError": "steerlab.core.errors",
    "VectorMismatchError": "steerlab.core.errors",
    "VectorSet": "steerlab.steering.vectors",
    "VectorShapeError": "steerlab.core.errors",
    "VectorValueError": "steerlab.core.errors",
    "ablate": "steerlab.steering.operators",
    "add": "steerlab.steering.operators",
    "clamp": "steerlab.steering.operators",
    "compare": "steerlab.experiment.run_comparison",
    "create_steering_hook": "steerlab.engines.lens",
    "current_step": "steerlab.engines.lens",
    "divergence": "steerlab.scoring.divergence",
    "dose_slider": "steerlab.exploring.dose_slider",
    "explain": "steerlab.steering.explain",
    "export_gguf": "steerlab.steering.formats.gguf",
    "extract": "steerlab.steering.extraction.extract",
    "generate_steered_response": "steerlab.engines.lens",
    "hooked_generate": "steerlab.engines.lens",
    "import_loreft": "steerlab.steering.formats.loreft",
    "import_sae": "steerlab.steering.formats.sae",
    "load": "steerlab.engines.loading",
    "logit_lens": "steerlab.exploring.logit_lens",
    "perplexity": "steerlab.scoring.sliding",
    "plot_diagnostics": "steerlab.experiment.plots.diagnostics",
    "project_pairs": "steerlab.exploring.projections",
    "project_text": "steerlab.exploring.projections",
    "read_distributions": "steerlab.scoring.distributions",
    "register_dataset": "steerlab.sequences",
    "register_operator": "steerlab.steering.operators.registry",
    "rotate": "steerlab.steering.operators",
    "set": "steerlab.steering.operators",
    "show_tokens": "steerlab.exploring.show_tokens",
    "side_by_side": "steerlab.exploring.completions",
    "when": "steerlab.steering.positions.condition",
}
_MODULES = {
    "display": "steerlab.display",
    "plots": "steerlab.experiment.plots",
    "schedule": "steerlab.steering.positions.schedule",
    "shipped": "steerlab.core.shipped",
    "where": "steerlab.steering.positions.where",
}

# `set` is left out: `from steerlab import *` must not hide Python's own.
__all__ = [
    "Activations",
    "BackendMissingError",
    "BatchedSequences",
    "Completion",
    "ContextLengthError",
    "ContrastPairs",
    "Controls",
    "DataError",
    "DiagnosticsPack",
    "DiagnosticsResults",
    "DistributionDiagnostics",
    "Divergence",
    "Effect",
    "Engine",
    "EngineError",
    "Experiment",
    "GenerationConfig",
    "Generations",
    "HookPointError",
    "InputError",
    "LensEngine",
    "LogprobResults",
    "ModelNotFoundError",
    "NonFiniteError",
    "Perplexity",
    "Plan",
    "PlanError",
    "PolicyError",
    "PromptError",
    "Receipt",
    "ReceiptError",
    "RewardError",
    "RunError",
    "SamplingPolicy",
    "Scores",
    "SequenceDiagnostics",
    "SequenceProcessor",
    "SteeringVector",
    "SteerlabError",
    "TargetError",
    "Targets",
    "TokenStepDiagnostics",
    "UnknownOperatorError",
    "VLLMEngine",
    "VectorFileError",
    "VectorMismatchError",
    "VectorSet",
    "VectorShapeError",
    "VectorValueError",
    "__version__",
    "ablate",
    "add",
    "clamp",
    "compare",
    "create_steering_hook",
    "current_step",
    "display",
    "divergence",
    "dose_slider",
    "explain",
    "export_gguf",
    "extract",
    "generate_steered_response",
    "hooked_generate",
    "import_loreft",
    "import_sae",
    "load",
    "logit_lens",
    "perplexity",
    "plot_diagnostics",
    "plots",
    "project_pairs",
    "project_text",
    "read_distributions",
    "register_dataset",
    "register_operator",
    "rotate",
    "schedule",
    "shipped",
    "show_tokens",
    "side_by_side",
    "when",
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
    return sorted({*globals(), *__all__, *_NAMES})
