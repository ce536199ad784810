"""Residual sums with the norm that follows: the same numbers, by fewer kernels, and hooks that see what they did."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from steerlab.engines.lens._residual_sums import FusedNorm, fuse_sums
from tests.interpreted import run_interpreted

CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from steerlab._kernels import elementwise
from steerlab.engines.lens import _fusing

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 50, "num_hidden_layers": 3}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)
ids = torch.randint(50, (2, 1))
for module in model.modules():
    if type(module).__name__ == "LlamaRMSNorm":
        module.weight.normal_(1.0, 0.5)
wanted = model(ids).logits
edit = model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5 + 1)
edited = model(ids).logits
edit.remove()
elementwise.runs_kernels = lambda rows: rows.stride(-1) == 1
kernels = {"sums": 0, "norms": 0}


def counting(name, function):
    def counted(*args):
        kernels[name] += 1
        return function(*args)

    return counted


_fusing.fuse_between(model, 64)
elementwise.add_and_norm = counting("sums", elementwise.add_and_norm)
elementwise.rms_norm = counting("norms", elementwise.rms_norm)
torch.testing.assert_close(model(ids).logits, wanted, atol=1e-5, rtol=1e-5)
assert kernels == {"sums": 6, "norms": 1}, kernels
model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5 + 1)
torch.testing.assert_close(model(ids).logits, edited, atol=1e-5, rtol=1e-5)
assert kernels == {"sums": 12, "norms": 3}, kernels
assert (wanted - edited).abs().max() > 0.01
"""


def test_sums_by_kernel_agree_with_the_model_and_leave_its_hooks():
    pytest.importorskip("triton", reason="Triton is not installed here")
    run_interpreted(CODE)


@pytest.mark.parametrize(("made", "is_fused"), [("llama", True), ("scaled", False), ("no norms", False)])
def test_layers_of_another_form_are_left_alone(made, is_fused):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 8}
    if made == "scaled":
        model = GraniteForCausalLM(GraniteConfig(**sizes, num_hidden_layers=2, residual_multiplier=0.5))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    for module in model.modules() if made != "no norms" else ():
        if type(module).__name__.endswith("RMSNorm"):
            module.__dict__["forward"] = FusedNorm(type(module).forward.__get__(module), module.weight, 1e-6)
    ids = torch.tensor([[1, 2, 3]])
    wanted = model(ids).logits
    fuse_sums(model)
    assert ["forward" in layer.__dict__ for layer in model.model.layers] == [is_fused] * 2
    assert torch.equal(model(ids).logits, wanted)
