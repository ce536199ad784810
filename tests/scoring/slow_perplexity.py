"""What `test_resume.py` kills: a measurement of perplexity that takes its time."""

import time
from pathlib import Path
from typing import Any

import torch

import steerlab as sl


def measure(model: Path, text: Path, journal: Path, sizes: dict[str, int]) -> None:
    """Measures a file with a journal, with a pause before each batch."""
    torch.set_num_threads(1)
    engine = sl.load(model, device="cpu")
    score = engine.score

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return score(*arguments, **options)

    engine.score = slowly
    sl.perplexity(engine, text, **sizes, resume=journal)
