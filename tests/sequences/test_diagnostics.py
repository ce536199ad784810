import math

import numpy as np
import pytest
import torch

from steerlab.core.errors import InputError
from steerlab.sequences import DistributionDiagnostics, SequenceDiagnostics, TokenStepDiagnostics
from steerlab.sequences.diagnostics import COLUMNS
from tests.sequences.helpers import entropy_of, reference_q, step_logits


def steps(**columns):
    length = len(next(iter(columns.values())))
    return TokenStepDiagnostics(**{name: np.asarray(columns.get(name, np.ones(length)), float) for name in COLUMNS})


def test_from_logits_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]]).log()
    pack = DistributionDiagnostics(top_p=0.7, temperature=1.0, eos_token_id=1).compute_from_logits(
        logits, torch.tensor([0, 3])
    )
    assert pack.steps.support_size.tolist() == [2, 3]
    np.testing.assert_allclose(pack.steps.head_mass, [0.8, 0.75], atol=1e-6)
    np.testing.assert_allclose(pack.steps.eos_prob, [0.375, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(pack.steps.margin, [math.log(5 / 3), 0], atol=1e-6)
    np.testing.assert_allclose(pack.steps.surprisal, [-math.log(0.5), -math.log(0.25)], atol=1e-6)
    np.testing.assert_allclose(pack.steps.policy_surprisal, [-math.log(0.625), np.inf], atol=1e-6)
    np.testing.assert_allclose(pack.steps.effective_support, np.exp(pack.steps.rb_entropy), rtol=1e-6)
    assert pack.sequence.rb_entropy_sum == pytest.approx(entropy_of([0.625, 0.375]) + math.log(3), abs=1e-6)
    assert pack.sequence.policy_surprisal_mean == math.inf
    assert math.isnan(pack.sequence.policy_surprisal_std)


def test_equals_the_processors(make_processor, sequences):
    processor = make_processor(temperature=0.7, top_p=0.9)
    _, found = processor.teacher_force_logprobs_with_diagnostics(sequences)
    response = sequences.response_ids(0, 2)
    logits = step_logits(processor.parts.causal, sequences.prompt_ids(0), response)
    eos = processor.tokenizer.eos_token_id
    pack = DistributionDiagnostics(0.9, 0.7, eos).compute_from_logits(logits, torch.tensor(response))
    for name in COLUMNS:
        np.testing.assert_allclose(
            getattr(found.diagnostics[0][2].steps, name), getattr(pack.steps, name), atol=1e-4, rtol=1e-4
        )
    q = reference_q(logits[3].double().numpy(), 0.7, 0.9)
    assert pack.steps.eos_prob[3] == pytest.approx(q[eos], abs=1e-6)


def test_long_responses_in_parts():
    logits = torch.randn(150, 20, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 20, (150,), generator=torch.Generator().manual_seed(1))
    whole = DistributionDiagnostics(top_p=0.9).compute_from_logits(logits, tokens).steps
    part = DistributionDiagnostics(top_p=0.9).compute_from_logits(logits[100:], tokens[100:]).steps
    for name in COLUMNS:
        np.testing.assert_allclose(getattr(whole, name)[100:], getattr(part, name), rtol=1e-5)


def test_summaries():
    entropy = np.arange(20.0)
    found = SequenceDiagnostics.of(steps(rb_entropy=entropy, surprisal=entropy * 2, policy_surprisal=entropy + 1))
    assert (found.num_tokens, found.rb_entropy_sum, found.rb_entropy_mean) == (20, 190, 9.5)
    assert (found.rb_entropy_min, found.rb_entropy_max) == (0, 19)
    assert (found.early_rb_entropy_mean, found.late_rb_entropy_mean) == (7.5, 17.5)  # 16 steps, then 4
    assert found.surprisal_mean == 19
    assert found.surprisal_std == pytest.approx(np.std(entropy * 2))
    assert found.surprisal_quantiles[0.5] == 19
    assert found.policy_surprisal_quantiles[0.95] == pytest.approx(np.quantile(entropy + 1, 0.95))
    assert found.means["margin"] == 1


def test_windows():
    short = SequenceDiagnostics.of(steps(rb_entropy=[1.0, 2.0]))
    assert short.early_rb_entropy_mean == 1.5
    assert math.isnan(short.late_rb_entropy_mean)
    assert SequenceDiagnostics.of(steps(rb_entropy=[1.0, 2.0]), early_steps=1).late_rb_entropy_mean == 2


def test_a_processors_early_window_can_be_set(make_processor, sequences):
    processor = make_processor()
    processor.early_steps = 3
    _, found = processor.teacher_force_logprobs_with_diagnostics(sequences)
    pack = found.diagnostics[0][0]
    assert pack.sequence.early_rb_entropy_mean == pytest.approx(pack.steps.rb_entropy[:3].mean())
    assert pack.sequence.late_rb_entropy_mean == pytest.approx(pack.steps.rb_entropy[3:].mean())


def test_frames(make_processor, sequences):
    _, found = make_processor().teacher_force_logprobs_with_diagnostics(sequences)
    frame = found.to_frame()
    assert len(frame) == 6
    assert {"prompt_index", "sample_index", "num_tokens", "surprisal_q95", "mean_head_mass"} <= set(frame.columns)
    assert frame.set_index(["prompt_index", "sample_index"]).loc[(1, 1)].isna().sum() > 10  # the empty response
    per_step = found.steps_frame()
    assert len(per_step) == sum(map(sum, sequences.gen_lens))
    assert list(per_step.columns) == ["prompt_index", "sample_index", "step", *COLUMNS]


def test_shapes_are_checked():
    with pytest.raises(InputError, match=r"gen_logits is \[T, V\]"):
        DistributionDiagnostics().compute_from_logits(torch.zeros(3, 5), torch.zeros(2, dtype=torch.long))


def test_tokens_outside_the_logits_are_refused():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="Token 7 is not among the 5"):
        DistributionDiagnostics().compute_from_logits(logits, torch.tensor([1, 7]))
    with pytest.raises(InputError, match="Token -100"):
        DistributionDiagnostics().compute_from_logits(logits, torch.tensor([1, -100]))
    with pytest.raises(InputError, match="Token 9"):
        DistributionDiagnostics(eos_token_id=9).compute_from_logits(logits, torch.tensor([1, 2]))
    found = DistributionDiagnostics(eos_token_id=np.int64(1)).compute_from_logits(logits, torch.tensor([1, 2]))
    np.testing.assert_allclose(found.steps.eos_prob, logits.softmax(-1)[:, 1], rtol=1e-5)
