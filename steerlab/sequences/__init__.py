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
from steerlab.sequences.entropy_probe import EntropyProbe, Estimate, entropy_probe, moved_parameters
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
from steerlab.sequences.update_direction import (
    adam_second_moments,
    group_advantages,
    preconditioned,
    update_direction,
)

__all__ = [
    "FEATURE_NAMES",
    "BatchedSequences",
    "DiagnosticsPack",
    "DiagnosticsResults",
    "DistributionDiagnostics",
    "EntropyAlong",
    "EntropyGradient",
    "EntropyProbe",
    "Estimate",
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
    "adam_second_moments",
    "check_entropy_gradient",
    "entropy_along",
    "entropy_gradient",
    "entropy_probe",
    "group_advantages",
    "importance_weights",
    "moved_parameters",
    "preconditioned",
    "ratio_summary",
    "register_dataset",
    "registered_datasets",
    "rewards_of",
    "tag_reward",
    "token_ratios",
    "update_direction",
]
