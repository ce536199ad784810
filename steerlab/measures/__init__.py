"""Pure functions on tensors and arrays: no model, no tokenizer.

Log-probabilities and entropies are in nats, computed in float32 or wider. The sampling distribution of a policy is
defined once, by `nucleus`, and everything that speaks of it uses that function.
"""

from steerlab.measures.divergence import kl
from steerlab.measures.entropy import entropy, rb_entropy
from steerlab.measures.intervals import (
    Interval,
    cluster_bootstrap_mean,
    cluster_standard_error,
    cluster_t_mean,
    false_discovery,
    holm,
    least_squares_curvatures,
    least_squares_slopes,
    null_rank,
    rank_floor,
)
from steerlab.measures.log_probs import chosen_log_probs, log_q, token_log_probs
from steerlab.measures.nucleus import apply_repetition_penalty, nucleus, policy_log_probs
from steerlab.measures.power import Design, NullDraws

__all__ = [
    "Design",
    "Interval",
    "NullDraws",
    "apply_repetition_penalty",
    "chosen_log_probs",
    "cluster_bootstrap_mean",
    "cluster_standard_error",
    "cluster_t_mean",
    "entropy",
    "false_discovery",
    "holm",
    "kl",
    "least_squares_curvatures",
    "least_squares_slopes",
    "log_q",
    "nucleus",
    "null_rank",
    "policy_log_probs",
    "rank_floor",
    "rb_entropy",
    "token_log_probs",
]
