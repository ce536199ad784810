import math

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.sequences import BatchedSequences, entropy_gradient
from steerlab.sequences.entropy_gradient import _baselines, _later_sums

# Exactness against enumeration is in test_enumeration.py.
PROMPTS = ["The ferry leaves", "Two plus two equals four, and ten"]
NAME = "model.layers.2.mlp.up_proj.weight"


def test_later_sums():
    np.testing.assert_array_equal(_later_sums(np.array([1.0, 2.0, 4.0], dtype=np.float32)), [6, 4, 0])


def test_batch_size_changes_nothing(make_processor):
    processor = make_processor(torch.float64, max_new_tokens=8)
    drawn = processor.generate_batched(PROMPTS, 3, seed=0)
    one, all_at_once = (entropy_gradient(processor, drawn, names=[NAME], tf_batch_size=size) for size in (1, 6))
    torch.testing.assert_close(one.gradient[NAME], all_at_once.gradient[NAME], atol=1e-6, rtol=1e-5)
    assert list(one.gradient) == [NAME]
    assert one.entropy == pytest.approx(all_at_once.entropy)
    assert one.num_sequences == 6
    assert one.entropy_std_error > 0


def test_the_estimate_of_entropy_is_the_mean_of_rb_sums(make_processor):
    processor = make_processor(top_p=0.9, max_new_tokens=8)
    drawn, logprobs, _ = processor.generate_with_logprobs(PROMPTS, G=3, seed=0, compute_rb=True)
    sums = [values.sum() for row in logprobs.rb_entropies for values in row]
    found = entropy_gradient(processor, drawn, names=[NAME])
    assert found.entropy == pytest.approx(np.mean(sums), rel=1e-5)
    assert found.entropy_std_error == pytest.approx(np.std(sums, ddof=1) / math.sqrt(6), rel=1e-4)


def test_a_plan_takes_part(make_processor):
    processor = make_processor(max_new_tokens=6)
    vector = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(0)), layer=1)
    plan = sl.Plan(sl.add(vector, coef=2.0))
    drawn = processor.generate_batched(PROMPTS, 2, seed=0, plan=plan)
    steered = entropy_gradient(processor, drawn, names=[NAME], plan=plan)
    listed = entropy_gradient(processor, drawn, names=[NAME], plan=[plan, plan], tf_batch_size=3)
    torch.testing.assert_close(listed.gradient[NAME], steered.gradient[NAME], atol=1e-3, rtol=1e-3)
    plain = entropy_gradient(processor, drawn, names=[NAME])
    assert (plain.gradient[NAME] - steered.gradient[NAME]).abs().max() > 1e-2


def test_the_baseline_predicts_what_it_was_not_fitted_to(make_processor):
    processor = make_processor(max_new_tokens=12)
    drawn = processor.generate_batched(PROMPTS, 8, seed=0)
    found = entropy_gradient(processor, drawn, names=[NAME])
    assert found.baseline_r2 > 0.8  # the later a step, the less is to come
    scored = processor.teacher_force_logprobs(drawn, compute_rb=True, return_baseline_features=True)
    later = {(b, g): _later_sums(scored.rb_entropies[b][g]) for b in range(2) for g in range(8)}
    before, _ = _baselines(scored, later)
    changed = {place: values * (100.0 if place == (0, 0) else 1.0) for place, values in later.items()}
    after, _ = _baselines(scored, changed)
    np.testing.assert_array_equal(before[0, 0], after[0, 0])  # its own future is not in its baseline
    assert np.abs(before[0, 1] - after[0, 1]).max() > 0.1


def test_what_is_refused(make_processor, sequences):
    processor = make_processor(top_p=0.3)
    with pytest.raises(InputError, match="lies outside the nucleus"):
        entropy_gradient(processor, sequences)
    drawn = BatchedSequences.from_ids([[5]], [[[6]]])
    processor = make_processor()
    with pytest.raises(InputError, match="no parameter 'x'"):
        entropy_gradient(processor, drawn, names=["x"])
    with pytest.raises(InputError, match="one finite number per sequence, 1"):
        entropy_gradient(processor, drawn, weights=[1.0, 2.0])
    found = entropy_gradient(processor, drawn, names=[NAME])
    with pytest.raises(InputError, match="The gradient has no 'lm_head\\.weight'"):
        found.along({"lm_head.weight": torch.zeros(1)})
    processor.parts.root.requires_grad_(False)
    with pytest.raises(InputError, match="requires_grad is off"):
        entropy_gradient(processor, drawn)


def test_one_sequence_has_no_standard_error(make_processor):
    found = entropy_gradient(make_processor(), BatchedSequences.from_ids([[5]], [[[6, 7]]]), names=[NAME])
    assert math.isnan(found.entropy_std_error)
    assert found.gradient[NAME].isfinite().all()


def test_inside_no_grad(make_processor):
    processor = make_processor(max_new_tokens=4)
    drawn = processor.generate_batched(PROMPTS, 2, seed=0)
    expected = entropy_gradient(processor, drawn, names=[NAME])
    with torch.no_grad():
        found = entropy_gradient(processor, drawn, names=[NAME])
    assert torch.equal(found.gradient[NAME], expected.gradient[NAME])
    assert not found.gradient[NAME].requires_grad
