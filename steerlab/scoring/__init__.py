"""Scoring whole texts on any engine: perplexity in sliding windows, full distributions, divergence."""

from steerlab.scoring.distributions import DistributionShard, distributions_bytes, read_distributions
from steerlab.scoring.sliding import Perplexity, perplexity
from steerlab.scoring.texts import text_nlls, text_windows
from steerlab.scoring.windows import TextWindow

__all__ = [
    "DistributionShard",
    "Perplexity",
    "TextWindow",
    "distributions_bytes",
    "perplexity",
    "read_distributions",
    "text_nlls",
    "text_windows",
]
