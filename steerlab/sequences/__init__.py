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
from steerlab.sequences.importance import (
    ImportanceWeights,
    RatioHealth,
    RatioSummary,
    importance_weights,
    ratio_summary,
    token_ratios,
)
from steerlab.sequences.processor import SequenceProcessor
from steerlab.sequences.rewards import rewards_of, tag_reward
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
    "RatioHealth",
    "RatioSummary",
    "RewardError",
    "SequenceDiagnostics",
    "SequenceProcessor",
    "TokenStepDiagnostics",
    "check_entropy_gradient",
    "entropy_along",
    "entropy_gradient",
    "importance_weights",
    "ratio_summary",
    "register_dataset",
    "registered_datasets",
    "rewards_of",
    "tag_reward",
    "token_ratios",
]
