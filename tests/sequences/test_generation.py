import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.errors import ContextLengthError, DataError, InputError
from steerlab.sequences import RewardError, SequenceProcessor, importance_weights, register_dataset
from tests import spacing_cases
from tests.sequences.test_forcing import flat

PROMPTS = ["The ferry leaves", "Two plus two equals four, and ten minus 3"]


def ids_of(sequences):
    return [sequences.response_ids(b, g) for b in range(sequences.n_prompts) for g in range(sequences.n_samples)]


@pytest.mark.parametrize("policy", [{}, {"temperature": 0.6}, {"top_p": 0.95}, {"temperature": 1.4, "top_p": 0.7}])
def test_log_q_is_what_the_sampler_recorded(make_processor, policy):
    processor = make_processor(max_new_tokens=40, **policy)
    sequences, logprobs, _ = processor.generate_with_logprobs(PROMPTS, G=8, seed=0)
    np.testing.assert_allclose(flat(logprobs.token_logqs), flat(sequences.sampler_logqs), atol=1e-4)
    again = processor.teacher_force_logprobs(sequences)
    ratios = np.exp(flat(again.token_logqs) - flat(logprobs.token_logqs))
    np.testing.assert_allclose(ratios, 1, atol=1e-5)
    np.testing.assert_allclose(importance_weights(again, logprobs).weights, 1, atol=1e-5)


def test_equals_the_lens_engine_token_by_token(make_processor, tiny_llama_engine):
    processor = make_processor(top_p=0.9, max_new_tokens=24)
    ours = processor.generate_batched(PROMPTS, 3, seed=5)
    theirs = processor.generate_batched(PROMPTS, 3, seed=5, engine=tiny_llama_engine)
    assert ids_of(ours) == ids_of(theirs)
    assert ours.finish_reasons == theirs.finish_reasons
    assert ours.responses_text == theirs.responses_text
    assert torch.equal(ours.attention_masks, theirs.attention_masks)
    np.testing.assert_allclose(flat(ours.sampler_logqs), flat(theirs.sampler_logqs), atol=1e-5)
    scored = processor.teacher_force_logprobs(theirs)
    np.testing.assert_allclose(flat(scored.token_logqs), flat(theirs.sampler_logqs), atol=1e-4)


def test_an_engine_with_other_weights_is_refused(make_processor, tiny_llama_engine):
    processor = make_processor()
    with torch.no_grad():
        processor.parts.root.model.layers[1].mlp.up_proj.weight.mul_(1.02)
    with pytest.raises(InputError, match="its weights are not the model's"):
        processor.generate_batched(PROMPTS, 1, seed=0, engine=tiny_llama_engine)


@pytest.mark.parametrize("section", ["tf_nograd", "func_override"])
def test_scores_under_autocast_do_not_look_like_other_weights(make_processor, tiny_llama_engine, section):
    processor = make_processor(precision={section: {"autocast": True, "dtype": "bfloat16"}})
    ours = processor.generate_batched(PROMPTS, 1, seed=0)
    theirs = processor.generate_batched(PROMPTS, 1, seed=0, engine=tiny_llama_engine)
    assert ids_of(ours) == ids_of(theirs)


def test_seeds_and_batches(make_processor):
    processor = make_processor(top_p=0.95)
    first = ids_of(processor.generate_batched(PROMPTS, 3, seed=1))
    assert ids_of(processor.generate_batched(PROMPTS, 3, seed=1)) == first
    assert ids_of(processor.generate_batched(PROMPTS, 3, gen_batch_size=1, seed=1)) == first
    assert ids_of(processor.generate_batched(PROMPTS, 3, seed=2)) != first
    assert (
        ids_of(processor.generate_batched(PROMPTS[1:], 3, seed=[1]))
        == ids_of(processor.generate_batched(PROMPTS, 3, seed=[0, 1]))[3:]
    )
    torch.manual_seed(0)
    unseeded = [ids_of(processor.generate_batched(PROMPTS, 1)) for _ in range(2)]
    torch.manual_seed(0)
    assert ids_of(processor.generate_batched(PROMPTS, 1)) == unseeded[0] != unseeded[1]


