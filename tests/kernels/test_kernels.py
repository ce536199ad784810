"""The GPU kernels against the eager code: compiled where there is a GPU, else carried out by Triton's interpreter."""

import pytest
import torch

from tests.interpreted import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")

EDGES = """
import itertools

import torch
from steerlab.core.policy import SamplingPolicy
from steerlab._kernels.top_p import top_p_edges_on_gpu
from steerlab.measures.nucleus import _edges_by_sort, up_to_edge

DEVICE = "{device}"
torch.manual_seed(0)
cases = list(itertools.product({widths}, (0.01, 1.0, 5.0, 30.0), {top_ps}))
if DEVICE == "cpu":  # slowly, hence a half in which each value still meets each other one
    cases = [case for k, case in enumerate(cases) if k.bit_count() % 2 == 0]
for width, scale, top_p in cases:
    rows = torch.randn({n_rows}, width, device=DEVICE) * scale
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
cases = list(itertools.product((torch.float16, torch.bfloat16), ((1, 0.9), (0.6, 0.95), (1.7, 0.5)), {widths}))
if DEVICE == "cpu":
    cases = [case for k, case in enumerate(cases) if k.bit_count() % 2 == 0]
for dtype, (temperature, top_p), width in cases:
    rows = (torch.randn({n_rows}, width, device=DEVICE) * 3).to(dtype)
    rows[0] *= 0.01
    rows[1, 1:] = -torch.inf
    policy = SamplingPolicy(top_p=top_p, temperature=temperature)
    found = top_p_edges_on_gpu(rows, top_p, temperature)
    scaled = rows.float() / temperature
    sizes = [up_to_edge(scaled, edges).sum(-1) for edges in (found, _edges_by_sort(scaled, policy))]
    allowed = 0 if DEVICE == "cpu" else 1 + width // 2000
    assert ((sizes[0] - sizes[1]).abs() <= allowed).all(), (dtype, width, temperature, top_p, sizes)
zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0, -9.0]], device=DEVICE)
assert top_p_edges_on_gpu(zeros, 0.6).tolist() == [2]
assert top_p_edges_on_gpu(zeros, 0.2).tolist() == [0]
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
"""


HEADS = """
import torch
import steerlab.sequences._fused_head as fused_head
from steerlab.core.policy import SamplingPolicy
from steerlab._runtime.model_parts import LogitTransform
from steerlab.sequences._head import HeadSpec, measure_head

DEVICE, DTYPE = "{device}", torch.{dtype}
torch.manual_seed(0)
N_ROWS, WIDTH, (ROW_TOLERANCE, GRADIENT_TOLERANCE) = {n_rows}, {width}, {tolerances}
fused_head.BUFFER_BYTES = 4 * WIDTH * DTYPE.itemsize  # so that chunks of rows and blocks of columns are several


def measured(spec, arguments, tokens, by, with_kernels):
    fused_head.runs_kernels = lambda rows: with_kernels
    found = measure_head(spec, *arguments, tokens)
    log_qs = found.log_qs.masked_fill(found.log_qs.isinf(), 0.0)
    loss = (found.log_probs * by[0] + log_qs * by[1] + found.entropies * by[2]).sum()
    wanted = [a for a in arguments if a is not None]
    return (found.log_probs, found.log_qs, found.entropies), torch.autograd.grad(loss, wanted)


transforms = (LogitTransform(), LogitTransform(multiplier=2.0, softcap=8.0), LogitTransform(divisor=3.0))
policies = ((1, 1, 0), (0.7, 1, 0), (0.7, 0.9, 0), (1, 0.5, 0), (2, 0.8, 7), (0, 1, 0))
cases = [(transforms[0], policy, rows) for policy in policies for rows in (2, 100)]
cases += [(transform, policy, 100) for transform in transforms[1:] for policy in policies[1:3]]
if DEVICE == "cpu":  # slowly, hence a half in which each value is, and a bias with both numbers of rows
    cases = [case for k, case in enumerate(cases) if k.bit_count() % 2 == 1]
for transform, (temperature, top_p, top_k), backward_rows in cases:
    fused_head.BACKWARD_ROWS = backward_rows
    spec = HeadSpec(transform, SamplingPolicy(temperature=temperature, top_p=top_p, top_k=top_k))
    hidden = torch.randn(N_ROWS, 16, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(WIDTH, 16, device=DEVICE, dtype=DTYPE, requires_grad=True)
    bias = torch.randn(WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True) if temperature == 0.7 else None
    tokens = (hidden @ weight.T).argmax(-1)
    tokens[::3] = torch.randint(0, WIDTH, tokens[::3].shape, device=DEVICE)
    by = torch.randn(3, N_ROWS, device=DEVICE)
    plain, fused = (measured(spec, (hidden, weight, bias), tokens, by, k) for k in (False, True))
    for a, b in zip(plain[0], fused[0]):
        torch.testing.assert_close(b, a, rtol=ROW_TOLERANCE, atol=ROW_TOLERANCE)
    for a, b in zip(plain[1], fused[1]):
        torch.testing.assert_close(b, a, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)
"""


