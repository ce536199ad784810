import json

import pytest
import torch

import steerlab as sl
from steerlab.core.shipped import reference_text
from steerlab.scoring import read_distributions

TEXT = reference_text()[:500]
WINDOWS = ("--context-length", 60, "--stride", 30)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return path


def test_resume_and_distributions(steerlab, file, tmp_path, tiny_llama_path, tiny_llama_engine):
    base = ("perplexity", "--model", tiny_llama_path, "--file", file, *WINDOWS, "--json")
    wanted = sl.perplexity(tiny_llama_engine, TEXT, context_length=60, stride=30)
    found = json.loads(steerlab(*base, "--resume", tmp_path / "run", "--distributions", tmp_path / "d").out)
    assert found["nll"] == pytest.approx(wanted.nll, abs=1e-5)
    assert sum(len(shard.positions) for shard in read_distributions(tmp_path / "d")) == wanted.num_tokens
    refused = steerlab(*base[:-3], "--stride", 20, "--resume", tmp_path / "run").sentence
    assert "stride was 30, now 20" in refused
    taken = steerlab(*base, "--distributions", tmp_path / "d").sentence
    assert "already holds distributions" in taken


def test_a_data_set_from_a_folder(steerlab, tmp_path, tiny_llama_path, tiny_llama_engine, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [TEXT[:200], "", TEXT[200:]]
    (folder / "test.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    base = ("perplexity", "--model", tiny_llama_path, "--dataset", folder, "--json")
    wanted = sl.perplexity(tiny_llama_engine, "\n\n".join(rows))
    assert json.loads(steerlab(*base).out)["nll"] == pytest.approx(wanted.nll, abs=1e-5)
    assert "no text in a column 'body'" in steerlab(*base, "--column", "body").sentence
    assert "cannot load" in steerlab(*base, "--split", "dev").sentence


def test_a_data_set_that_cannot_be_had_fails_at_once(steerlab, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")  # nothing answers there
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    asked = []

    def load_dataset(path, **_):
        import huggingface_hub

        asked.append((datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE))
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    said = steerlab("perplexity", "--dataset", "no/such-set", "--dataset-config", "x").sentence
    assert "Couldn't reach 'no/such-set'" in said
    assert "name a local folder" in said
    assert asked == [(True, True)]
    assert datasets.config.HF_HUB_OFFLINE is False


def test_without_the_library(steerlab, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else real(name))
    assert "pip install datasets" in steerlab("perplexity", "--dataset", "wikitext").sentence


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--text", "a b", "--dataset", "x"), "either --file or --text or --dataset"),
        (("--text", "a b", "--dataset-config", "x"), "--dataset-config needs --dataset"),
        (("--text", "a b", "--split", "test"), "--split needs --dataset"),
        (("--text", "a b", "--column", "text"), "--column needs --dataset"),
        (("--text", "a b", "--quantization", "fp8"), "need --engine vllm"),
        (("--text", "a b", "--tensor-parallel-size", "2"), "need --engine vllm"),
        (("--text", "a b", "--distributions", "a.txt"), "is a file; name a folder"),
    ],
)
def test_options_that_do_not_go_together(steerlab, file, monkeypatch, arguments, wanted):
    monkeypatch.chdir(file.parent)
    assert wanted in steerlab("perplexity", *arguments).sentence


def test_divergence(steerlab, file, tmp_path, tiny_llama_path, tiny_llama_engine):
    vector = sl.SteeringVector.from_tensor(torch.linspace(-1, 1, 64), layer=1)
    vector.save(tmp_path / "v.safetensors")
    base = ("divergence", "--model", tiny_llama_path, "--file", file, *WINDOWS)
    steering = ("--vector", tmp_path / "v.safetensors", "--coef", 3)
    found = json.loads(steerlab(*base, *steering, "--json").out)
    plan = sl.Plan(sl.add(vector, coef=3.0))
    wanted = sl.divergence(tiny_llama_engine, tiny_llama_engine, TEXT, plan_a=plan, context_length=60, stride=30)
    assert found["mean_kl"] == pytest.approx(wanted.mean_kl, abs=1e-5)
    assert found["num_tokens"] == wanted.num_tokens
    table = steerlab(*base, *steering).out
    assert f"KL(a ‖ b)       {wanted.mean_kl:.4f} nats per token\n" in table
    assert "dtype           float32\n" in table
    assert found["dtypes"] == list(wanted.dtypes) == ["float32", "float32"]
    same = json.loads(steerlab(*base, "--against", tiny_llama_path, "--json").out)
    assert same["mean_kl"] == 0
    assert "--vector steers the model" in steerlab(*base).sentence


def test_bos_before_every_window(steerlab, file, tiny_llama_path, tiny_llama_engine):
    options = ("--model", tiny_llama_path, "--file", file, *WINDOWS, "--bos-each-window", "--json")
    wanted = sl.perplexity(tiny_llama_engine, TEXT, context_length=60, stride=30, bos_each_window=True)
    found = json.loads(steerlab("perplexity", *options).out)
    assert found["nll"] == pytest.approx(wanted.nll, abs=1e-5)
    assert found["num_tokens"] == wanted.num_tokens
    compared = json.loads(steerlab("divergence", "--against", tiny_llama_path, *options).out)
    assert compared["mean_nll_a"] == pytest.approx(wanted.nll, abs=1e-5)
