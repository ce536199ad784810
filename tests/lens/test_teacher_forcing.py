import numpy as np
import pytest

import steerlab as sl
from steerlab._runtime import teacher_forcing
from tests.lens.helpers import PROMPTS, passes, plain_log_probs, random_vector, strong_plan

TARGETS = [[" Paris", " London and"], [" four."], [" it was too hot"]]


def test_scores_equal_one_uncached_pass_per_pair(any_engine, references):
    name, engine = any_engine
    model, tokenizer = references(name), engine.tokenizer
    scores = engine.score(PROMPTS[1:4], TARGETS)
    assert [(s.prompt_index, s.target_index) for s in scores] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    for score in scores:
        joint = tokenizer(PROMPTS[1 + score.prompt_index] + TARGETS[score.prompt_index][score.target_index])[
            "input_ids"
        ]
        context = joint[: len(joint) - score.num_tokens]
        assert score.token_ids == tuple(joint[len(context) :])
        assert score.token_log_probs == pytest.approx(plain_log_probs(model, context, score.token_ids), abs=1e-4)
        assert score.log_prob == pytest.approx(sum(score.token_log_probs))


def test_known_values_of_the_real_model(lens_engine):
    scores = lens_engine.score(["The capital of France is", "Two plus two equals"], [[" Paris"], [" four"]])
    # what lm-eval's HFLM gives on the same weights
    assert scores.log_prob.tolist() == pytest.approx([-0.25806, -2.06018], abs=1e-4)
    assert scores.boundary == ["clean", "clean"]


def test_merged_pairs_are_finite_and_flagged(lens_engine, references):
    whole, part = lens_engine.score(["Ans", "The cap"], [["wer"], ["ital of France"]])
    tokenizer = lens_engine.tokenizer
    assert (whole.boundary, part.boundary) == ("merged", "merged")
    expected = plain_log_probs(references("lens_engine"), [tokenizer.bos_token_id], tokenizer("Answer")["input_ids"])
    assert whole.token_log_probs == pytest.approx(expected, abs=1e-4)
    expected = plain_log_probs(
        references("lens_engine"), tokenizer("The")["input_ids"], tokenizer(" capital of France")["input_ids"]
    )
    assert part.token_log_probs == pytest.approx(expected, abs=1e-4)


def test_boundaries_differ_where_the_tokenizer_merges(lens_engine):
    joint = lens_engine.score("Ans", ["wer"])[0]
    separate = lens_engine.score("Ans", ["wer"], boundary="separate")[0]
    assert joint.token_ids != separate.token_ids
    assert separate.boundary == "clean"


def test_ids_and_text_agree(tiny_engine):
    _, engine = tiny_engine
    tokenizer = engine.tokenizer
    text = engine.score(PROMPTS[3], [" it was"], boundary="separate")
    ids = engine.score([tokenizer(PROMPTS[3])["input_ids"]], [[tokenizer(" it was")["input_ids"]]])
    assert ids.token_log_probs == text.token_log_probs


def test_eos_is_scored_only_when_asked(tiny_engine, references):
    name, engine = tiny_engine
    eos = engine.tokenizer.eos_token_id
    plain = engine.score(PROMPTS[0], [" one two"])[0]
    ended = engine.score(PROMPTS[0], [" one two"], score_eos=True)[0]
    assert ended.token_ids == (*plain.token_ids, eos)
    assert ended.token_log_probs[:-1] == pytest.approx(plain.token_log_probs, abs=1e-5)
    context = engine.tokenizer(PROMPTS[0])["input_ids"]
    expected = plain_log_probs(references(name), context, ended.token_ids)
    assert ended.token_log_probs == pytest.approx(expected, abs=1e-4)


