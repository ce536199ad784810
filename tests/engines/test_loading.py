"""`sl.load` is one door: each backend takes its own arguments and names the other's."""

import inspect

import pytest

import steerlab as sl
from steerlab.engines.lens import load as load_lens


def test_without_a_backend_it_is_transformer_lens(tiny_llama_path):
    with sl.load(tiny_llama_path, "float64", "cpu") as engine:
        assert isinstance(engine, sl.LensEngine)
        assert (engine.info.dtype, engine.batch_tokens, engine.traits.backend) == ("float64", 4096, "lens")
    with sl.load(tiny_llama_path, device="cpu") as engine:
        assert engine.info.dtype == "float32"


def test_it_takes_what_the_backend_takes():
    own = list(inspect.signature(load_lens).parameters)
    assert list(inspect.signature(sl.load).parameters)[: len(own)] == own


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"backend": "jax"}, "Unknown backend 'jax'; there are: lens, vllm"),
        ({"layers": [1]}, "every layer can be edited"),
        ({"backend": "vllm"}, r"layers=\[14\]"),
        ({"backend": "vllm", "layers": [1], "n_devices": 2}, "tensor_parallel_size="),
        ({"backend": "vllm", "layers": [1], "device": "cpu"}, "device= belongs to backend='lens'"),
        ({"backend": "vllm", "layers": [1], "batch_tokens": 64}, "max_num_batched_tokens="),
    ],
)
def test_arguments_of_the_other_backend_are_named(tiny_llama_path, arguments, sentence):
    with pytest.raises(sl.InputError, match=sentence):
        sl.load(tiny_llama_path, **arguments)


def test_an_argument_that_nobody_has_is_explained(tiny_llama_path):
    with pytest.raises(TypeError, match="load has no argument speed"):
        sl.load(tiny_llama_path, speed=3)
