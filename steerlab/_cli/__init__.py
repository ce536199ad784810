"""The command line: `steerlab demo`, `extract`, `generate`, `score`, `perplexity`, `run`."""

from steerlab._cli.app import main

__all__ = ["main"]
