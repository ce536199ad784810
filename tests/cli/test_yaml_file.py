from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml

import steerlab as sl
from steerlab._cli.inputs import read_inputs
from steerlab._cli.yaml_file import read_mapping, read_spec
from steerlab.core.errors import DataError
from tests.cli.conftest import write_changed

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
EXAMPLE = Path(__file__).parents[2] / "examples" / "sentiment.yaml"
SMALLEST = {
    "name": "trial",
    "model": "./no-such-model",
    "pairs": {"path": "pairs.jsonl"},
    "vector": {"layer": 1},
    "targets": {"path": "targets.jsonl"},
    "doses": [-1, 0, 1],
}


@pytest.fixture
def write(data):
    """Writes the smallest experiment with changes, or a text, beside its data."""

    def make(changes=None, text=None):
        path = write_changed(data / "trial.yaml", SMALLEST, changes)
        if text is not None:
            path.write_text(text)
        return path

    return make


def test_paths_count_from_the_file(write, data):
    spec = read_spec(write({"root": "out", "neutral": "neutral.txt", "generations.prompts": "prompts.txt"}))
    assert spec.pairs.path == data / "pairs.jsonl"
    assert spec.targets.path == data / "targets.jsonl"
    assert spec.root == data / "out"
    assert spec.neutral == data / "neutral.txt"
    assert spec.generations is not None
    assert spec.generations.prompts == data / "prompts.txt"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_only_line_feeds_end_a_prompt_or_a_paragraph(write, data, end, encoding):
    prompts = ["one\u2029two", "three\x0cfour", "five\rsix", "seven\x85eight"]
    (data / "many.txt").write_bytes(end.join([*prompts, "", ""]).encode(encoding))
    (data / "lines.txt").write_bytes(f"a\u2029b{end}c{end}{end}d".encode(encoding))
    found = read_inputs(
        read_spec(write({"generations.prompts": "many.txt", "neutral": "lines.txt"})), lambda key: nullcontext()
    )
    assert found.prompts == prompts
    assert found.neutral == ["a\u2029b\nc", "d"]


def test_prompts_may_be_a_list(write):
    spec = read_spec(write({"generations.prompts": ["a", "b"]}))
    assert spec.generations is not None
    assert spec.generations.prompts == ["a", "b"]


def test_a_folder_beside_the_file_is_a_model(write, data):
    (data / "my-model").mkdir(exist_ok=True)
    assert read_spec(write({"model": "my-model"})).model == str(data / "my-model")
    assert read_spec(write({"model": "owner/name"})).model == "owner/name"


def test_numbers_as_yaml_reads_them(write):
    spec = read_spec(write(text=yaml.safe_dump(SMALLEST | {"doses": ["-.2", 0, "1e-3"]})))
    assert spec.doses == [-0.2, 0.0, 0.001]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"dosis": [1]}, "unknown key 'dosis'; did you mean 'doses'?"),
        ({"vector.layr": 1}, "unknown key 'vector.layr'; did you mean 'vector.layer'?"),
        ({"plan.operater": "add"}, "unknown key 'plan.operater'; did you mean 'plan.operator'?"),
        ({"layer": 1}, "unknown key 'layer'; did you mean 'vector.layer'?"),
        ({"controls.max_new_tokens": 1}, "did you mean 'generations.max_new_tokens'?"),
        ({"targets.zzz": 1}, "unknown key 'targets.zzz'; the keys of targets are path, split."),
        ({"name": None}, "the key 'name' is missing."),
        ({"vector.layer": None}, "the key 'vector.layer' is missing."),
        ({"vector.layer": "top"}, "vector.layer: input should be a valid integer, got 'top'."),
        ({"controls.random": True}, "controls.random: input should be a valid integer, got True."),
        ({"controls": 3}, "controls: must hold keys (random, shuffled, wrong_layer), got 3."),
        ({"doses": [0, "x"]}, "doses.1: input should be a valid number, got 'x'."),
        ({"doses": [0, True]}, "doses.1: input should be a valid number, got True."),
        ({"plan.where": "nowhere"}, "plan.where: input should be"),
        ({"plan.where": {"kind": "inside"}}, "plan.where: Not a description of positions: {'kind': 'inside'}"),
        ({"plan.where": {"kind": "after", "event": 5, "n": -1}}, "plan.where: "),
        ({"plan.where": {"kind": "after", "events": 5}}, "the keys of after are kind, event, n, inclusive."),
        ({"question": "  "}, "question: says in words what is asked, got '  '."),
        ({"plan": {"operator": "ablate", "dose": 1}}, "plan: ablate takes no 'dose'."),
        ({"generations.prompts": 3}, "generations.prompts: "),
        ({"name": None, "doses": None}, "(1 more problem in this file.)"),
    ],
)
def test_complaints_name_file_and_key(steerlab, write, changes, wanted):
    path = write(changes)
    said = steerlab("run", path).sentence
    assert said.startswith(f"{path}: ")
    assert wanted in said


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"pairs.path": "nothing.jsonl"}, "pairs: Cannot read "),
        ({"pairs.group": "topic"}, "pairs: "),
        ({"targets.split": "dev"}, "targets: "),
        ({"vector.method": "magic"}, "vector.method: "),
        ({"vector.site": "resid_pots"}, "vector.site: Unknown site 'resid_pots'"),
        ({"doses": [0]}, "doses: "),
        ({"controls.random": -1}, "controls: Controls(random=…)"),
        ({"metric": "vibes"}, "metric: Unknown metric 'vibes'"),
        ({"policy.top_p": 0}, "policy: top_p must be"),
        ({"neutral": "nothing.txt"}, "neutral: Cannot read "),
        ({"generations.prompts": []}, "generations.prompts: There are no prompts"),
        ({"root": "pairs.jsonl"}, "root: "),
        ({"name": "a/b"}, "name: "),
    ],
)
def test_complaints_about_content_name_file_and_key(steerlab, write, changes, wanted):
    path = write(changes)
    said = steerlab("run", path).sentence
    assert said.startswith(f"{path}: {wanted}")


