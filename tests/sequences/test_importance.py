import math

import numpy as np
import pytest
import torch

from steerlab.core.errors import InputError
from steerlab.sequences import SequenceProcessor, importance_weights
from tests.sequences.helpers import enumerated

MOVE = {"lm_head.weight": torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


def scored(three_tokens, eta, **generation):
    processor = SequenceProcessor(*three_tokens, config={"generation": generation})
    return processor.teacher_force_logprobs(enumerated([0, 1], 3), params_override=processor.params_override(MOVE, eta))


def test_exact_under_enumeration(three_tokens):
    old, new = scored(three_tokens, 0.0), scored(three_tokens, 0.3)
    q = np.exp(old.sequence_logqs)
    found = importance_weights(new, old)
    assert (q * found.weights).sum() == pytest.approx(1)
    np.testing.assert_allclose(q * found.weights, np.exp(new.sequence_logqs))
    assert not found.biased
    assert found.outside_share == 0
    w = found.weights
    assert found.effective_sample_size == pytest.approx(w.sum() ** 2 / (w**2).sum())
    assert found.normalised.sum() == pytest.approx(1)


@pytest.mark.parametrize("policy", [{"temperature": 0.6}, {"top_p": 0.95}, {"temperature": 0.6, "top_p": 0.8}])
def test_unchanged_parameters_weigh_one_and_warn_of_nothing(three_tokens, make_processor, policy):
    processor = make_processor(max_new_tokens=20, **policy)
    drawn, old, _ = processor.generate_with_logprobs(["The ferry", "Nobody knew why"], G=6, seed=0)
    new = processor.teacher_force_logprobs(drawn, tf_batch_size=3, params_override=processor.params_override({}, 0.0))
    np.testing.assert_allclose(importance_weights(new, old).weights, 1, atol=1e-5 * 20)
    same = processor.teacher_force_logprobs(drawn)
    np.testing.assert_array_equal(importance_weights(same, old).weights, 1)


def test_the_raw_model_is_a_named_option(three_tokens):
    old, new = (scored(three_tokens, eta, temperature=0.7) for eta in (0.0, 0.3))
    found = importance_weights(new, old, target="model")
    np.testing.assert_allclose(found.log_weights, np.array(new.sequence_logprobs) - np.array(old.sequence_logqs))
    with pytest.raises(InputError, match="target is 'policy' or 'model'"):
        importance_weights(new, old, target="raw")


def test_truncation_warns_and_is_counted(make_processor):
    processor = make_processor(top_p=0.6, max_new_tokens=20)
    drawn, old, _ = processor.generate_with_logprobs(["The ferry"], G=8, seed=0)
    name = "model.layers.1.mlp.up_proj.weight"
    v = {name: torch.randn(128, 64, generator=torch.Generator().manual_seed(0))}
    new = processor.teacher_force_logprobs(drawn, params_override=processor.params_override(v, 0.3))
    total = sum(length for row in drawn.gen_lens for length in row)
    with pytest.warns(UserWarning, match=rf"biased \(\d+ of {total} tokens lie outside the target's nucleus\)"):
        found = importance_weights(new, old)
    assert found.biased
    share = np.concatenate([x for row in new.outside_nucleus for x in row]).mean()
    assert found.outside_share == pytest.approx(share)
    assert share > 0
    assert (found.weights[np.isneginf(found.log_weights)] == 0).all()


def test_nothing_left(three_tokens):
    old = scored(three_tokens, 0.0)
    from dataclasses import replace

    gone = replace(old, sequence_logqs=[[-math.inf] * len(old.logprobs[0])])
    found = importance_weights(gone, old)
    assert found.effective_sample_size == 0
    assert np.isnan(found.normalised).all()
    with pytest.raises(InputError, match=r"Sequence \(0, 0\) has a token outside the nucleus"):
        importance_weights(old, gone)


def test_other_sequences_or_policies_are_refused(three_tokens, make_processor, sequences):
    old = scored(three_tokens, 0.0)
    with pytest.raises(InputError, match="different sequences"):
        importance_weights(make_processor().teacher_force_logprobs(sequences), old)
    with pytest.raises(InputError, match="use one policy on both sides"):
        importance_weights(scored(three_tokens, 0.0, temperature=0.5), old)
