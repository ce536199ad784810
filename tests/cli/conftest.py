import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from steerlab._cli.app import app
from steerlab.steering.vectors import SteeringVector


class Outcome:
    """What a command printed, and how it ended."""

    def __init__(self, result) -> None:
        self.code, self.out, self.err, self.exception = (
            result.exit_code,
            result.stdout,
            result.stderr,
            result.exception,
        )

    @property
    def sentence(self) -> str:
        """The one line of a refused input."""
        assert self.code == 2, (self.code, self.out, self.err, self.exception)
        assert self.out == ""
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err.removeprefix("error: ").rstrip("\n")


def command(*arguments: object) -> Outcome:
    """Runs a command line in this process."""
    return Outcome(CliRunner().invoke(app, [str(argument) for argument in arguments]))


@pytest.fixture
def steerlab() -> Callable[..., Outcome]:
    """Runs a command line in this process."""
    return command


@pytest.fixture
def vector_file(tmp_path: Path) -> Path:
    """A vector for the tiny Llama."""
    values = torch.linspace(-1, 1, 64)
    return SteeringVector.from_tensor(values, layer=1).save(tmp_path / "vector.safetensors")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with contrast pairs, targets and prompts for the tiny models."""
    folder = tmp_path_factory.mktemp("data")
    things = ["soup", "bread", "street", "table", "ferry", "clock"]
    pairs = [
        {"positive": f"The {t} was wonderful", "negative": f"The {t} was terrible", "group": t[0], "split": "train"}
        for t in things
    ]
    targets = [
        {"prompt": f"The {t} is", "target": word, "label": label, "group": t, "split": "test"}
        for t in things[:4]
        for word, label in ((" happy", 1), (" sad", -1))
    ]
    for name, rows in (("pairs", pairs), ("targets", targets)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "neutral.txt").write_text("The clock is on the table.\n\nTwo plus two\nequals four.\n")
    (folder / "prompts.txt").write_text("The soup was\nShe opened [the window]\n")
    return folder