def test_unknown_model_names_file_and_key(steerlab, write):
    outcome = steerlab("run", path := write())
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {path}: model: There is no directory './no-such-model'")


def test_warnings_are_one_line(steerlab, write):
    lines = steerlab("run", write({"controls.random": 3})).err.splitlines()
    assert lines[0].startswith("warning: 3 random draws cannot rank below 0.250")
    assert lines[1].startswith("error: ")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("name: [a", "line 1, column "),
        ("name: a\nname: b\n", "line 2, column 1: the key 'name' stands twice."),
        ("- a\n- b\n", "must hold keys such as name, question"),
        ("", "must hold keys such as name, question"),
    ],
)
def test_what_is_not_an_experiment_file(write, text, wanted):
    path = write(text=text)
    with pytest.raises(DataError) as caught:
        read_spec(path)
    assert str(path) in str(caught.value)
    assert wanted in str(caught.value)


def test_the_example_is_valid_and_its_data_are_there():
    spec = read_spec(EXAMPLE)
    assert spec.generations is not None
    assert all(Path(p).is_file() for p in (spec.pairs.path, spec.targets.path, spec.generations.prompts))


def test_the_demo_is_the_example():
    from steerlab._cli.demo import demo_spec
    from steerlab.core.shipped import shipped_vectors

    example = read_spec(EXAMPLE)
    demo = demo_spec(example.root, model="smollm2-135m", layer=14, seed=0, fast=False)
    data = shipped_vectors() / "sentiment"
    assert (
        demo.model_copy(
            update={
                "name": example.name,
                "pairs": demo.pairs.model_copy(update={"path": example.pairs.path}),
                "targets": demo.targets.model_copy(update={"path": example.targets.path}),
                "plan": example.plan,
                "generations": example.generations,
            }
        )
        == example
    )
    assert example.pairs.path.resolve() == (data / "pairs.jsonl").resolve()


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, sl.add(V, dose=1.0)),
        ({"operator": "set", "coef": 2.0}, sl.set(V, 2.0)),
        ({"operator": "set", "dose": 0.1, "norm": "keep"}, sl.set(V, dose=0.1, norm="keep")),
        ({"operator": "clamp", "lo": -1, "unit": "dose"}, sl.clamp(V, lo=-1, unit="dose")),
        ({"operator": "ablate", "where": "all", "norm": "keep"}, sl.ablate(V, where=sl.where.all(), norm="keep")),
        (
            {"where": {"kind": "between", "start": "<think>", "end": "</think>"}},
            sl.add(V, dose=1.0, where=sl.where.between("<think>", "</think>")),
        ),
        (
            {"where": (sl.where.index(0) | ~sl.where.after({5, 6}, 3)).to_json()},
            sl.add(V, dose=1.0, where=sl.where.index(0) | ~sl.where.after({5, 6}, 3)),
        ),
    ],
    ids=str,
)
def test_every_operator_of_the_file_is_the_operator_it_names(write, plan, expected):
    assert read_spec(write({"plan": plan})).plan.plan(V) == sl.Plan(expected)


# --- lines and characters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["\r", "\x85", "\u2028", "\u2029"])
def test_only_line_feeds_end_a_line_of_yaml(write, sign):
    text = f'a: one{sign}two # and{sign}b: 3\r\nc: "x{sign}y"\nd: |\n  l{sign}m\n  n\n'
    path = write(text=text)
    path.write_bytes(text.encode())
    assert read_mapping(path) == {"a": f"one{sign}two", "c": f"x{sign}y", "d": f"l{sign}m\nn\n"}
    path.write_bytes(f"a: one{sign}two\na: 2\n".encode())
    with pytest.raises(DataError, match=r"trial\.yaml: line 2, column 1: the key 'a' stands twice"):
        read_mapping(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('k: 1\na: "cut \\ud83d"\n', "line 2, column 4: the text .* holds half a character"),
        ("k: 1\na: x\x0cy\n", "line 2: the character .* is not allowed"),
        ("a: 2024-99-99\n", "not valid YAML: month must be in"),
        ("a: " + "[" * 20_000, "nested too deeply"),
        ("a: " + "1" * 5000, "not valid YAML: Exceeds the limit"),
    ],
)
def test_what_yaml_stumbles_over_is_named_by_file(write, text, reason):
    with pytest.raises(DataError, match=r"trial\.yaml.*" + reason):
        read_mapping(write(text=text))


def test_a_character_in_json_halves_is_whole(write):
    assert read_mapping(write(text='a: "\\ud83d\\ude00"\n')) == {"a": "😀"}
