"""The prepared model runs in the real vLLM and says there what it says in our engine."""

import importlib.util

import pytest

import steerlab as sl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed; `make setup` installs it where that is possible",
    ),
]

PROMPTS = [
    "The capital of France is",
    "Two plus two equals",
    "Once upon a time there was a little girl who lived near the sea, and every morning",
    "Water freezes",
    "My favourite book is",
]
TARGETS = [
    [" Paris.", " a city in the north of the country"],
    [" four", " five, as everybody knows"],
    [" she walked along the beach to look for shells."],
    [" at zero degrees Celsius."],
    [" a story about a dog that could read"],
]


@pytest.fixture(scope="module")
def vllm_model(smollm2_path):
    """One vLLM engine in float32, in this process: that starts in a quarter of the time."""
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        model = LLM(str(smollm2_path), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8, seed=0)
        yield model
        model.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def engine(smollm2_path):
    with sl.load(str(smollm2_path), dtype="float32") as engine:
        yield engine


def test_greedy_continuations_are_the_same(vllm_model, engine):
    from vllm import SamplingParams

    theirs = vllm_model.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    ours = engine.generate(PROMPTS, policy=sl.SamplingPolicy(temperature=0), max_new_tokens=16)
    assert [list(completion.token_ids) for completion in ours] == [list(out.outputs[0].token_ids) for out in theirs]


def test_target_log_probs_are_the_same(vllm_model, engine):
    scores = engine.score(PROMPTS, TARGETS)
    assert set(scores.boundary) == {"clean"}
    for score in scores:
        prompt_ids = engine.tokenizer(PROMPTS[score.prompt_index]).input_ids
        theirs = prompt_log_probs(vllm_model, [*prompt_ids, *score.token_ids])[len(prompt_ids) :]
        assert list(score.token_log_probs) == pytest.approx(theirs, abs=1e-3)


def prompt_log_probs(vllm_model, ids: list[int]) -> list[float | None]:
    """What vLLM gives each token of a prompt, in nats; None for the first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (out,) = vllm_model.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return [
        None if position is None else position[token].logprob
        for token, position in zip(ids, out.prompt_logprobs, strict=True)
    ]
