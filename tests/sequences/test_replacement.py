"""Draws with replacement: the specified call, and at a trainer's scale."""

import inspect
import math

import numpy as np
import psutil
import pytest
import torch
from scipy.stats import chisquare
from transformers import GPT2Config, GPT2LMHeadModel

from steerlab.core.errors import DataError, InputError
from steerlab.sequences import SequenceProcessor, register_dataset, rewards_of
from steerlab.sequences.datasets import load_examples


class FewTokens:
    """A tokenizer for a model of 16 tokens: eight bytes of a text's hash, four bits each."""

    bos_token_id = chat_template = None
    eos_token_id = pad_token_id = 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1 + sum(text.encode()[k::3]) % 15 for k in range(3)]}

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture(scope="module")
def small_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=16, eos_token_id=0, bos_token_id=0
        )
        return GPT2LMHeadModel(config).eval()


def test_the_signature_is_the_specified_one():
    parameters = inspect.signature(SequenceProcessor.generate_with_replacement_sampling).parameters
    assert list(parameters) == [
        "self", "total_sequences", "dataset_name", "split", "max_prompts_pool", "seed", "kwargs",
    ]  # fmt: skip
    assert parameters["dataset_name"].default is inspect.Parameter.empty
    assert [parameters[name].default for name in ("split", "max_prompts_pool", "seed")] == ["train", None, None]
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_keywords_reach_the_call_that_draws_and_scores(make_processor):
    register_dataset("numbers", lambda split: [{"prompt": f"Say {k}", "answer": str(k)} for k in range(12)])
    processor = make_processor(max_new_tokens=3, rb_requires_grad=True)
    sequences, logprobs, diagnostics = processor.generate_with_replacement_sampling(
        20, "numbers", seed=4, G=2, compute_rb=True, with_grad=True, reward_fn=lambda p, r, row: float(row["answer"])
    )
    assert (sequences.n_prompts, sequences.n_samples) == (10, 2)
    rows = load_examples("numbers", "train")  # no pool given: the whole split, in its order
    assert [row["prompt"] for row in sequences.examples] == [rows[i]["prompt"] for i in sequences.pool_indices]
    assert [row[0] for row in logprobs.rewards] == sequences.pool_indices.astype(float).tolist()
    assert logprobs.logprobs[0][0].requires_grad
    assert logprobs.rb_entropies_torch[0][0].requires_grad
    assert len(logprobs.rb_entropies[0][0]) == diagnostics.diagnostics[0][0].sequence.num_tokens
    again = processor.teacher_force_logprobs(sequences)
    assert again.rewards == logprobs.rewards  # they are on the sequences
    assert rewards_of(sequences, None)[0] == pytest.approx([math.nan] * 2, nan_ok=True)
    with pytest.raises(InputError, match="total_sequences=5 is not a multiple of G=2"):
        processor.generate_with_replacement_sampling(5, "numbers", G=2)
    with pytest.raises(DataError, match="max_prompts_pool is an integer ≥ 1, got 0"):
        processor.generate_with_replacement_sampling(2, "numbers", max_prompts_pool=0)
    with pytest.raises(TypeError, match=r"generate_with_logprobs has no argument rewards"):
        processor.generate_with_replacement_sampling(2, "numbers", rewards=3)
    with pytest.raises(TypeError, match="no argument reward: use reward_fn="):
        processor.generate_with_logprobs(["Say"], reward=None)


@pytest.mark.slow
def test_thirty_thousand_draws_are_uniform_over_the_pool_in_one_call(small_model):
    rows_at_once = []
    handle = small_model.transformer.wte.register_forward_pre_hook(lambda _, args: rows_at_once.append(len(args[0])))
    config = {"generation": {"max_new_tokens": 2, "top_p": 0.9, "gen_batch_size": 2048, "tf_batch_size": 1024}}
    processor = SequenceProcessor(small_model, FewTokens(), config=config)
    process = psutil.Process()
    before = process.memory_info().rss
    try:
        sequences, logprobs, diagnostics = processor.generate_with_replacement_sampling(
            32_768, "arithmetic", G=1, compute_rb=True, seed=0
        )
    finally:
        handle.remove()
    assert process.memory_info().rss - before < 600 << 20
    assert max(rows_at_once) == 2048
    pool = load_examples("arithmetic", "train")
    counts = np.bincount(sequences.pool_indices, minlength=len(pool))
    assert counts.mean() == 32_768 / len(pool) == 8
    assert chisquare(counts).pvalue > 1e-3
    assert len(logprobs.logprobs) == len(diagnostics.diagnostics) == len(sequences.prompts) == 32_768
    assert sequences.prompts[-1] == pool[sequences.pool_indices[-1]]["prompt"]
    # the first tokens of a prompt that came several times are draws of their own
    first = np.array([sequences.response_ids(b, 0)[0] for b in np.nonzero(sequences.pool_indices == 0)[0]])
    assert len(set(first)) > 1
