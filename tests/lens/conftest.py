import pytest
import torch
from transformers import AutoModelForCausalLM

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