def test_a_list_of_seeds_needs_given_prompts(make_processor):
    processor = make_processor(max_new_tokens=4)
    drawn, _, _ = processor.generate_with_logprobs(PROMPTS, G=2, seed=[4, 9])
    assert ids_of(drawn) == ids_of(processor.generate_batched(PROMPTS, 2, seed=[4, 9]))
    with pytest.raises(InputError, match="one per prompt: got 3 seeds for 2 prompts"):
        processor.generate_with_logprobs(PROMPTS, G=1, seed=[1, 2, 3])
    for call in (
        lambda seed: processor.generate_with_logprobs(num_prompts=2, G=1, seed=seed),
        lambda seed: processor.sample_prompts(None, num_prompts=2, seed=seed),
        lambda seed: processor.generate_with_replacement_sampling(2, None, seed=seed),
    ):
        with pytest.raises(InputError, match=r"seed is one integer ≥ 0 here, got \[1, 2\]"):
            call([1, 2])
        with pytest.raises(InputError, match="seed is one integer ≥ 0 here, got -1"):
            call(-1)


def test_scores_reproduce_to_the_bit(make_processor):
    runs = [make_processor(top_p=0.9).generate_with_logprobs(PROMPTS, G=4, seed=3, compute_rb=True) for _ in range(2)]
    for get in (lambda r: r[1].token_logqs, lambda r: r[1].rb_entropies, lambda r: r[0].sampler_logqs):
        np.testing.assert_array_equal(flat(get(runs[0])), flat(get(runs[1])))


