import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steerlab.sequences import SequenceProcessor, importance_weights
from tests.sequences.test_forcing import flat

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processor(smollm2_path):
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    config = {"generation": {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 8}}
    return SequenceProcessor(model, AutoTokenizer.from_pretrained(smollm2_path), config=config)


def test_sampler_and_scorer_agree_on_a_real_model(processor):
    drawn, scored, diagnostics = processor.generate_with_logprobs(num_prompts=4, G=2, seed=0, compute_rb=True)
    np.testing.assert_allclose(flat(scored.token_logqs), flat(drawn.sampler_logqs), atol=2e-4)
    again = processor.teacher_force_logprobs(drawn, tf_batch_size=3)
    np.testing.assert_allclose(importance_weights(again, scored).weights, 1, atol=8e-5)
    frame = diagnostics.to_frame()
    assert frame["mean_head_mass"].between(0.95, 1.0001).all()
    assert frame["mean_support_size"].min() > 1
    assert set(flat(scored.outside_nucleus)) == {False}


def test_the_nucleus_of_real_logits_is_that_of_the_sort(processor):
    from steerlab.measures.nucleus import _edges_by_sort, nucleus_edges, scaled_by

    ids = torch.tensor([processor.tokenizer("The ferry leaves the harbour at seven, and comes back")["input_ids"]])
    with torch.no_grad():
        logits = processor.parts.causal(input_ids=ids).logits[0]
    policy = processor.config.generation.policy
    assert torch.equal(nucleus_edges(logits, policy), _edges_by_sort(scaled_by(logits, policy), policy))


def test_rb_entropy_varies_less_than_surprisal(processor):
    _, scored, _ = processor.generate_with_logprobs(["Once upon a time"], G=16, seed=1, compute_rb=True)
    rb = [values.sum() for values in scored.rb_entropies[0]]
    naive = [values.sum() for values in scored.policy_surprisals[0]]
    assert np.var(rb) < np.var(naive)
    assert abs(np.mean(rb) - np.mean(naive)) < 4 * np.std(naive) / 4
