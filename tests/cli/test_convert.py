import pytest
import torch

import steerlab as sl
from steerlab.steering.vectors import SteeringVector, VectorSet


@pytest.fixture
def vectors(tmp_path) -> VectorSet:
    """A set in the file v.safetensors."""
    made = VectorSet(tuple(SteeringVector.from_tensor(torch.arange(4.0) + n, layer=n, model="m") for n in (1, 2)))
    made.save(tmp_path / "v.safetensors")
    return made


def test_there_and_back_through_every_format(steerlab, tmp_path, vectors):
    steps = [("v.safetensors", "a.gguf"), ("a.gguf", "b.pt"), ("b.pt", "c.safetensors")]
    for source, out in steps:
        hint = ["--model-hint", "llama"] if out.endswith(".gguf") else []
        done = steerlab("convert", tmp_path / source, tmp_path / out, *hint)
        assert (done.code, done.err) == (0, "")
        assert f"written to   {tmp_path / out}" in done.out
        assert "2, blocks.1.hook_resid_post to layer 2" in done.out
        assert ("cards        left out" in done.out) == (not out.endswith(".safetensors"))
    back = sl.VectorSet.load(tmp_path / "c.safetensors")
    assert back == vectors
    assert vectors[1].card.model == "m"
    assert back[1].card.model is None


def test_formats_may_be_named(steerlab, tmp_path, vectors):
    torch.save({1: torch.ones(4)}, tmp_path / "dictionary")
    options = ("--from", "torch", "--site", "resid_pre", "--to", "steerlab")
    assert steerlab("convert", tmp_path / "dictionary", tmp_path / "out", *options).code == 0
    assert sl.VectorSet.load(tmp_path / "out")[1].hook_point.name == "blocks.1.hook_resid_pre"


@pytest.mark.parametrize(
    ("source", "out", "reason"),
    [
        ("v.safetensors", "v.npy", "tells no format"),
        ("v.txt", "v.pt", "tells no format"),
        ("v.safetensors", "v.gguf", "--model-hint"),
        ("v.safetensors", "v.safetensors/x.pt", "Cannot write"),
        ("missing.gguf", "v.pt", "Cannot read"),
        ("v.safetensors --from gguf", "v.pt", "not a GGUF file"),
    ],
)
def test_refusals_are_one_sentence(steerlab, tmp_path, vectors, source, out, reason):
    name, *options = source.split()
    (tmp_path / "v.txt").write_text("v")
    assert reason in steerlab("convert", tmp_path / name, tmp_path / out, *options).sentence
