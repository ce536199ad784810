"""What runs in other processes: a measurement that takes its time, to be killed, and the opening of a journal."""

import time
from pathlib import Path
from typing import Any

import torch

import steerlab as sl
from steerlab.scoring._journal import Journal


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


def open_journal(path: Path, what: dict[str, Any]) -> None:
    """Opens a journal, and ends."""
    Journal(path, what)
