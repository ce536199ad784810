import math

import numpy as np
import pytest
import torch

from steerlab.core._text import EncodedPair
from steerlab.core.errors import HookPointError, InputError
from steerlab.core.receipts import EditReceipt, Receipt
from steerlab.core.results import Activations, Completion, Generations, Score, Scores, check_pool
from tests.tiny_models import build_tiny_tokenizer


def completion(prompt_index=0, log_probs=(-1.0, -2.0), log_qs=(-0.5, -0.25)):
    return Completion(" a b", [1, 2], "length", prompt_index, 0, list(log_probs), list(log_qs))


def test_completion_sums_its_tokens():
    assert completion().log_prob == -3.0
    assert completion().log_q == -0.75
    assert completion(log_qs=(-0.5, -math.inf)).log_q == -math.inf


def test_generations_are_a_sequence_with_a_frame():
    generations = Generations((completion(), completion(1)), ((7,), (8, 9)))
    assert len(generations) == 2
    assert [c.prompt_index for c in generations] == [0, 1]
    assert generations[-1] is generations.completions[1]
    frame = generations.to_frame()
    assert list(frame.index) == [0, 1]
    assert list(frame.columns) == [
        "prompt_index",
        "sample_index",
        "text",
        "num_tokens",
        "finish_reason",
        "log_prob",
        "log_q",
    ]
    assert frame.num_tokens.tolist() == [2, 2]


def test_perplexity_is_per_token():
    score = Score(0, 1, (4, 5), (-1.0, -3.0), "clean")
    assert (score.log_prob, score.num_tokens, score.mean_log_prob) == (-4.0, 2, -2.0)
    assert score.perplexity == pytest.approx(math.exp(2.0))


def test_hopeless_targets_have_infinite_perplexity():
    assert Score(0, 0, (4,), (-800.0,), "clean").perplexity == math.inf
    assert Score(0, 0, (4,), (-math.inf,), "clean").perplexity == math.inf


def test_scores_frame_has_the_promised_columns():
    scores = Scores((Score(0, 0, (4, 5), (-1.0, -3.0), "clean"), Score(1, 0, (6,), (-0.5,), "merged")))
    frame = scores.to_frame()
    expected = "prompt_index target_index log_prob num_tokens mean_log_prob perplexity boundary".split()
    assert list(frame.columns) == expected
    assert list(frame.index) == [0, 1]
    assert frame.boundary.tolist() == ["clean", "merged"]
    assert np.allclose(scores.log_prob, [-4, -0.5])
    assert scores.of(1) == [scores[1]]
    assert scores.token_ids == [(4, 5), (6,)]


def test_scores_and_their_frame_say_the_dtype():
    scores = Scores((Score(0, 0, (4, 5), (-1.0, -3.0), "clean"),), "bfloat16")
    assert "bfloat16" in repr(scores)
    assert scores.to_frame().attrs["dtype"] == scores.tokens_frame().attrs["dtype"] == "bfloat16"


def test_bits_per_byte():
    score = Score(0, 0, (4, 5), (-math.log(2), -math.log(8)), "clean", num_bytes=8)
    assert score.bits_per_byte == pytest.approx(0.5)
    silent = Score(0, 1, (4,), (-1.0,), "clean", num_bytes=0)
    unread = Score(0, 2, (4,), (-1.0,), "clean")
    np.testing.assert_allclose(Scores((score, silent, unread)).bits_per_byte, [0.5, math.nan, math.nan])
    assert Score(0, 0, (4,), (-math.inf,), "clean", num_bytes=1).bits_per_byte == math.inf


def test_a_score_carries_what_its_pair_says():
    pair = EncodedPair((1,), (4, 5), "merged", " ", 7)
    assert Score.of_pair(2, 3, pair, [-1, -2]) == Score(2, 3, (4, 5), (-1, -2), "merged", " ", 7)


def test_the_variant_is_a_last_column_only_where_there_is_one():
    bare = Score(0, 0, (4,), (-1.0,), "clean")
    spaced = Score(0, 0, (5,), (-0.5,), "clean", " ")
    both = Scores((bare, spaced))
    assert both.variant == ["", " "]
    assert list(both.to_frame().columns) == [*Scores((bare,)).to_frame().columns, "variant"]
    assert both.to_frame().variant.tolist() == ["", " "]
    assert both.tokens_frame().variant.tolist() == ["", " "]
    assert "variant" in Scores((spaced,)).to_frame()
    assert "variant" not in Scores((bare,)).tokens_frame()


def test_tokens_frame_has_a_row_per_scored_token():
    scores = Scores((Score(0, 1, (4, 5), (-1.0, -math.log(2)), "clean"), Score(1, 0, (4,), (-0.5,), "merged")))
    frame = scores.tokens_frame()
    expected = "prompt_index target_index position token_id log_prob surprisal_bits".split()
    assert list(frame.columns) == expected
    assert frame.index.tolist() == [0, 1, 2]
    assert frame[expected[:4]].to_numpy().tolist() == [[0, 1, 0, 4], [0, 1, 1, 5], [1, 0, 0, 4]]
    assert frame.log_prob.tolist() == [-1.0, -math.log(2), -0.5]
    assert frame.surprisal_bits.tolist() == pytest.approx([1 / math.log(2), 1.0, 0.5 / math.log(2)])


def test_tokens_frame_shows_texts_with_a_tokenizer():
    tokenizer = build_tiny_tokenizer(chat=False)
    ids = tuple(tokenizer(" the room.")["input_ids"])
    frame = Scores((Score(0, 0, ids, (-1.0,) * len(ids), "clean"),)).tokens_frame(tokenizer)
    assert "".join(frame.token) == " the room."
    assert list(frame.columns).index("token") == list(frame.columns).index("token_id") + 1


def test_activations_cut_out_one_prompt():
    values = torch.arange(10.0).reshape(5, 2)
    acts = Activations("resid_post", (3,), (values,), ((0, 2), (1, 3, 4)), None, ((9,), (9,)))
    assert torch.equal(acts.of(1, 3), values[2:])
    assert acts.stack().shape == (1, 5, 2)
    with pytest.raises(HookPointError, match=r"captured layers: \[3\]"):
        acts[4]


def test_pools():
    assert check_pool("mean") == "mean"
    assert check_pool(None) is None
    with pytest.raises(InputError, match="'max'"):
        check_pool("max")


def test_a_receipts_mean_change_counts_each_edited_token_once():
    often = EditReceipt("blocks.1.hook_resid_post", 1, "add(coef=1)", edited=3, expected=3, mean_relative_change=0.1)
    once = EditReceipt("blocks.2.hook_resid_post", 2, "ablate()", edited=1, expected=1, mean_relative_change=0.9)
    never = EditReceipt("blocks.3.hook_resid_post", 3, "ablate()", edited=0, expected=0, mean_relative_change=math.nan)
    receipt = Receipt(0, 0, "hash", (often, once, never))
    assert receipt.mean_relative_change == pytest.approx((3 * 0.1 + 0.9) / 4)
    assert math.isnan(Receipt(0, 0, "hash", (never,)).mean_relative_change)
