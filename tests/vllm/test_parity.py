"""The real small model on both engines, and in vLLM without ours: the same plan, the same tokens, the same numbers."""

import pytest

import steerlab as sl

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = sl.SamplingPolicy.greedy()
PROMPTS = [
    "The capital of France is",
    "Two plus two equals",
    "Once upon a time there was a little girl who lived near the sea, and every morning",
    "Water freezes",
    "My favourite book is",
    "The film was",
    "When I woke up this morning, I",
    "The best thing about the hotel was",
    "In the long run, the economy",
    "She looked at the letter and",
]
TARGETS = [[" Paris", " a city in the north"], [" four"], [" she walked"], [" at zero"], [" a story about a dog"]]


@pytest.fixture(scope="module")
def engine(start, smollm2_path):
    with start(smollm2_path, layers=[10, 14], max_model_len=512, max_num_seqs=10) as engine:
        yield engine


@pytest.fixture(scope="module")
def plan(lens_engine):
    pairs = sl.ContrastPairs.from_lists(
        ["The film was wonderful", "What a great day", "I love this place"],
        ["The film was terrible", "What an awful day", "I hate this place"],
    )
    vectors = sl.extract(lens_engine, pairs, layers=[10, 14])
    return sl.Plan(sl.add(vectors[14], dose=0.2), sl.ablate(vectors[10]))


@pytest.fixture(scope="module")
def continued(lens_engine, plan):
    """What the reference continues each prompt with, steered and not."""
    return {
        steered: lens_engine.generate(PROMPTS, plan=plan if steered else None, policy=GREEDY, max_new_tokens=32)
        for steered in (True, False)
    }


@pytest.mark.parametrize("steered", [True, False])
def test_at_least_nine_of_ten_prompts_continue_alike(engine, continued, plan, steered):
    theirs = continued[steered]
    ours = engine.generate(PROMPTS, plan=plan if steered else None, policy=GREEDY, max_new_tokens=32)
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
    assert len(same) >= 9
    for a, b in same:
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=1e-3)


def test_scores_and_doses_agree(engine, lens_engine, plan):
    assert engine.info.weights_hash == lens_engine.info.weights_hash
    assert engine.median_norm(14) == pytest.approx(lens_engine.median_norm(14), rel=1e-4)
    ours = engine.score(PROMPTS[:5], TARGETS, plan=plan)
    theirs = lens_engine.score(PROMPTS[:5], TARGETS, plan=plan)
    for a, b in zip(ours.token_log_probs, theirs.token_log_probs, strict=True):
        assert a == pytest.approx(b, abs=1e-3)


def test_a_plain_vllm_continues_and_scores_alike(engine, lens_engine, continued):
    """Requests of vLLM's own to its `LLM`, and the log-probs that vLLM itself gives the tokens of a prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=16)
    theirs = engine.llm.generate(PROMPTS[:5], greedy, use_tqdm=False)
    ours = [list(row.token_ids[:16]) for row in continued[False][:5]]
    assert ours == [list(out.outputs[0].token_ids) for out in theirs]
    scores = lens_engine.score(PROMPTS[:5], TARGETS)
    assert set(scores.boundary) == {"clean"}
    for score in scores:
        prompt_ids = lens_engine.tokenizer(PROMPTS[score.prompt_index]).input_ids
        log_probs = prompt_log_probs(engine.llm, [*prompt_ids, *score.token_ids])[len(prompt_ids) :]
        assert list(score.token_log_probs) == pytest.approx(log_probs, abs=1e-3)


def prompt_log_probs(llm, ids):
    """What vLLM gives each token of a prompt, in nats; None for the first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return [
        None if position is None else position[token].logprob
        for token, position in zip(ids, out.prompt_logprobs, strict=True)
    ]
