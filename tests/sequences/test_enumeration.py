import math

import numpy as np
import pytest
import torch

from steerlab.sequences import SequenceProcessor, check_entropy_gradient, entropy_along, entropy_gradient
from tests.sequences.helpers import all_responses, entropy_of, enumerated, reference_q, step_logits

PROMPT, LENGTH = [0, 1, 1], 4
POLICIES = [{}, {"temperature": 0.6}, {"temperature": 1.3, "top_p": 0.75}]


def exact(model, temperature=1.0, top_p=1.0):
    """Probability and Σ of step entropies of every response, by walking the tree; independent of the package."""
    rows = []
    for response in all_responses(LENGTH):
        qs = [reference_q(row.numpy(), temperature, top_p) for row in step_logits(model, PROMPT, response).double()]
        probability = math.prod(q[token] for q, token in zip(qs, response, strict=True))
        rows.append((probability, sum(map(entropy_of, qs))))
    return np.array(rows).T


@pytest.mark.parametrize("policy", POLICIES)
def test_rb_and_naive_entropy_have_the_exact_mean_and_rb_the_smaller_variance(three_tokens, policy):
    model, tokenizer = three_tokens
    probability, _ = exact(model, **policy)
    assert probability.sum() == pytest.approx(1)
    possible = probability > 0
    entropy = -(probability[possible] * np.log(probability[possible])).sum()  # of the sequence as one variable
    processor = SequenceProcessor(model, tokenizer, config={"generation": {**policy, "max_new_tokens": LENGTH}})
    results = processor.teacher_force_logprobs(enumerated(PROMPT, LENGTH), compute_rb=True)
    q = np.exp(results.sequence_logqs[0])
    np.testing.assert_allclose(q, probability, atol=1e-12)
    rb = np.array([values.sum() for values in results.rb_entropies[0]])
    naive = np.array([values.sum() for values in results.policy_surprisals[0]])
    assert (q * rb).sum() == pytest.approx(entropy, abs=1e-10)
    assert (q[possible] * naive[possible]).sum() == pytest.approx(entropy, abs=1e-10)
    variances = [(q[possible] * (values[possible] - entropy) ** 2).sum() for values in (rb, naive)]
    assert variances[0] < 0.5 * variances[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_follow_the_exact_distribution(three_tokens, policy):
    model, tokenizer = three_tokens
    probability, _ = exact(model, **policy)
    processor = SequenceProcessor(model, tokenizer, config={"generation": {**policy, "max_new_tokens": LENGTH}})
    drawn = processor.generate_batched([PROMPT], 3000, gen_batch_size=3000, seed=0)
    places = {ids: k for k, ids in enumerate(all_responses(LENGTH))}
    counts = np.zeros(len(places))
    for g in range(3000):
        counts[places[tuple(drawn.response_ids(0, g))]] += 1
    assert set(counts[probability == 0]) <= {0}
    spread = np.sqrt(3000 * probability * (1 - probability))
    assert (np.abs(counts - 3000 * probability) <= 4.5 * spread + 1e-9).all()
    assert {reason for row in drawn.finish_reasons for reason in row} == {"eos", "length"}


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1]])
def test_the_entropy_gradient_is_exact(three_tokens, policy):
    model, tokenizer = three_tokens
    processor = SequenceProcessor(model, tokenizer, config={"generation": {**policy, "max_new_tokens": LENGTH}})
    sequences = enumerated(PROMPT, LENGTH)
    probability, totals = exact(model, **policy)
    found = entropy_gradient(processor, sequences, baseline=False, weights=probability)
    assert found.entropy == pytest.approx(probability @ totals)
    generator = torch.Generator().manual_seed(1)
    v = {name: torch.randn(p.shape, generator=generator).double() for name, p in model.named_parameters()}
    eta, ends = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += sign * eta * v[name]
            ends.append(np.prod(exact(model, **policy), axis=0).sum())
            for name, parameter in model.named_parameters():
                parameter -= sign * eta * v[name]
    assert found.along(v) == pytest.approx((ends[0] - ends[1]) / (2 * eta), rel=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_entropy_along_a_direction_is_exact(three_tokens):
    model, tokenizer = three_tokens
    processor = SequenceProcessor(model, tokenizer, config={"generation": {"max_new_tokens": LENGTH}})
    sequences = enumerated(PROMPT, LENGTH)
    v = {"lm_head.weight": torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    here, _ = exact(model)
    along = entropy_along(processor, sequences, v, [0.0, 0.4])
    with torch.no_grad():
        model.lm_head.weight += 0.4 * v["lm_head.weight"]
    there, totals = exact(model)
    # the mean of weighted terms over draws from q equals the sum of q·w·ΣH over all sequences
    assert along.per_sequence[1] @ here == pytest.approx(there @ totals, abs=1e-10)
    assert along.effective_sample_sizes[0] == pytest.approx(len(here))


def test_sampled_gradient_agrees_with_exact_and_with_finite_differences(three_tokens):
    model, tokenizer = three_tokens
    processor = SequenceProcessor(model, tokenizer, config={"generation": {"max_new_tokens": LENGTH}})
    v = {"lm_head.weight": torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))}
    probability, _ = exact(model)
    truth = entropy_gradient(processor, enumerated(PROMPT, LENGTH), baseline=False, weights=probability).along(v)
    drawn = processor.generate_batched([PROMPT], 1500, gen_batch_size=1500, seed=1)
    with_baseline = entropy_gradient(processor, drawn, tf_batch_size=500)
    without = entropy_gradient(processor, drawn, baseline=False, tf_batch_size=500)
    assert with_baseline.baseline_r2 > 0.05
    check = check_entropy_gradient(processor, drawn, with_baseline, v, 1e-3)
    tolerance = 4 * check.measured_std_error
    assert 0 < tolerance < 0.5 * abs(truth)
    assert check.measured == pytest.approx(truth, abs=tolerance)
    assert with_baseline.along(v) == pytest.approx(truth, abs=tolerance)
    assert without.along(v) == pytest.approx(truth, abs=tolerance)
    assert check.predicted == with_baseline.along(v)
    assert check.effective_sample_size == pytest.approx(1500, rel=1e-3)


def test_enumerated_sequences_get_no_baseline_by_default(three_tokens):
    # sequences that share a prefix fall into both halves, so a fitted baseline would depend on the token drawn
    model, tokenizer = three_tokens
    processor = SequenceProcessor(model, tokenizer, config={"generation": {"max_new_tokens": LENGTH}})
    sequences, (probability, _) = enumerated(PROMPT, LENGTH), exact(model)
    name = "lm_head.weight"
    plain, without, fitted = (
        entropy_gradient(processor, sequences, names=[name], weights=probability, **options)
        for options in ({}, {"baseline": False}, {"baseline": True})
    )
    torch.testing.assert_close(plain.gradient[name], without.gradient[name])
    assert math.isnan(plain.baseline_r2)
    assert (fitted.gradient[name] - without.gradient[name]).abs().max() > 1e-2
