import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
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


def write_changed(path: Path, content: dict[str, Any], changes: Mapping[str, Any] | None) -> Path:
    """Writes a YAML file with changes, dotted key → value; None removes a key."""
    changed = copy.deepcopy(content)
    for key, value in copy.deepcopy(dict(changes or {})).items():
        *folders, last = key.split(".")
        place = changed
        for folder in folders:
            place = place.setdefault(folder, {})
        if value is None:
            del place[last]
        else:
            place[last] = value
    path.write_text(yaml.safe_dump(changed, sort_keys=False))
    return path


@pytest.fixture
def own_data(data: Path, tmp_path: Path) -> Path:
    """A folder of the test's own with that data."""
    for place in data.iterdir():
        if place.is_file():
            (tmp_path / place.name).write_bytes(place.read_bytes())
    return tmp_path


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
