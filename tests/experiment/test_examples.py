"""Every public method of Experiment has an example, and every example runs and gives what it says."""

import doctest
import inspect
import os
from pathlib import Path

import pytest

import steerlab as sl
from tests.experiment import data

CLASS_EXAMPLE = "Experiment"
# The order in which a reader would do things; later examples use what earlier ones made.
ORDER = [CLASS_EXAMPLE, "selfcheck", "extract", "effect", "effects"]
LAST = ["verify", "report", "close"]


def public_members() -> list[str]:
    return [
        name
        for name in dir(sl.Experiment)
        if not name.startswith("_") and (callable(getattr(sl.Experiment, name)) or name == "effects")
    ]


def examples() -> dict[str, list[doctest.Example]]:
    parser = doctest.DocTestParser()
    found = {CLASS_EXAMPLE: parser.get_examples(inspect.getdoc(sl.Experiment) or "")}
    for name in public_members():
        found[name] = parser.get_examples(inspect.getdoc(inspect.getattr_static(sl.Experiment, name)) or "")
    return found


def test_every_public_method_has_an_example() -> None:
    assert [name for name, found in examples().items() if not found] == []


def test_no_example_is_skipped() -> None:
    skipping = [name for name, found in examples().items() if any(doctest.SKIP in e.options for e in found)]
    assert skipping == []


def test_examples_give_what_they_say(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        "sl": sl,
        "engine": tiny_llama_engine,
        "pairs": data.PAIRS,
        "targets": data.TARGETS,
        "dev": data.DEV,
        "held_out": data.HELD_OUT,
        "texts": data.TEXTS,
        "prompts": data.PROMPTS,
    }
    found = examples()
    middle = [name for name in found if name not in ORDER + LAST]
    order = ORDER + sorted(middle, key=lambda name: (name != "select", name)) + LAST
    assert sorted(order) == sorted(found)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    told: list[str] = []
    for name in order:
        test = doctest.DocTest(found[name], names, name, None, None, None)
        runner.run(test, clear_globs=False, out=told.append)
        names = test.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(told)
    assert os.listdir(tmp_path) == ["runs"]
