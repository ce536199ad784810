import math

import numpy as np
import pytest
import torch

from steerlab.core.errors import InputError
from steerlab.measures.intervals import Interval
from steerlab.sequences import SequenceProcessor, entropy_gradient, entropy_probe, moved_parameters
from steerlab.sequences.entropy_probe import _Along, _before, _estimate, _in_float64, derivative_terms
from tests.sequences.helpers import enumerated

NAME = "transformer.h.1.mlp.c_fc.weight"
LENGTH = 4


@pytest.fixture
def exact(three_tokens):
    """A processor of the model of three tokens, all its responses to one prompt, and a direction."""
    model, tokenizer = three_tokens
    processor = SequenceProcessor(
        model, tokenizer, config={"generation": {"max_new_tokens": LENGTH, "temperature": 0.8}}
    )
    generator = torch.Generator().manual_seed(3)
    v = {NAME: torch.randn(model.get_parameter(NAME).shape, generator=generator, dtype=torch.float64)}
    return processor, enumerated([0, 1], LENGTH), v


def exact_entropy(processor, sequences, v, eta):
    """Entropy at θ + η·v by summing over all responses, as minus the mean of their log-probability."""
    scored = processor.teacher_force_logprobs(sequences, params_override=processor.params_override(v, eta))
    log_q = np.array(scored.sequence_logqs)
    assert np.exp(log_q).sum() == pytest.approx(1)
    return float(-(np.exp(log_q) * log_q).sum())


def test_slope_and_curvature_equal_those_of_the_enumerated_entropy(exact):
    processor, sequences, v = exact
    with _in_float64(processor):
        h = 2e-4
        down, here, up = (exact_entropy(processor, sequences, v, eta) for eta in (-h, 0.0, h))
        along = _Along(processor, sequences, v, None, None)
        terms = derivative_terms(along, centred=False)
        q = np.exp(along.at_zero.log_qs.sum(axis=-1))
    assert (q * along.at_zero.sums()).sum() == pytest.approx(here, rel=1e-9)
    assert (q * terms.slope).sum() == pytest.approx((up - down) / (2 * h), rel=1e-4)
    assert (q * terms.curvature).sum() == pytest.approx((up - 2 * here + down) / h**2, rel=1e-3)
    assert abs((q * terms.curvature).sum()) > 1e-3


def test_weights_give_the_entropy_at_the_other_end_exactly(exact):
    processor, sequences, v = exact
    with _in_float64(processor):
        along = _Along(processor, sequences, v, None, None)
        q = np.exp(along.at_zero.log_qs.sum(axis=-1))
        for eta in (0.0, 0.3):
            change, size = along.weighted(eta)
            wanted = exact_entropy(processor, sequences, v, eta) - exact_entropy(processor, sequences, v, 0.0)
            # what is subtracted per step has weights of mean 1 under q, but here q is no sample: without it
            steps = along.at(eta)
            bare = np.exp(_before(steps.log_qs - along.at_zero.log_qs)) * steps.entropies
            assert (q * (bare.sum(-1) - along.at_zero.sums())).sum() == pytest.approx(wanted, abs=1e-9)
            assert change.shape == q.shape
            assert 0 < size <= q.size + 1e-9


def test_samples_agree_with_the_truth(exact):
    processor, sequences, v = exact
    etas = [-0.4, 0.05, 0.4]
    probe = entropy_probe(processor, [[0, 1]], v, etas, G=600, seed=1, tf_batch_size=600, gen_batch_size=600)
    with _in_float64(processor):
        at_zero = exact_entropy(processor, sequences, v, 0.0)
        truth = [exact_entropy(processor, sequences, v, eta) - at_zero for eta in etas]
        h = 2e-4
        ends = [exact_entropy(processor, sequences, v, eta) for eta in (-h, h)]
    within(probe.entropy, at_zero)
    within(probe.slope, (ends[1] - ends[0]) / (2 * h))
    within(probe.curvature, (sum(ends) - 2 * at_zero) / h**2)
    for estimates in (probe.weighted, probe.fresh):
        for estimate, wanted in zip(estimates, truth, strict=True):
            within(estimate, wanted)
    assert probe.second_order[1] == pytest.approx(truth[1], rel=0.2, abs=2e-3)
    # the seeds are those of the draws at θ, so that a change is known better than either entropy
    assert width(probe.fresh[1]) < width(probe.entropy)
    frame = probe.to_frame()
    assert list(frame.columns)[:3] == ["eta", "first_order", "second_order"]
    assert (frame.weighted_low < frame.weighted).all()
    assert (frame.effective_sample_size <= 600).all()