STATES = """
import torch
import steerlab as sl
import steerlab.sequences._fused_head as fused_head
from steerlab.sequences import BatchedSequences, GenerationConfig, SequenceProcessor
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "{device}"
if DEVICE == "cpu":
    fused_head.runs_kernels = lambda rows: True
sizes = {{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}}
model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).eval().to(DEVICE)
processor = SequenceProcessor(model)
sequences = BatchedSequences.from_ids([[5, 6], [7, 8]], [[[9, 10, 11]], [[12, 13, 14]]])
processor.teacher_force_logprobs(sequences, tf_batch_size=2)
with torch.no_grad():
    model.get_input_embeddings().weight[13] = torch.nan
for top_p in (1.0, 0.9):
    processor.config = GenerationConfig(top_p=top_p)
    for with_grad in (False, True):
        try:
            processor.teacher_force_logprobs(sequences, with_grad, tf_batch_size=2)
        except sl.NonFiniteError as error:
            assert "The final states of prompt 1, response 0, are not finite" in str(error), error
        else:
            raise AssertionError("scores of states that are not finite")
"""


@pytest.mark.parametrize(
    "program",
    [
        EDGES.format(device="cpu", widths=(5, 1500), top_ps=(0.3, 0.999), n_rows=3),
        STEPS.format(device="cpu", widths=(300, 2500)),
        HEADS.format(device="cpu", dtype="float32", n_rows=6, width=200, tolerances=(2e-5, 2e-5)),
        STATES.format(device="cpu"),
    ],
    ids=["edges", "steps", "heads", "states"],
)
def test_kernels_equal_the_eager_code(program: str):
    """Edges those of the full sort; steps and the fused head with their gradients; refusals of states not finite."""
    run_interpreted(program)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("code", [EDGES, STEPS, STATES])
def test_compiled_kernels_agree_with_the_eager_code(code):
    values = {"widths": (5, 3000, 128256), "top_ps": (0.05, 0.5, 0.8, 0.95, 0.999), "n_rows": 8}
    exec(compile(code.format(device="cuda", **values), "kernels", "exec"), {})


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerances"), [("float32", (1e-4, 1e-4)), ("bfloat16", (1e-3, 6e-2))])
def test_the_compiled_head_agrees_with_the_eager_one(dtype, tolerances):
    code = HEADS.format(device="cuda", dtype=dtype, n_rows=13, width=3000, tolerances=tolerances)
    exec(compile(code, "kernels", "exec"), {})


@pytest.mark.gpu
@needs_gpu
def test_the_nucleus_uses_the_kernels_on_a_gpu():
    from steerlab._kernels.availability import runs_kernels
    from steerlab.core.policy import SamplingPolicy
    from steerlab.measures.nucleus import nucleus

    rows = torch.randn(8, 50000, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    assert runs_kernels(rows)
    found, wanted = (nucleus(x, SamplingPolicy(top_p=0.9)).cpu() for x in (rows, rows.cpu()))
    # the sort's running float32 sum may be off by as much as a few of the least tokens weigh
    assert (found != wanted).sum(-1).max() <= 1 + 50000 // 2000
