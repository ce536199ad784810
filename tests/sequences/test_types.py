from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from steerlab.core.errors import InputError
from steerlab.measures.entropy import rb_entropy
from steerlab.sequences import BatchedSequences


def test_from_ids_and_back():
    made = BatchedSequences.from_ids([[5, 6], [7]], [[[1], []], [[2, 3], [4]]], pad_id=9)
    assert made.sequences.tolist() == [[[5, 6, 1, 9], [5, 6, 9, 9]], [[9, 7, 2, 3], [9, 7, 4, 9]]]
    assert made.attention_masks.tolist() == [[[1, 1, 1, 0], [1, 1, 0, 0]], [[0, 1, 1, 1], [0, 1, 1, 0]]]
    assert (made.prompt_lens, made.gen_lens) == ([2, 2], [[1, 0], [2, 1]])
    assert (made.n_prompts, made.n_samples) == (2, 2)
    assert [made.prompt_ids(b) for b in range(2)] == [[5, 6], [7]]
    assert [[made.response_ids(b, g) for g in range(2)] for b in range(2)] == [[[1], []], [[2, 3], [4]]]


def test_select():
    made = BatchedSequences.from_ids(
        [[5, 6], [7]], [[[1], []], [[2, 3], [4]]], responses_text=[["a", ""], ["bc", "d"]], prompts=["p", "q"]
    )
    chosen = made.select([(1, 0), (0, 0)])
    assert chosen.sequences.tolist() == [[[0, 7, 2, 3]], [[5, 6, 1, 0]]]
    assert chosen.responses_text == [["bc"], ["a"]]
    assert chosen.prompts == ["q", "p"]
    assert chosen.finish_reasons is None
    assert made.select([(-1, 0)]).prompts == ["q"]
    with pytest.raises(InputError, match=r"of 2 prompts with 2 samples; got \(1, 2\)"):
        made.select([(0, 0), (1, 2)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_masks": torch.ones(1, 1, 3)}, "have one shape"),
        ({"prompt_lens": [2, 2]}, "prompt_lens holds one entry per prompt, 1, got 2"),
        ({"gen_lens": [[2, 2]]}, "gen_lens holds 1 lengths per prompt"),
        ({"gen_lens": [[1]]}, r"1 from the prompt's first token to the last of its 1 generated tokens \(column 2\)"),
        ({"gen_lens": [[3]]}, "and 0 elsewhere"),
        ({"attention_masks": torch.tensor([[[1, 0, 1, 1]]])}, "it is 1 at 3 of 4 columns"),
        ({"attention_masks": torch.tensor([[[0, 0, 1, 1]]])}, "has no prompt token"),
    ],
)
def test_contradictions_are_refused(change, message):
    values = {
        "sequences": torch.tensor([[[5, 6, 1, 2]]]),
        "prompt_lens": [2],
        "gen_lens": [[2]],
        "attention_masks": torch.ones(1, 1, 4, dtype=torch.long),
        "responses_text": [["x"]],
    }
    BatchedSequences(**values)
    with pytest.raises(InputError, match=message):
        BatchedSequences(**values | change)


@pytest.mark.parametrize("rows", [([], []), ([[1]], []), ([[]], [[[1]]]), ([[1], [2]], [[[1]], [[1], [2]]])])
def test_from_ids_refuses(rows):
    with pytest.raises(InputError, match="from_ids takes at least one non-empty prompt"):
        BatchedSequences.from_ids(*rows)


def test_frame_of_tokens(make_processor, sequences):
    results = make_processor(top_p=0.9).teacher_force_logprobs(sequences, compute_rb=True)
    frame = results.to_frame()
    assert list(frame.columns) == [
        "prompt_index",
        "sample_index",
        "step",
        "log_prob",
        "surprisal",
        "log_q",
        "rb_entropy",
    ]
    rows = frame[(frame.prompt_index == 0) & (frame.sample_index == 2)]
    np.testing.assert_array_equal(rows.log_q, results.token_logqs[0][2])
    np.testing.assert_array_equal(rows.surprisal, -rows.log_prob)
    assert rows.step.tolist() == list(range(12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": torch.ones(1, 1, 3)}, "integer token ids, got torch.float32"),
        ({"gen_lens": [[-1]], "attention_masks": torch.tensor([[[1, 0, 0]]])}, "numbers ≥ 0, got -1"),
        ({"responses_text": []}, "responses_text holds one entry for each of the 1 prompts"),
        ({"responses_text": [["a", "b"]]}, "each with 1 for its responses"),
        ({"finish_reasons": [[]]}, "finish_reasons"),
        ({"sampler_logqs": [[]]}, "sampler_logqs"),
        ({"prompts": ["a", "b"]}, "prompts holds one entry"),
        ({"examples": []}, "examples holds one entry"),
    ],
)
def test_fields_of_another_size_or_kind_are_refused(change, message):
    made = BatchedSequences.from_ids([[5, 6]], [[[7]]])
    with pytest.raises(InputError, match=message):
        replace(made, **change)


def test_results_have_the_specified_fields_and_meanings(make_processor, sequences):
    processor = make_processor(temperature=0.8, top_p=0.9)
    found = processor.teacher_force_logprobs(sequences, True, compute_rb=True, return_baseline_features=True)
    names = [entry.name for entry in fields(found)]
    assert names[:7] == [
        "logprobs", "entropies", "sequence_logprobs", "rb_entropies", "rewards", "rb_entropies_torch",
        "baseline_feats_torch",
    ]  # fmt: skip
    start, n = sequences.prompt_lens[1], sequences.gen_lens[1][0]
    with torch.no_grad():
        rows = processor.functional_logits(sequences.sequences[1], sequences.attention_masks[1])
    logits, tokens = rows[0, start - 1 : start + n - 1], sequences.sequences[1, 0, start : start + n]
    log_p = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    close = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(found.logprobs[1][0].detach(), log_p, **close)
    np.testing.assert_array_equal(found.entropies[1][0], -found.logprobs[1][0].detach().numpy())
    assert found.sequence_logprobs[1][0] == pytest.approx(float(log_p.sum()), abs=1e-3)
    expected = rb_entropy(logits, found.policy)
    torch.testing.assert_close(torch.from_numpy(found.rb_entropies[1][0]), expected, **close)
    torch.testing.assert_close(found.rb_entropies_torch[1][0], expected, **close)
    assert np.isnan(found.rewards).all()
    assert np.shape(found.rewards) == (2, 3)
    assert found.baseline_feats_torch[1][0].shape == (n, 7)
    assert not found.baseline_feats_torch[1][0].requires_grad
