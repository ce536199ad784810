import numpy as np
import pytest
import torch

from steerlab.sequences._precision import precise
from steerlab.sequences.config import PrecisionConfig
from tests.sequences.test_forcing import flat


@pytest.fixture
def knobs():
    """Global knobs set to something unusual, and put back after the test."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True
    yield lambda: (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def test_set_inside_and_restored_after(knobs):
    with precise(PrecisionConfig()):
        assert knobs() == ("highest", False)
    assert knobs() == ("medium", True)
    with pytest.raises(ZeroDivisionError), precise(PrecisionConfig(allow_tf32=True, matmul_precision="high")):
        1 / (knobs() != ("high", True))
    assert knobs() == ("medium", True)


def test_calls_use_it(make_processor, sequences, knobs):
    processor, seen = make_processor(), []
    handle = processor.parts.layers()[0].register_forward_hook(lambda *_: seen.append(knobs()))
    for with_grad in (False, True):
        processor.teacher_force_logprobs(sequences, with_grad=with_grad)
    processor.generate_batched([[5, 6]], 1, seed=0)
    handle.remove()
    assert set(seen) == {("highest", False)}
    assert knobs() == ("medium", True)


@pytest.mark.parametrize("with_grad", [False, True])
def test_the_callers_autocast_is_kept_out(make_processor, sequences, with_grad):
    processor = make_processor()
    expected = flat(processor.teacher_force_logprobs(sequences, with_grad=with_grad).logprobs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = processor.teacher_force_logprobs(sequences, with_grad=with_grad)
        np.testing.assert_array_equal(flat(found.logprobs), expected)
        drawn = processor.generate_batched([[5, 6]], 2, seed=0)
    np.testing.assert_array_equal(
        flat(processor.generate_batched([[5, 6]], 2, seed=0).sampler_logqs), flat(drawn.sampler_logqs)
    )


@pytest.mark.parametrize(
    ("section", "with_grad"), [("tf_nograd", False), ("tf_withgrad", True), ("func_override", False)]
)
def test_configured_autocast_works(make_processor, sequences, section, with_grad):
    exact = flat(make_processor().teacher_force_logprobs(sequences).logprobs)
    processor = make_processor(precision={section: {"autocast": True, "dtype": "bfloat16"}})
    found = processor.teacher_force_logprobs(sequences, with_grad=with_grad)
    difference = np.abs(flat(found.logprobs) - exact).max()
    assert 1e-3 < difference < 1.0
    if with_grad:
        sum(x.sum() for row in found.logprobs for x in row).backward()
        assert all(p.grad.isfinite().all() for p in processor.parts.root.parameters())
    other = make_processor(precision={section: {"autocast": True, "dtype": "bfloat16"}})
    untouched = flat(other.teacher_force_logprobs(sequences, with_grad=section != "tf_withgrad").logprobs)
    if section != "func_override":
        np.testing.assert_allclose(untouched, exact, atol=1e-5)


def test_entropy_fp64_reaches_everything(make_processor, sequences):
    processor = make_processor(torch.bfloat16, {"entropy_fp64": True}, top_p=0.9)
    results, diagnostics = processor.teacher_force_logprobs_with_diagnostics(
        sequences, with_grad=True, return_baseline_features=True
    )
    tensors = (results.logprobs, results.token_logqs, results.baseline_feats_torch, results.rb_entropies_torch)
    assert {values.dtype for nested in tensors for row in nested for values in row} == {torch.float64}
    arrays = (results.entropies, results.rb_entropies, results.policy_surprisals)
    assert {values.dtype for nested in arrays for row in nested for values in row} == {np.dtype("float64")}
    steps = diagnostics.diagnostics[0][0].steps
    assert {getattr(steps, name).dtype for name in steps.__dataclass_fields__} == {np.dtype("float64")}


def test_cast_logits_changes_the_moment_not_the_result(make_processor, sequences):
    results = [
        flat(
            make_processor(torch.bfloat16, {"tf_withgrad": {"cast_logits_fp32": cast}})
            .teacher_force_logprobs(sequences, with_grad=True)
            .logprobs
        )
        for cast in (True, False)
    ]
    np.testing.assert_array_equal(*results)