def test_layout(make_processor, tokenizer):
    sequences = make_processor(max_new_tokens=6).generate_batched(PROMPTS, 2, seed=0)
    width = max(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    assert sequences.prompt_lens == [width, width]
    for b, prompt in enumerate(PROMPTS):
        assert sequences.prompt_ids(b, 1) == tokenizer(prompt)["input_ids"]
        for g in range(2):
            assert int(sequences.attention_masks[b, g].sum()) == len(sequences.prompt_ids(b)) + sequences.gen_lens[b][g]
    frame = sequences.to_frame()
    assert list(frame.columns) == ["prompt_index", "sample_index", "num_tokens", "finish_reason", "text"]
    assert len(frame) == 4


def test_stop_strings_stay_in_the_text(make_processor):
    processor = make_processor(do_sample=False, max_new_tokens=30)
    whole = processor.generate_batched(PROMPTS[:1], 1).responses_text[0][0]
    stop = whole[8:10]
    cut = processor.generate_batched(PROMPTS[:1], 1, stop=[stop, "never there"])
    assert cut.finish_reasons == [["stop"]]
    assert cut.responses_text[0][0] == whole[: whole.index(stop) + len(stop)]
    assert cut.gen_lens[0][0] < 30
    with pytest.raises(InputError, match="stop string is empty"):
        processor.generate_batched(PROMPTS, 1, stop=[""])


def test_the_default_stop_string(make_processor, tokenizer, monkeypatch):
    class Saying(type(tokenizer)):
        def decode(self, ids, **options):
            return "x" * len(ids) if len(ids) < 5 else "xxxx</answer>"  # the prompt is two tokens

    told = Saying.from_pretrained(tokenizer.name_or_path)
    processor = SequenceProcessor(make_processor().parts.root, told, config={"generation": {"max_new_tokens": 9}})
    drawn = processor.generate_batched([[5, 6]], 1, seed=0)
    assert (drawn.gen_lens, drawn.finish_reasons, drawn.responses_text) == ([[3]], [["stop"]], [["xx</answer>"]])


def test_a_response_of_no_tokens(make_processor):
    processor = make_processor(max_new_tokens=0)
    sequences, logprobs, diagnostics = processor.generate_with_logprobs(PROMPTS, G=1, seed=0, compute_rb=True)
    assert sequences.gen_lens == [[0], [0]]
    assert logprobs.sequence_logprobs == [[0.0], [0.0]]
    summary = diagnostics.diagnostics[0][0].sequence
    assert summary.num_tokens == 0
    assert summary.rb_entropy_sum == 0
    assert all(math.isnan(v) for v in (summary.rb_entropy_mean, summary.surprisal_mean, summary.rb_entropy_max))


def test_past_the_context(make_processor):
    with pytest.raises(ContextLengthError, match="more than the context of 256"):
        make_processor(max_new_tokens=250).generate_batched(["The ferry leaves the harbour at seven"], 1)


def test_dropout_does_not_disturb_sampling(make_processor):
    processor = make_processor()
    expected = ids_of(processor.generate_batched(PROMPTS, 2, seed=0))
    for layer in processor.parts.root.model.layers:
        layer.self_attn.attention_dropout = 0.5
    processor.parts.root.train()
    assert ids_of(processor.generate_batched(PROMPTS, 2, seed=0)) == expected
    assert processor.parts.root.training


# --- with data sets -----------------------------------------------------------------------------------------------


def test_prompts_rewards_and_examples(make_processor):
    register_dataset("echo", lambda split: [{"prompt": f"Say {k}", "answer": str(k), "split": split} for k in range(9)])
    processor = make_processor(max_new_tokens=4)

    def reward(prompt, response, example):
        assert prompt == f"Say {example['answer']}"
        return float(example["answer"])

    sequences, logprobs, _ = processor.generate_with_logprobs(
        dataset_name="echo", split="test", num_prompts=3, G=2, seed=0, reward_fn=reward
    )
    assert [len(row) for row in logprobs.rewards] == [2, 2, 2]
    assert [row[0] for row in logprobs.rewards] == [float(example["answer"]) for example in sequences.examples]
    assert {example["split"] for example in sequences.examples} == {"test"}
    prompts, examples = processor.sample_prompts("echo", "test", 3, 0)
    assert prompts == sequences.prompts
    assert examples == sequences.examples
    with pytest.raises(InputError, match="not both"):
        processor.generate_with_logprobs(PROMPTS, dataset_name="echo")


def test_rewards_without_gold_are_nan(make_processor):
    _, logprobs, _ = make_processor(max_new_tokens=2).generate_with_logprobs(PROMPTS, G=1, seed=0)
    assert all(math.isnan(value) for row in logprobs.rewards for value in row)


def test_a_failing_reward_names_the_row(make_processor):
    def reward(prompt, response, example):
        if prompt == PROMPTS[1]:
            raise KeyError("gold")
        return 1.0

    with pytest.raises(RewardError, match=r"prompt 1, sample 0.*KeyError: 'gold'"):
        make_processor(max_new_tokens=2).generate_with_logprobs(PROMPTS, G=2, seed=0, reward_fn=reward)


def test_draws_with_replacement(make_processor):
    processor = make_processor(max_new_tokens=3)
    state = np.random.get_state()[1].copy()  # noqa: NPY002  the global generator must not move
    torch_state = torch.random.get_rng_state()
    sequences, logprobs, diagnostics = processor.generate_with_replacement_sampling(40, "arithmetic", "test", 5, seed=2)
    indices = sequences.pool_indices
    assert (sequences.n_prompts, sequences.n_samples) == (40, 1)
    assert len(logprobs.logprobs) == len(diagnostics.diagnostics) == 40
    assert indices.shape == (40,)
    assert set(indices) == set(range(5))
    pool, _ = processor.sample_prompts("arithmetic", "test", 5, 2)
    assert sequences.prompts == [pool[i] for i in indices]
    twice = [k for k in range(40) if indices[k] == indices[0]]
    assert len({tuple(sequences.response_ids(k, 0)) for k in twice}) > 1  # independent draws of one prompt
    again, _, _ = processor.generate_with_replacement_sampling(40, "arithmetic", "test", 5, seed=2)
    np.testing.assert_array_equal(indices, again.pool_indices)
    assert ids_of(again) == ids_of(sequences)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(torch_state, torch.random.get_rng_state())


def test_the_default_data_set_is_the_shipped_one(make_processor):
    sequences, logprobs, _ = make_processor(max_new_tokens=2).generate_with_logprobs(num_prompts=2, G=1, seed=0)
    assert all("<answer>" in prompt for prompt in sequences.prompts)
    assert logprobs.rewards == [[0.0], [0.0]]
    with pytest.raises(DataError, match="fewer than the 999999"):
        make_processor().sample_prompts(None, num_prompts=999999)


def test_chat_prompts(make_processor, tiny_llama_engine):
    processor = make_processor(max_new_tokens=5)
    messages = [{"role": "user", "content": "Where did you put the keys?"}]
    by_messages = processor.generate_batched([messages], 1, seed=0)
    assert ids_of(processor.generate_batched(["Where did you put the keys?"], 1, seed=0, chat=True)) == ids_of(
        by_messages
    )
    theirs = tiny_llama_engine.generate([messages], max_new_tokens=5, policy=sl.SamplingPolicy())
    assert list(theirs.prompt_token_ids[0]) == by_messages.prompt_ids(0)


def test_responses_keep_the_space_of_their_first_token(tmp_path):
    path = spacing_cases.build(tmp_path / "llama2")
    with sl.load(path, device="cpu") as engine:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        processor = SequenceProcessor(
            model, engine.tokenizer, config={"generation": {"max_new_tokens": 3, "temperature": 0.0}}
        )
        for arguments in ({}, {"engine": engine}):
            found = processor.generate_batched([spacing_cases.PROMPT], 1, **arguments)
            assert found.responses_text == [[" yesan yes"]]
            found = processor.generate_batched([spacing_cases.PROMPT], 1, stop=" yes", **arguments)
            assert found.responses_text == [[" yes"]]
            assert found.finish_reasons == [["stop"]]
