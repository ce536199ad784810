"""Scoring whole texts on any engine: perplexity in sliding windows."""

from steerlab.scoring.sliding import Perplexity, TextWindow, perplexity, text_nlls, text_windows

__all__ = ["Perplexity", "TextWindow", "perplexity", "text_nlls", "text_windows"]