def within(estimate, truth):
    """An estimate is within three of its 95 % interval's half widths."""
    half = width(estimate) / 2
    assert abs(estimate.value - truth) < 3 * half, (estimate, truth)


def width(estimate):
    return estimate.interval.high - estimate.interval.low


def test_the_slope_is_the_gradient_along_the_direction(exact):
    processor, _, v = exact
    drawn = processor.generate_batched([[0, 1]], 64, seed=5)
    gradient = entropy_gradient(processor, drawn, names=[NAME], baseline=False)
    with _in_float64(processor):
        terms = derivative_terms(_Along(processor, drawn, v, None, None), centred=False)
    assert terms.slope.mean() == pytest.approx(gradient.along(v), rel=1e-5)


def test_what_is_left_out_after_the_end_counts(exact):
    processor, _, v = exact
    drawn = processor.generate_batched([[0, 1]], 400, seed=2)
    assert len({n for row in drawn.gen_lens for n in row}) > 1
    with _in_float64(processor):
        along = _Along(processor, drawn, v, None, None)
        plain, centred = (derivative_terms(along, centred=flag) for flag in (False, True))
    difference = _estimate(plain.slope - centred.slope, 0.95)
    assert abs(difference.value) < 3 * width(difference) / 2
    assert centred.slope.std() < plain.slope.std()


def test_parameters_are_as_before(exact):
    processor, _, v = exact
    model = processor.parts.root
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = processor.config
    inside = []

    def fail():
        with moved_parameters(processor, v, 0.5):
            inside.append(model.get_parameter(NAME).detach().clone())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    torch.testing.assert_close(inside[0], before[NAME] + 0.5 * v[NAME])
    entropy_probe(processor, [[0, 1]], v, [0.1], G=4)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert processor.config == config


@pytest.mark.parametrize(
    "precision",
    [
        {"tf_nograd": {"autocast": True, "dtype": "bfloat16"}},
        {"func_override": {"autocast": True, "dtype": "bfloat16"}},
        {"func_override": {"cast_params": False}, "tf_nograd": {"cast_logits_fp32": False}},
    ],
    ids=str,
)
def test_the_precision_of_scores_is_not_that_of_the_probe(exact, precision):
    processor, _, v = exact
    wanted = entropy_probe(processor, [[0, 1]], v, [0.0, 0.05], G=8, seed=0)
    processor.config = processor.config.changed(precision=precision)
    found = entropy_probe(processor, [[0, 1]], v, [0.0, 0.05], G=8, seed=0)
    np.testing.assert_array_equal(found.to_frame(), wanted.to_frame())
    assert found.slope == wanted.slope
    assert found.fresh[0].value == 0.0


def test_fresh_responses_of_a_narrow_model_are_measured_as_those_at_the_start(make_processor):
    processor = make_processor(torch.bfloat16, precision={"func_override": {"cast_params": False}}, max_new_tokens=4)
    name = "model.layers.1.mlp.up_proj.weight"
    v = {name: torch.ones(processor.parts.root.get_parameter(name).shape)}
    found = entropy_probe(processor, ["The ferry leaves"], v, [0.0], G=2, seed=0)
    assert found.fresh[0].value == 0.0


def test_without_a_seed_the_draws_at_both_ends_are_alike(exact):
    processor, _, v = exact
    assert entropy_probe(processor, [[0, 1]], v, [0.0], G=4, seed=None).fresh[0].interval == Interval(0.0, 0.0, 0.95)


def test_an_interval_is_of_the_spread_within_prompts():
    values = np.array([[0.0, 2.0], [100.0, 102.0]])
    found = _estimate(values, 0.95)
    assert found.value == 51
    assert found.interval.high - found.value == pytest.approx(4.3027 * math.sqrt(2 * 2 / 2) / 2, rel=1e-4)
    assert math.isnan(_estimate(np.array([[1.0]]), 0.95).interval.low)
    assert not math.isnan(_estimate(np.array([[1.0], [2.0]]), 0.95).interval.low)


def test_what_is_refused(exact):
    processor, _, v = exact
    with pytest.raises(InputError, match=r"has norm 0\.0"):
        entropy_probe(processor, [[0, 1]], {NAME: 0 * v[NAME]}, [0.1], G=2)
    with pytest.raises(InputError, match="etas holds finite steps"):
        entropy_probe(processor, [[0, 1]], v, [math.nan], G=2)
    processor.config = {"generation": {"top_p": 0.9}}
    with pytest.raises(InputError, match="keeps every token"):
        entropy_probe(processor, [[0, 1]], v, [0.1], G=2)
