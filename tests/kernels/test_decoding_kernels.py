"""Kernels of a pass over one token per row: against torch, by Triton's interpreter or on a GPU; compiled for one."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

from steerlab import _kernels
from tests.interpreted import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")

CODE = """
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import steerlab as sl
from steerlab._kernels import attention, editing, elementwise, feeding, greedy, linear as maps, rotary
from steerlab._runtime import decoding
from steerlab.engines.lens import _edit_buffers
from steerlab.measures.log_probs import chosen_log_probs, rows_not_finite

DEVICE = "{device}"
if DEVICE == "cpu":
    for module in (attention, editing, elementwise, maps, rotary, _edit_buffers):
        module.runs_kernels = lambda rows: rows.stride(-1) == 1
torch.manual_seed(0)


def random(*shape, dtype=torch.float16):
    made = torch.randn(*shape, device=DEVICE).to(dtype)
    if DEVICE == "cuda":  # weights are read before the kernel before has ended
        torch.cuda.synchronize()
    return made


def close(found, wanted, atol):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted.float(), atol=atol, rtol=atol)


sizes = (64, 32, 48)
weights, biases = [random(n, 512) / 20 for n in sizes], [random(n) for n in sizes]
for n_rows in (1, 2, 5, 17):
    rows = random(n_rows, 1, 512)
    for added in (biases, [None] * 3):
        for n in (1, 2, 3):
            assert maps.can_map(rows, weights[:n], added[:n])
            for found, w, b in zip(maps.linear_maps(rows, weights[:n], added[:n]), weights, added):
                close(found, linear(rows.float(), w.float(), None if b is None else b.float()), 1e-2)
for depth, n_rows in ((40, 2), (1100, 1), (9000, 1)):  # one program's inputs need not be a power of two
    others, few = [random(16, depth) / depth**0.5 for _ in range(2)], random(n_rows, depth)
    assert maps.can_map(few, others, [None] * 2) and not maps.can_map(few.repeat(3, 1), others, [None] * 2)
    for found, w in zip(maps.linear_maps(few, others, [None] * 2), others):
        close(found, linear(few.float(), w.float()), 1e-2)
assert not maps.can_map(random(33, 512), weights, biases)
assert not maps.can_map(random(1, 512, dtype=torch.float32), weights, biases)
assert not maps.can_map(rows, [random(40, 512)], [None])
assert not maps.can_map(random(5, 1, 1024)[..., :512], weights, biases)  # its rows are not one after the other
assert [maps._stages(memory << 10, 32, maps._FEW) for memory in (227, 163, 99, 48)] == [4, 3, 2, 1]
for blocks in (maps.Blocks(8, 64, 2, 1), maps.Blocks(16, 128, 3, 4, "evict_first")):
    wanted = torch.cat([linear(rows[:, 0].float(), w.float()) for w in weights], dim=1)
    close(maps.mapped(rows[:, 0], weights, [], blocks), wanted, 1e-2)

