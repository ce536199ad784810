"""The GPU kernels against the eager code: compiled where there is a GPU, else carried out by Triton's interpreter.

The interpreter is chosen by an environment variable that Triton reads as it is imported, hence the process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

EDGES = """
import torch
from steerlab.core.policy import SamplingPolicy
from steerlab.kernels.top_p import top_p_edges_on_gpu
from steerlab.measures.nucleus import _edges_by_sort, up_to_edge

DEVICE = "{device}"
torch.manual_seed(0)
for width in {widths}:
    for scale in (0.01, 1.0, 5.0, 30.0):
        for top_p in (0.05, 0.5, 0.8, 0.95, 0.999):
            rows = torch.randn(4, width, device=DEVICE) * scale
            if scale == 5.0:
                rows = rows.round()  # ties
            if scale == 30.0:
                rows[:, ::3] = -torch.inf
            rows[0] -= 40
            rows[1] += 1e4 if scale < 30 else 0
            found = top_p_edges_on_gpu(rows, top_p)
            expected = _edges_by_sort(rows, SamplingPolicy(top_p=top_p))
            sizes = [up_to_edge(rows, edges).sum(-1) for edges in (found, expected)]
            # the sort's running float32 sum may be off by as much as a few of the least tokens weigh
            allowed = 0 if DEVICE == "cpu" else 1 + rows.shape[1] // 2000
            assert ((sizes[0] - sizes[1]).abs() <= allowed).all(), (width, scale, top_p, sizes)
zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0, -9.0]], device=DEVICE)
assert top_p_edges_on_gpu(zeros, 0.6).tolist() == [2]
assert top_p_edges_on_gpu(zeros, 0.2).tolist() == [0]
print("all edges agree")
"""

STEPS = """
import torch
import steerlab.measures.nucleus as nucleus
import steerlab.measures.steps as steps
from steerlab.core.policy import SamplingPolicy

DEVICE = "{device}"
torch.manual_seed(0)


def measured(rows, tokens, policy, by, with_kernels):
    steps.runs_kernels = nucleus.runs_kernels = lambda rows: with_kernels
    found = steps.policy_steps(rows, tokens, policy)
    names = ("by_log_probs", "by_log_qs", "by_entropies")
    gradient = steps.policy_steps_gradient(rows, tokens, policy, found.edges, **dict(zip(names, by)))
    return found.log_probs, found.log_qs, found.entropies, gradient


for width in {widths}:
    for temperature, top_p in ((1, 1), (0.7, 1), (0.7, 0.9), (1, 0.5), (2, 0.3), (0, 1)):
        rows = torch.randn(6, width, device=DEVICE) * 3
        rows[0] = rows[0].round()
        rows[1] += 1e4
        rows[2, ::2] = -torch.inf
        tokens = torch.randint(0, width, (6,), device=DEVICE)
        tokens[2], tokens[3], tokens[4] = 1, rows[3].argmax(), rows[4].argmax()
        by = [torch.randn(6, device=DEVICE), None if temperature == 2 else torch.randn(6, device=DEVICE), None]
        by[2] = None if temperature == 1 and top_p == 1 else torch.randn(6, device=DEVICE)
        policy = SamplingPolicy(temperature=temperature, top_p=top_p)
        for plain, fused in zip(*(measured(rows, tokens, policy, by, k) for k in (False, True))):
            torch.testing.assert_close(fused, plain, rtol=2e-5, atol=2e-5)
print("all steps agree")
"""


def interpreted(code: str, **values: object) -> str:
    code = code.format(device="cpu", **values)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_edges_equal_those_of_the_full_sort():
    assert "all edges agree" in interpreted(EDGES, widths=(5, 1500))


def test_steps_and_gradients_equal_the_eager_ones():
    assert "all steps agree" in interpreted(STEPS, widths=(300, 2500))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("code", [EDGES, STEPS])
def test_compiled_kernels_agree_with_the_eager_code(code, capsys):
    exec(compile(code.format(device="cuda", widths=(5, 3000, 128256)), "kernels", "exec"), {})
    assert "agree" in capsys.readouterr().out


@pytest.mark.gpu
@needs_gpu
def test_the_nucleus_uses_the_kernels_on_a_gpu():
    from steerlab.core.policy import SamplingPolicy
    from steerlab.kernels.availability import runs_kernels
    from steerlab.measures.nucleus import nucleus

    rows = torch.randn(8, 50000, device="cuda")
    assert runs_kernels(rows)
    inside = nucleus(rows, SamplingPolicy(top_p=0.9))
    assert torch.equal(inside.cpu(), nucleus(rows.cpu(), SamplingPolicy(top_p=0.9)))