def test_chat_prompts_are_scored_after_their_template(tiny_llama_engine, references):
    tokenizer = tiny_llama_engine.tokenizer
    (found,) = tiny_llama_engine.score("Hi", [" one"], chat=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    joint = tokenizer(text + " one", add_special_tokens=False)["input_ids"]
    context = joint[: -found.num_tokens]
    expected = plain_log_probs(references("tiny_llama_engine"), context, found.token_ids)
    assert found.token_log_probs == pytest.approx(expected, abs=1e-4)


def test_equal_contexts_share_a_pass_and_keep_their_own_results(tiny_engine):
    _, engine = tiny_engine
    scores = engine.score(["Hi", "Two", "Hi"], [[" a", " b c"], [" a"], [" b c", " a", " a"]])
    values = scores.log_prob
    assert values[0] == pytest.approx(values[4], abs=1e-6)
    assert values[0] == pytest.approx(values[5], abs=1e-6)
    assert values[1] == pytest.approx(values[3], abs=1e-4)
    assert values[2] != pytest.approx(values[0], abs=1e-3)


@pytest.mark.parametrize("logit_bytes", [1, 4 * 384 * 3])
def test_the_logit_budget_changes_nothing(tiny_engine, monkeypatch, logit_bytes):
    _, engine = tiny_engine
    plan = strong_plan(engine)
    targets = [[" one", " two or three things"], [" four"], [" it was too hot and", " no"]]
    expected = engine.score(PROMPTS[:3], targets, plan=plan)
    monkeypatch.setattr(
        teacher_forcing.Budget, "logit_rows", lambda self, d_vocab: max(1, logit_bytes // (4 * d_vocab))
    )
    found = engine.score(PROMPTS[:3], targets, plan=plan)
    assert found.token_ids == expected.token_ids
    assert np.allclose(found.log_prob, expected.log_prob, atol=1e-4)


def test_steered_targets_are_edited_where_generation_would(tiny_engine):
    """Score of a plan on all generated positions equals a hand-steered pass over prompt and target."""
    _, engine = tiny_engine
    v = random_vector(engine)
    tokenizer = engine.tokenizer
    context, target = tokenizer(PROMPTS[2])["input_ids"], tokenizer(" four and six")["input_ids"]
    plan = sl.Plan(sl.add(v, coef=4.0))
    (found,) = engine.score([context], [[target]], plan=plan)

    def hand(value, hook):
        value = value.clone()
        value[:, len(context) - 1 :] += 4.0 * v.values
        return value

    with engine.model.hooks(fwd_hooks=[(f"blocks.{v.layer}.hook_out", hand)]):
        logits = engine.logits([*context, *target[:-1]]).log_softmax(-1)
    expected = [logits[len(context) - 1 + k, token].item() for k, token in enumerate(target)]
    assert found.token_log_probs == pytest.approx(expected, abs=1e-4)
    assert found.log_prob != pytest.approx(engine.score([context], [[target]])[0].log_prob, abs=0.01)


def test_the_frame_has_a_row_per_pair(tiny_llama_engine):
    frame = tiny_llama_engine.score(PROMPTS[:2], [[" a", " b"], [" c"]]).to_frame()
    assert frame[["prompt_index", "target_index"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0]]
    assert np.allclose(frame.perplexity, np.exp(-frame.log_prob / frame.num_tokens))


def test_targets_of_a_long_context_share_passes(tiny_llama_engine, monkeypatch):
    """What a row holds in the cache costs half of what it runs."""
    monkeypatch.setattr(tiny_llama_engine, "batch_tokens", 100)
    seen = passes(monkeypatch)
    tiny_llama_engine.score([[5] * 80], [[[6, k, 7] for k in range(10, 22)]])
    assert seen == [(1, 80), *[(2, 2)] * 6]


def test_float64_scores_padded_rows(tiny_llama_path):
    """Eager attention takes its softmax in float32, where the float64 mask of a padded row is −inf."""
    prompts, targets = ["the dog", "the cat sat on a mat and"], [[" ran"], [" slept"]]
    with sl.load(tiny_llama_path, dtype="float64") as engine:
        together = engine.score(prompts, targets).log_prob
        alone = [engine.score([p], [t]).log_prob[0] for p, t in zip(prompts, targets, strict=True)]
        assert np.isfinite(engine.median_norm(1))
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("in_a_list", [False, True])
@pytest.mark.parametrize("where", [sl.where.last_prompt() | sl.where.generated(), sl.where.all()], ids=str)
def test_targets_that_differ_in_their_last_token_share_a_row(tiny_engine, where, in_a_list, references, monkeypatch):
    name, engine = tiny_engine
    seen = passes(monkeypatch)
    targets, context = [[6, 7, 8], [6, 7, 9], [6], [9], [6, 7, 8]], [5, 4, 3]
    plain = engine.score([context], [targets], plan=[None] if in_a_list else None)
    assert seen == ([(1, 2), (2, 3)] if in_a_list else [(1, 3), (1, 2)])
    for one, target in zip(plain, targets, strict=True):
        assert one.token_log_probs == pytest.approx(plain_log_probs(references(name), context, target), abs=1e-4)
    plan = sl.Plan(sl.add(random_vector(engine), coef=4.0, where=where))
    found = engine.score([context], [targets], plan=[plan] if in_a_list else plan)
    before = 2 if where == sl.where.all() else 0
    assert [receipt.edits[0].edited for receipt in found.receipts] == [before + len(target) for target in targets]
    for one, target in zip(found, targets, strict=True):
        alone = engine.score([context], [[target]], plan=plan)[0]
        assert one.token_log_probs == pytest.approx(alone.token_log_probs, abs=1e-5)
