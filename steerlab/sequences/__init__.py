"""Sampling and exact re-scoring of a policy: log-probs, Rao-Blackwellised entropy and diagnostics of one nucleus."""

from steerlab.core.errors import RewardError
from steerlab.sequences.config import GenerationConfig, ProcessorConfig
from steerlab.sequences.datasets import register_dataset, registered_datasets
from steerlab.sequences.diagnostics import (
    DiagnosticsPack,
    DiagnosticsResults,
    DistributionDiagnostics,
    SequenceDiagnostics,
    TokenStepDiagnostics,
)
from steerlab.sequences.entropy_gradient import (
    EntropyAlong,
    EntropyGradient,
    GradientCheck,
    check_entropy_gradient,
    entropy_along,
    entropy_gradient,
)
from steerlab.sequences.importance import ImportanceWeights, importance_weights
from steerlab.sequences.processor import SequenceProcessor
from steerlab.sequences.rewards import tag_reward
from steerlab.sequences.types import FEATURE_NAMES, BatchedSequences, LogprobResults

__all__ = [
    "FEATURE_NAMES",
    "BatchedSequences",
    "DiagnosticsPack",
    "DiagnosticsResults",
    "DistributionDiagnostics",
    "EntropyAlong",
    "EntropyGradient",
    "GenerationConfig",
    "GradientCheck",
    "ImportanceWeights",
    "LogprobResults",
    "ProcessorConfig",
    "RewardError",
    "SequenceDiagnostics",
    "SequenceProcessor",
    "TokenStepDiagnostics",
    "check_entropy_gradient",
    "entropy_along",
    "entropy_gradient",
    "importance_weights",
    "register_dataset",
    "registered_datasets",
    "tag_reward",
]
