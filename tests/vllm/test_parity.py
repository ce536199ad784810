"""The real small model on both engines: the same plan, the same tokens, the same numbers."""

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
def lens_small(smollm2_path):
    with sl.load(smollm2_path, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(start, smollm2_path):
    with start(smollm2_path, layers=[10, 14], max_model_len=512, max_num_seqs=10) as engine:
        yield engine


@pytest.fixture(scope="module")
def plan(lens_small):
    pairs = sl.ContrastPairs.from_lists(
        ["The film was wonderful", "What a great day", "I love this place"],
        ["The film was terrible", "What an awful day", "I hate this place"],
    )
    vectors = sl.extract(lens_small, pairs, layers=[10, 14])
    return sl.Plan(sl.add(vectors[14], dose=0.2), sl.ablate(vectors[10]))


@pytest.mark.parametrize("steered", [True, False])
def test_at_least_nine_of_ten_prompts_continue_alike(engine, lens_small, plan, steered):
    options = {"plan": plan if steered else None, "policy": GREEDY, "max_new_tokens": 32}
    ours, theirs = engine.generate(PROMPTS, **options), lens_small.generate(PROMPTS, **options)
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
    assert len(same) >= 9
    for a, b in same:
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=1e-3)


def test_scores_and_doses_agree(engine, lens_small, plan):
    assert engine.info.weights_hash == lens_small.info.weights_hash
    assert engine.median_norm(14) == pytest.approx(lens_small.median_norm(14), rel=1e-4)
    ours = engine.score(PROMPTS[:5], TARGETS, plan=plan)
    theirs = lens_small.score(PROMPTS[:5], TARGETS, plan=plan)
    for a, b in zip(ours.token_log_probs, theirs.token_log_probs, strict=True):
        assert a == pytest.approx(b, abs=1e-3)
