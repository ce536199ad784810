import pytest
import torch
from transformers import AutoModelForCausalLM

import steerlab as sl
from tests.tiny_models import build_tiny_family

ENGINES = ["lens_engine", "tiny_llama_engine", "tiny_gpt2_engine"]
TINY = ENGINES[1:]


@pytest.fixture(scope="session")
def references(smollm2_path, tiny_llama_path, tiny_gpt2_path):
    """The plain Hugging Face model behind each engine fixture, with eager attention."""
    paths = dict(zip(ENGINES, (smollm2_path, tiny_llama_path, tiny_gpt2_path), strict=True))
    loaded = {}

    def load(name):
        if name not in loaded:
            model = AutoModelForCausalLM.from_pretrained(paths[name], attn_implementation="eager", dtype=torch.float32)
            loaded[name] = model.eval()
        return loaded[name]

    return load


@pytest.fixture(params=ENGINES)
def any_engine(request):
    """Each engine in turn, with its name."""
    return request.param, request.getfixturevalue(request.param)


@pytest.fixture(params=TINY)
def tiny_engine(request):
    """Each tiny engine in turn, with its name."""
    return request.param, request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """By name in `FAMILIES`: a tiny model on TransformerLens, and plain with the right attention kernel."""
    loaded = {}

    def load(name):
        if name not in loaded:
            path = build_tiny_family(tmp_path_factory.mktemp("families") / name, name)
            # sdpa would leave out Gemma 2's soft cap on attention scores
            kernel = {"attn_implementation": "eager"} if name.startswith("gemma2") else {}
            plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kernel).eval()
            loaded[name] = (sl.load(path, device="cpu"), plain)
        return loaded[name]

    return load
