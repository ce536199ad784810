"""A protocol from its file, on a tiny model; the shipped files name data that is there."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

import steerlab as sl
from steerlab._cli.protocol_runner import protocol_of
from steerlab._cli.protocol_spec import PROTOCOLS
from steerlab._cli.yaml_file import read_mapping

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("protocol-*.yaml"))
SMALLER = {
    "steerability": {"multipliers": [-1, 1], "layers": [1], "prompts": {"polite": "Please. "}},
    "axbench": {
        "layer": 1,
        "texts": 6,
        "limit": 1,
        "n_instructions": 2,
        "factors": [1],
        "max_new_tokens": 2,
        "training": {"steps": 2, "validation": 0.5},
    },
    "caa": {"multipliers": [0, 1], "layers": [1], "held_out": 0.1},
    "cast": {"layers": [2], "condition_layers": [1, 2], "strength": 1.0},
    "iti": {"heads": [2], "alphas": [1], "layers": [1, 2], "folds": 2},
    "refusal": {"layers": [1], "positions": 1, "max_kl": 50, "least_induced": -50},
}


def example(path: Path, folder: Path, model: Path) -> Path:
    """A shipped file for a tiny model, its sweep cut short."""
    content = yaml.safe_load(path.read_text())
    content |= {"model": str(model), "root": str(folder / "runs"), **SMALLER[content["protocol"]]}
    for key in ("harmful", "harmless", "target", "other", "behaviour"):
        if key in content:
            content[key] = str(path.parent / content[key])
    if "concepts" in content:
        rows = pd.read_parquet(path.parent / content["concepts"])
        rows = rows.assign(input=rows.input.str[:60], output=rows.output.str[:60])
        rows.to_parquet(folder / "concepts.parquet")
        content["concepts"] = "concepts.parquet"
    if "questions" in content:
        lines = (path.parent / content["questions"]).read_text().splitlines(keepends=True)
        (folder / "questions.jsonl").write_text("".join(lines[:6]))
        (folder / "texts.txt").write_text("The bread was stale.\n")
        content |= {"questions": "questions.jsonl", "texts": "texts.txt"}
    for name, place in content.get("behaviours", {}).items():
        lines = (path.parent / place).read_text().splitlines(keepends=True)
        shortest = sorted(lines, key=len)[:20]  # the tiny model reads 256 tokens
        (folder / f"{len(name)}.jsonl").write_text("".join(shortest))
        content["behaviours"][name] = f"{len(name)}.jsonl"
    made = folder / path.name
    made.write_text(yaml.safe_dump(content))
    return made


def test_there_is_a_file_per_protocol():
    assert sorted(read_mapping(path)["protocol"] for path in EXAMPLES) == sorted(PROTOCOLS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:reft_r1. the held-out loss is")  # two steps teach little
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_shipped_file_runs(steerlab, path, tmp_path, tiny_llama_path):
    made = example(path, tmp_path, tiny_llama_path)
    first = steerlab("run", made)
    assert first.code == 0, (first.err, first.exception)
    assert "Different from what was published" in first.out
    name = read_mapping(made)["name"]
    (found,) = sl.Experiment.load(tmp_path / "runs" / name).results.protocols
    assert found.protocol == read_mapping(made)["protocol"]
    assert (tmp_path / "runs" / name / "report.html").is_file()
    again = steerlab("run", made)
    assert again.code == 0
    assert again.err.count("there already") == 1


def test_bad_files_are_refused(steerlab, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("protocol: astrology\nname: x\n")
    names = ", ".join(sorted(PROTOCOLS))
    assert f"protocol is one of {names}, got 'astrology'." in steerlab("run", path).sentence
    path.write_text("protocol: caa\nname: x\nlayers: [1]\nbehaviour: {}\n")
    assert "unknown key 'behaviour'; did you mean 'behaviours'?" in steerlab("run", path).sentence
    path.write_text("protocol: caa\nname: x\nlayers: [1]\nbehaviours: {a: none.jsonl}\n")
    assert "behaviours.a: " in steerlab("run", path).sentence
    for example_file in EXAMPLES:
        spec = protocol_of(read_mapping(example_file), example_file)
        named = [getattr(spec, key, None) for key in ("concepts", "questions", "behaviour")]
        places = [*getattr(spec, "behaviours", {}).values(), *named]
        assert all(Path(place).is_file() for place in places if place is not None)
