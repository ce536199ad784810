import sys

import pytest

from steerlab._cli.modules import import_modules
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import InputError, PlanError
from steerlab.steering.operators.registry import read_registered
from steerlab.steering.vectors import SteeringVector

PAIR = ("--pairs", "pairs.jsonl", "--out", "v.safetensors", "--layer", "1")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("generate", "--prompt", "a", "--model", "smolm2-135m"), "did you mean 'smollm2-135m'?"),
        (("generate", "--prompt", "a", "--model", "./no-such-model"), "no directory './no-such-model'"),
        (("generate", "--prompt", "a", "--top-p", "0"), "top_p must be in (0, 1], got 0.0"),
        (("generate", "--prompt", "a", "--temperature", "-1"), "temperature must be ≥ 0, got -1.0"),
        (("generate", "--prompt", "a", "--dose", "0.2"), "--dose needs --vector"),
        (("generate", "--prompt", "a", "--where", "all"), "--where needs --vector"),
        (("extract", *PAIR), "Cannot read pairs.jsonl"),
        (("score", "--prompt", "a"), "--prompt and --target, or --file"),
        (("score", "--prompt", "a", "--file", "t.jsonl"), "either --file or --prompt"),
        (("score", "--file", "t.jsonl"), "Cannot read t.jsonl"),
        (("perplexity",), "either --file or --text"),
        (("perplexity", "--file", "a.txt", "--text", "a"), "either --file or --text"),
        (("perplexity", "--file", "a.txt"), "Cannot read a.txt: No such file"),
        (("run", "a.yaml"), "Cannot read a.yaml: No such file"),
    ],
)
def test_bad_input_gets_one_sentence(steerlab, tmp_path, monkeypatch, arguments, wanted):
    monkeypatch.chdir(tmp_path)
    assert wanted in steerlab(*arguments).sentence


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), "needs one strength: either --dose or --coef"),
        (("--dose", "1", "--coef", "1"), "needs one strength: either --dose or --coef"),
        (("--dose", "nan"), "dose is a finite number, got nan"),
        (("--dose", "1", "--layer", "3"), "There is no vector for layer 3; layers here: [1]."),
    ],
)
def test_bad_steering(steerlab, vector_file, options, wanted):
    assert wanted in steerlab("generate", "--prompt", "a", "--vector", vector_file, *options).sentence


def test_damaged_vector_file(steerlab, vector_file):
    vector_file.write_bytes(vector_file.read_bytes()[:-8])
    said = steerlab("score", "--prompt", "a", "--target", "b", "--vector", vector_file, "--dose", "1").sentence
    assert str(vector_file) in said
    assert "damaged" in said or "truncated" in said


def test_something_else_as_vector_file(steerlab, tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("not a vector")
    assert (
        "not a steerlab vector file"
        in steerlab("perplexity", "--text", "a b", "--vector", other, "--coef", "1").sentence
    )


def test_vector_of_another_width(steerlab, tmp_path, tiny_llama_path):
    import torch

    path = SteeringVector.from_tensor(torch.ones(32), layer=1).save(tmp_path / "narrow.safetensors")
    said = steerlab("generate", "--model", tiny_llama_path, "--prompt", "a", "--vector", path, "--coef", "1").sentence
    assert "[32]" in said
    assert "[64]" in said


def test_several_vectors_ask_for_a_layer(steerlab, tmp_path):
    import torch

    from steerlab.steering.vectors import VectorSet

    vectors = VectorSet(tuple(SteeringVector.from_tensor(torch.ones(64), layer=k) for k in (1, 2)))
    path = vectors.save(tmp_path / "set.safetensors")
    assert (
        "layers 1, 2; choose one with --layer"
        in steerlab("generate", "--prompt", "a", "--vector", path, "--dose", "1").sentence
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--layer", "4"), "Layer 4 does not exist: the model has 4 layers"),
        (("--layer", "1", "--site", "resid_pots"), "Did you mean 'resid_post'?"),
        (("--layer", "1", "--method", "magic"), "'magic'"),
        (("--layer", "1", "--positive", "good"), "has no 'good'; its keys are"),
        (("--layer", "1", "--split", "nothing"), "no contrast pairs with split 'nothing'"),
    ],
)
def test_bad_extraction(steerlab, tmp_path, data, tiny_llama_path, options, wanted):
    files = ("--pairs", data / "pairs.jsonl", "--out", tmp_path / "v.safetensors", "--model", tiny_llama_path)
    assert wanted in steerlab("extract", *files, *options).sentence
    assert not (tmp_path / "v.safetensors").exists()


@pytest.mark.parametrize(
    ("out", "wanted"), [("", "is a folder; name a file"), ("taken/v.safetensors", "taken is a file")]
)
def test_place_that_cannot_be_written_is_refused_first(steerlab, tmp_path, out, wanted):
    (tmp_path / "taken").write_text("")
    assert wanted in steerlab("extract", "--pairs", "missing", "--out", tmp_path / out, "--layer", "1").sentence


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("generate", "--prompt", "a", "--dose", "much"), "--dose"),
        (("generate", "--prompt", "a", "--where", "nowhere"), "--where"),
        (("generate", "--prompt", "a", "--max-tokens", "3"), "--max-tokens"),
        (("generate",), "--prompt"),
        (("steer",), "steer"),
        (("serve", "smollm2-135m", "--port", "99999"), "--port"),
    ],
)
def test_usage_errors_exit_with_2(steerlab, arguments, wanted):
    outcome = steerlab(*arguments)
    assert outcome.code == 2
    assert wanted in outcome.err


# --- what is not bad input ----------------------------------------------------------------------------------------


def failing(error):
    def loaded(*_):
        raise error

    return loaded


def test_debug_shows_the_traceback(steerlab, monkeypatch):
    monkeypatch.setenv("STEERLAB_DEBUG", "1")
    assert isinstance(steerlab("perplexity").exception, InputError)


def test_unexpected_exceptions_stay_what_they_are(steerlab, monkeypatch):
    monkeypatch.setattr("steerlab._cli.generate.loaded", failing(ZeroDivisionError()))
    assert isinstance(steerlab("generate", "--prompt", "a").exception, ZeroDivisionError)


def test_interrupt_ends_with_130_and_a_line(steerlab, monkeypatch):
    monkeypatch.setattr("steerlab._cli.generate.loaded", failing(KeyboardInterrupt()))
    outcome = steerlab("generate", "--prompt", "a")
    assert outcome.code == 130
    assert outcome.err.startswith("interrupted")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("nowhere", None, "--import nowhere: there is no such module, neither installed nor in the current directory"),
        ("broken", "import no_such_package", "--import broken: the module fails with ModuleNotFoundError: No module"),
        ("failing", "1 / 0", "--import failing: the module fails with ZeroDivisionError: division by zero"),
    ],
)
def test_modules_that_cannot_be_imported(steerlab, tmp_path, monkeypatch, name, text, wanted):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    assert wanted in steerlab("serve", "smollm2-135m", "--import", name).sentence


def test_modules_are_found_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [one for one in sys.path if one])
    (tmp_path / "json.py").write_text("raise AssertionError")  # what is installed goes first
    (tmp_path / "mine_alone.py").write_text("import steerlab as sl\nsl.register_operator('mine', lambda *_: None)")
    import_modules(["json", "mine_alone"])
    with pytest.raises(PlanError, match="gave NoneType"):
        read_registered({"kind": "mine"}, HookPoint(0))
