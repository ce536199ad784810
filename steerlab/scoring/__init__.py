"""Scoring whole texts on any engine: perplexity in sliding windows."""

from steerlab.scoring.sliding import Perplexity, perplexity, text_nlls

__all__ = ["Perplexity", "perplexity", "text_nlls"]