shapes = ((2, 8, 2, 70, 32, 32), (1, 4, 1, 600, 80, 64), (3, 4, 4, 64, 16, 16))
for n_rows, n_heads, n_keys, n_slots, d_key, d_value in shapes:
    query, keys = random(n_rows, n_heads, 1, d_key), random(n_rows, n_keys, n_slots, d_key)
    values = random(n_rows, n_keys, n_slots, d_value)
    masks = [torch.rand(n, 1, 1, n_slots, device=DEVICE) < 0.5 for n in (1, n_rows)]
    for mask in (None, *masks):
        assert attention.can_attend(query, keys, values, mask)
        found = attention.attend(query, keys, values, mask, 0.2)
        shared = [x.float().repeat_interleave(n_heads // n_keys, 1) for x in (keys, values)]
        wanted = scaled_dot_product_attention(query.float(), *shared, attn_mask=mask, scale=0.2)
        close(found, wanted.transpose(1, 2), 5e-3)
hidden = torch.zeros(3, 1, 1, 64, dtype=torch.bool, device=DEVICE)
assert not attention.attend(query, keys, values, hidden, 0.2).any()

for dtype, atol in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
    query, key = (random(3, 1, n * 32, dtype=dtype).view(3, 1, n, 32).transpose(1, 2) for n in (8, 2))
    for n_angles in (3, 1):
        cos, sin = (random(n_angles, 1, 32, dtype=dtype) for _ in range(2))
        assert rotary.can_rotate(query, key, cos, sin)
        for found, wanted in zip(rotary.rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin)):
            close(found, wanted, 4 * atol)
    norm = LlamaRMSNorm(48).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.normal_()
    rows = random(3, 1, 48, dtype=dtype)
    assert elementwise.can_normalise(rows, norm.weight)
    close(elementwise.rms_norm(rows, norm.weight, norm.variance_epsilon), norm(rows), atol)
    added = random(3, 1, 96, dtype=dtype)[..., :48]
    assert elementwise.can_add(rows, added, norm.weight) and not elementwise.can_add(rows, added[:1], norm.weight)
    total, normed = elementwise.add_and_norm(rows, added, norm.weight, norm.variance_epsilon)
    assert torch.equal(total, rows + added)
    close(normed, norm(total), atol)
    gate, value = random(3, 1, 2000, dtype=dtype).split(1000, dim=-1)
    close(elementwise.silu_gate(gate, value), silu(gate) * value, atol)
    value, slot = random(3, 2, 1, 24, dtype=dtype), torch.tensor([5], device=DEVICE)
    caches, wanted = ([torch.zeros(3, 2, 9, d, dtype=dtype, device=DEVICE) for d in (32, 24)] for _ in range(2))
    assert elementwise.can_write(key, value, *caches)
    elementwise.write(key, value, *caches, slot)
    for cache, plain, new in zip(caches, wanted, (key, value)):
        assert torch.equal(cache, plain.index_copy_(2, slot, new))

for width in (5, 4096, 10000):
    for dtype in (torch.float32, torch.bfloat16):
        logits = random(6, width, dtype=torch.float32).mul(4).to(dtype)
        logits[1, ::2], logits[2, 3], logits[3, 2], logits[4] = -torch.inf, torch.nan, torch.inf, -torch.inf
        logits[5] = logits[5].round()  # ties
        tokens, log_probs, broken = greedy.most_probable(logits)
        assert torch.equal(broken, rows_not_finite(logits))
        for row in (0, 1, 5):
            first = (logits[row] == logits[row].max()).nonzero()[0, 0]
            assert tokens[row] == first
        close(log_probs[[0, 1, 5]], chosen_log_probs(logits, tokens)[[0, 1, 5]], 1e-5)

for eos in ([], [7], [3, 11, 0]):
    known = torch.tensor(eos, dtype=torch.long, device=DEVICE)
    tokens = torch.arange(8, device=DEVICE).repeat(4)
    broken, ended, failed = (torch.arange(32, device=DEVICE) // n % 3 == 1 for n in (1, 4, 9))
    found = []
    for by_kernel in (False, True):
        decoding.runs_kernels = lambda rows, answer=by_kernel: answer
        flags = ended.clone(), failed.clone()
        found.append((*decoding.settled(tokens, broken, *flags, known), *flags))
    for wanted, ours in zip(*found):
        assert ours.dtype == wanted.dtype and torch.equal(ours, wanted)
    assert (found[1][0] < 0).sum() < 32 and bool(eos) == (not torch.equal(*found[1][:2]))
    assert not torch.equal(found[1][3], failed)

for step in (0, 1, 5):
    fed = torch.tensor([4, -1, 9], device=DEVICE)
    tokens, index, counts = (torch.full((3, 1), 7, device=DEVICE) for _ in range(3))
    counts[1], filled, ran = 2, torch.tensor(30, device=DEVICE), min(step, 1)
    feeding.feed(fed, tokens, index, counts, filled, step, ran)
    assert tokens.tolist() == [[4], [0], [9]] and index.tolist() == [[step], [-1], [step]]
    assert counts.tolist() == [[7 + ran], [2 + ran], [7 + ran]] and filled.item() == 30 + ran

d_model, index = 80, torch.tensor([[2], [0], [-1], [1]], device=DEVICE)
v, u = (sl.SteeringVector.from_tensor(torch.randn(d_model) * 3, layer=1) for _ in range(2))
edits = [
    sl.add(v, coef=3.0),
    sl.clamp(u, lo=-0.5, hi=0.25),
    sl.rotate(v, u, angle=30.0, norm="keep"),
    sl.ablate(v, norm="keep").scaled(0.5),
]
for dtype, atol in ((torch.float32, 1e-5), (torch.float16, 2e-2)):
    stream = random(4, 1, 2 * d_model, dtype=dtype)[..., :d_model]
    stream[2] = torch.nan  # of a row that has ended
    sizes, found = [len(edit.terms()) for edit in edits], []
    for by_kernel in (False, True):
        torch.manual_seed(1)
        _edit_buffers.runs_kernels = lambda rows, answer=by_kernel: answer
        buffers = _edit_buffers.EditBuffers(sizes, 4, 3, d_model, index)
        buffers.fill(edits)
        for k in range(len(edits)):
            selected = torch.rand(4, 3) < 0.7
            buffers.place(k, 0, selected.to(DEVICE), torch.rand(4, 3).add(0.5).to(DEVICE))
        found.append((buffers(buffers(stream)), buffers))
    (wanted, plain), (ours, kernel) = found
    assert ours.dtype == dtype and ours[2].isnan().all()
    assert not torch.equal(wanted[0], stream[0])
    close(ours[[0, 1, 3]], wanted[[0, 1, 3]], atol)
    assert torch.equal(kernel.edited, plain.edited) and 0 < plain.edited.sum() < 24
    close(kernel.changes, plain.changes, 1e-5 if dtype == torch.float32 else 1e-2)
assert not editing.can_edit(stream.double()) and not editing.can_edit(stream[:, 0])
"""


def test_no_operator_has_the_name_of_another():
    """Both engines can be in one process, and torch refuses a name that is taken, or gives it to the later one."""
    modules = [
        importlib.import_module(f"steerlab._kernels.{found.name}") for found in pkgutil.iter_modules(_kernels.__path__)
    ]
    modules.append(importlib.import_module("steerlab.engines.vllm._worker.op"))
    defined = [name for module in modules for name in re.findall(r'custom_op\("(.*?)"', inspect.getsource(module))]
    assert len(set(defined)) == len(defined) >= 8
    assert "steerlab::edit" not in defined, "the one inside vLLM has that name"


def test_decoding_kernels_agree_with_torch():
    run_interpreted(CODE.format(device="cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_decoding_kernels_agree_with_torch():
    exec(compile(CODE.format(device="cuda"), "kernels", "exec"), {})


@pytest.mark.slow
def test_decoding_kernels_compile_for_a_gpu_and_spill_nothing_to_speak_of(monkeypatch):
    """The interpreter takes Python that the compiler does not."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import kernel_registers

    tried = {}
    for kernel, dtype, constants, warps in kernel_registers.decoding_variants():
        if kernel.__name__ not in tried:
            registers, spilled = kernel_registers.assembled(kernel, dtype, constants, warps, capability=90)
            tried[kernel.__name__] = registers
            assert spilled <= 32
    assert len(tried) >= 8
