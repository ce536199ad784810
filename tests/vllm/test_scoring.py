"""Exact scores inside vLLM: against Hugging Face's full forward, the other engine, and generation itself."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.errors import InputError, PolicyError, ReceiptError, TargetError
from steerlab.engines.vllm import SequenceProb
from steerlab.measures import apply_repetition_penalty, log_q
from steerlab.measures.quantities import LogDistribution, PolicyEntropy, PolicyLogQ, TokenLogProb

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32
D_VOCAB = 384
PREFIX = [5 + (7 * i) % 300 for i in range(4 * BLOCK + 3)]
TARGETS = [[9, 8, 7], [250], [9, 8, 7, 6, 5, 4, 3, 200, 100, 50], [9, 8, 17], [300 + i for i in range(BLOCK + 5)]]
NUCLEUS = sl.SamplingPolicy(temperature=0.7, top_p=0.8)


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    """Prefills are cut at 64 tokens, logits come in chunks of 5 rows, and some requests are preempted."""
    with start(
        tiny_path,
        layers=[1, 2],
        max_num_batched_tokens=64,
        num_gpu_blocks_override=26,
        score_bytes=2 * 5 * 4 * D_VOCAB,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(tiny_path):
    """Log-distributions of Hugging Face's full forward."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()

    def distributions(context, target):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *target]]), use_cache=False).logits[0]
        return logits[len(context) - 1 : -1].log_softmax(dim=-1)

    return distributions


@pytest.fixture(scope="module")
def plans(vector):
    w = sl.where
    return {
        "none": None,
        "default": sl.Plan(sl.add(vector(1), coef=2.0)),
        "all": sl.Plan(sl.add(vector(1), coef=2.0, where=w.all()), sl.ablate(vector(2), where=w.all())),
        "generated": sl.Plan(sl.clamp(vector(2), -0.5, 0.5, where=w.generated(after=2, until=9))),
    }


def flat(scores):
    return np.concatenate([np.array(row.token_log_probs) for row in scores])


def expected(reference, context, target):
    return [float(row[token]) for row, token in zip(reference(context, target), target, strict=True)]


def test_the_buffer_is_as_small_as_this_file_says(engine):
    (worker,) = engine._running.workers
    assert worker["head"] == "float32"
    measuring = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.steerlab_wired
    assert len(measuring.state.measuring.buffers.logits) == 5


# --- equality -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [[7], PREFIX[:31], PREFIX[:32], PREFIX[:33], PREFIX])
def test_scores_equal_a_full_forward(engine, reference, context):
    scores = engine.score([context], [TARGETS])
    assert [row.num_tokens for row in scores] == [len(target) for target in TARGETS]
    for row, target in zip(scores, TARGETS, strict=True):
        assert list(row.token_log_probs) == pytest.approx(expected(reference, context, target), abs=1e-4)


@pytest.mark.parametrize("name", ["none", "default", "all", "generated"])
def test_a_steered_score_is_what_generation_says_token_by_token(engine, plans, name):
    policy = sl.SamplingPolicy(temperature=1.5)
    prompts = [PREFIX, PREFIX[:20]]
    rows = engine.generate(prompts, plan=plans[name], policy=policy, max_new_tokens=12, seed=3)
    scores = engine.score(prompts, [[row.token_ids] for row in rows], plan=plans[name])
    for row, score in zip(rows, scores, strict=True):
        assert list(score.token_log_probs) == pytest.approx(row.token_log_probs, abs=1e-4)


# --- the prefix cache ---------------------------------------------------------------------------------------------


def test_targets_share_their_prompt_cold_and_warm(engine, reference, seen):
    engine.llm.reset_prefix_cache()
    for warm in (False, True):
        scores = engine.score([PREFIX], [TARGETS])
        for row, target in zip(scores, TARGETS, strict=True):
            assert list(row.token_log_probs) == pytest.approx(expected(reference, PREFIX, target), abs=1e-4)
        cached = [outcome.output.num_cached_tokens for outcome in seen[-1]]
        shared = (len(PREFIX) - 1) // BLOCK * BLOCK
        assert cached[1:] == [shared] * 4
        assert cached[0] == (shared if warm else 0)


def test_a_prompt_that_fills_its_blocks_is_not_run_again_for_each_target(engine, reference, seen):
    context, targets = PREFIX[: 4 * BLOCK], [*TARGETS, [8], [250, 9]]
    engine.llm.reset_prefix_cache()
    scores = engine.score([context], [targets])
    for row, target in zip(scores, targets, strict=True):
        assert list(row.token_log_probs) == pytest.approx(expected(reference, context, target), abs=1e-4)
    cached = [outcome.output.num_cached_tokens for outcome in seen[-1]]
    # the first one runs the prompt, and the one that measures every first token its last block
    assert sorted(cached) == [0, 3 * BLOCK] + [4 * BLOCK] * (len(cached) - 2)
    assert len(cached) == len(targets) - 1  # two of one token share a request


@pytest.mark.parametrize("name", ["none", "default", "all"])
def test_targets_of_one_token_take_one_request(engine, lens, plans, name, seen):
    prompts, targets = [PREFIX[:40], PREFIX[:41]], [[[i] for i in range(3, 60)], [[7], [8], [9, 9]]]
    ours = engine.score(prompts, targets, plan=plans[name])
    receipts = [(r.row_index, [(e.edited, e.expected) for e in r.edits]) for r in engine.receipts]
    theirs = lens.score(prompts, targets, plan=plans[name])
    assert flat(ours) == pytest.approx(flat(theirs), abs=1e-3)
    assert receipts == [(r.row_index, [(e.edited, e.expected) for e in r.edits]) for r in lens.receipts]
    assert len(seen[-1]) == 3


def test_equal_prompts_under_other_plans_share_nothing(engine, plans):
    given = [plans["none"], plans["all"], plans["default"], plans["none"]]
    together = engine.score([PREFIX] * 4, [TARGETS[:2]] * 4, plan=given)
    alone = [engine.score([PREFIX], [TARGETS[:2]], plan=plan) for plan in given]
    assert flat(together) == pytest.approx(np.concatenate([flat(one) for one in alone]), abs=1e-5)
    assert len({round(row.log_prob, 3) for row in together}) == 6


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_no_order_loses_a_score(engine, reference, plans, order):
    """The same text as a prompt, as a target with a shorter prompt, and steered, each first, second and third."""
    text = [*PREFIX, *TARGETS[2]]
    calls = [(PREFIX, text[len(PREFIX) :], "none"), (text[:40], text[40:], "none"), (text[:70], text[70:], "all")]
    fresh = []
    for context, target, name in calls:
        engine.llm.reset_prefix_cache()
        fresh.append(flat(engine.score([context], [[target]], plan=plans[name])))
    engine.llm.reset_prefix_cache()
    for index in order:
        context, target, name = calls[index]
        assert flat(engine.score([context], [[target]], plan=plans[name])) == pytest.approx(fresh[index], abs=1e-5)
    assert fresh[0] == pytest.approx(expected(reference, PREFIX, TARGETS[2]), abs=1e-4)
    assert np.abs(fresh[2] - fresh[1][-len(fresh[2]) :]).max() > 0.01


def test_a_batch_that_does_not_fit_the_cache_is_scored_as_alone(engine, reference):
    contexts = [[(11 * i + row) % 300 + 5 for i in range(3 * BLOCK)] for row in range(8)]
    targets = [[(13 * i + 7 * row) % 300 + 5 for i in range(100)] for row in range(8)]
    scores = engine.score(contexts, [[target] for target in targets])
    for row, context, target in zip(scores, contexts, targets, strict=True):
        assert list(row.token_log_probs) == pytest.approx(expected(reference, context, target), abs=1e-4)


ids = st.lists(st.integers(3, D_VOCAB - 1), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_scores_do_not_depend_on_order_or_company(engine, reference, pairs, random):
    shuffled = list(enumerate(pairs))
    random.shuffle(shuffled)
    together = engine.score([context for context, _ in pairs], [[target] for _, target in pairs])
    mixed = engine.score([pair[0] for _, pair in shuffled], [[pair[1]] for _, pair in shuffled])
    for place, (index, (context, target)) in enumerate(shuffled):
        assert list(mixed[place].token_log_probs) == pytest.approx(together[index].token_log_probs, abs=2e-5)
        assert list(mixed[place].token_log_probs) == pytest.approx(expected(reference, context, target), abs=1e-4)


def test_a_missing_score_is_an_error(engine, monkeypatch):
    """As if the scheduler's process had not loaded the plugin."""
    from steerlab.engines.vllm._patches import cache_hits

    engine.score([PREFIX], [[TARGETS[4]]])
    monkeypatch.setattr(cache_hits, "longest_hit", lambda request: None)
    with pytest.raises(ReceiptError, match=r"Target 0 of prompt 0: .* positions 130, 131, .* and \d+ more predict"):
        engine.score([PREFIX], [[[*TARGETS[4], 5]]])


def test_nothing_is_kept_of_what_was_settled(engine):
    wired = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.steerlab_wired
    assert not wired.state.records
    assert not wired.state.measuring._wanted
    assert not wired.state.measuring._drawing


# --- quantities ---------------------------------------------------------------------------------------------------

MEASURES = {
    "p": TokenLogProb(),
    "entropy": PolicyEntropy(sl.SamplingPolicy()),
    "cut entropy": PolicyEntropy(NUCLEUS),
    "q": PolicyLogQ(NUCLEUS),
    "k": PolicyLogQ(sl.SamplingPolicy(top_k=7)),
}


@pytest.mark.parametrize("name", ["none", "default"])
def test_quantities_equal_the_other_engine(engine, lens, plans, name):
    prompts, targets = [PREFIX, [7, 8]], [TARGETS[:3], TARGETS[2:]]
    ours = engine.measure(prompts, targets, MEASURES, plan=plans[name])
    theirs = lens.measure(prompts, targets, MEASURES, plan=plans[name])
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == np.float64
            assert a[key] == pytest.approx(b[key], abs=1e-3)


def test_whole_distributions_equal_a_full_forward(engine, reference):
    rows = engine.measure([PREFIX], [TARGETS], {"all": LogDistribution(), "p": TokenLogProb()})
    for row, target in zip(rows, TARGETS, strict=True):
        np.testing.assert_allclose(row["all"], reference(PREFIX, target).numpy(), atol=1e-4)
        assert row["all"].dtype == np.float32
        assert row["p"] == pytest.approx(row["all"][range(len(target)), target], abs=1e-5)


def test_requests_with_other_quantities_beside_them_are_measured_alike(engine):
    whole = engine.measure([PREFIX, [7, 8]], [TARGETS[:1], TARGETS[:1]], {"d": LogDistribution()})
    plain = engine.score([PREFIX, [7, 8]], [TARGETS[:1], TARGETS[:1]])
    for a, b in zip(whole, plain, strict=True):
        assert a["d"][range(3), TARGETS[0]] == pytest.approx(b.token_log_probs, abs=1e-5)


def test_what_cannot_be_sent_is_refused_by_name(engine):
    with pytest.raises(InputError, match=r"'margin' is <function .* PolicyLogQ, LogDistribution .* TransformerLens"):
        engine.measure([[5]], [[[6]]], {"p": TokenLogProb(), "margin": lambda logits, tokens: logits[:, 0]})
    with pytest.raises(InputError, match="at least one"):
        engine.measure([[5]], [[[6]]], {})


# --- log q of sampled text ----------------------------------------------------------------------------------------

POLICIES = [
    sl.SamplingPolicy(temperature=0.6),
    sl.SamplingPolicy(temperature=0.9, top_p=0.8),
    sl.SamplingPolicy(top_k=5),
    sl.SamplingPolicy(temperature=1.3, top_k=20, top_p=0.9),
    sl.SamplingPolicy(temperature=1.2, min_p=0.1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", ["none", "default"])
def test_importance_ratios_are_one(engine, plans, policy, name):
    prompts = [PREFIX, PREFIX[:33], [7], PREFIX[:70]]
    rows = engine.generate(prompts, plan=plans[name], policy=policy, max_new_tokens=10, n=2, seed=1)
    again = engine.measure(
        prompts,
        [[rows[2 * i].token_ids, rows[2 * i + 1].token_ids] for i in range(len(prompts))],
        {"q": PolicyLogQ(policy), "p": TokenLogProb()},
        plan=plans[name],
    )
    for row, measured in zip(rows, again, strict=True):
        assert len(row.token_log_qs) == len(row.token_ids)
        assert np.exp(np.array(row.token_log_qs) - measured["q"]) == pytest.approx(1.0, abs=1e-5)
        assert np.array(row.token_log_probs) == pytest.approx(measured["p"], abs=1e-5)
        assert np.abs(np.array(row.token_log_qs) - row.token_log_probs).max() > 0.01


def test_log_q_under_a_repetition_penalty_looks_at_all_tokens_so_far(engine, tiny_path):
    policy = sl.SamplingPolicy(temperature=0.8, top_k=30, repetition_penalty=1.4)
    (row,) = engine.generate([PREFIX[:50]], policy=policy, max_new_tokens=12, seed=5)
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()
    with torch.no_grad():
        raw = model(torch.tensor([[*PREFIX[:50], *row.token_ids]]), use_cache=False).logits[0, 49:-1]
    for k, token in enumerate(row.token_ids):
        present = torch.zeros(1, D_VOCAB, dtype=torch.bool)
        present[0, [*PREFIX[:50], *row.token_ids[:k]]] = True
        penalised = apply_repetition_penalty(raw[k : k + 1], present, policy)
        assert row.token_log_qs[k] == pytest.approx(log_q(penalised, torch.tensor([token]), policy).item(), abs=1e-4)


def test_greedy_and_plain_rows_need_no_measuring(engine, seen):
    rows = engine.generate([PREFIX], policy=sl.SamplingPolicy.greedy(), max_new_tokens=3)
    assert rows[0].token_log_qs == [0.0, 0.0, 0.0]
    rows = engine.generate([PREFIX], max_new_tokens=3)
    assert rows[0].token_log_qs == rows[0].token_log_probs
    assert not any(len(outcome.at) for outcomes in seen for outcome in outcomes)
    rows = engine.generate([PREFIX], policy=NUCLEUS, max_new_tokens=3, log_probs=False)
    assert all(math.isnan(q) for q in rows[0].token_log_qs)
    assert not len(seen[-1][0].at)


def test_log_q_survives_preemption_and_chunks(engine):
    """Eight long rows that do not fit the cache together."""
    prompts = [[(11 * i + row) % 300 + 5 for i in range(3 * BLOCK)] for row in range(8)]
    rows = engine.generate(prompts, policy=NUCLEUS, max_new_tokens=40, seed=2)
    again = engine.measure(prompts, [[row.token_ids] for row in rows], {"q": PolicyLogQ(NUCLEUS)})
    for row, measured in zip(rows, again, strict=True):
        assert np.array(row.token_log_qs) == pytest.approx(measured["q"], abs=1e-5)


# --- dictionaries -------------------------------------------------------------------------------------------------


def test_sequence_prob_returns_the_documented_dictionaries(engine, lens, plans):
    prompts = ["Two plus two equals", "She opened the window"]
    sequences = [" four", " and the street was quiet"]
    rows = SequenceProb(engine).get_log_prob(prompts, sequences, plan=plans["default"])
    theirs = lens.score(prompts, [sequences] * 2, plan=plans["default"])
    assert [row["sequence"] for row in rows] == sequences * 2
    for row, score in zip(rows, theirs, strict=True):
        assert row.keys() == {"sequence", "log_prob", "prob", "perplexity", "num_tokens", "boundary"}
        assert row["log_prob"] == pytest.approx(score.log_prob, abs=1e-3)
        assert row["prob"] == pytest.approx(math.exp(row["log_prob"]))
        assert row["perplexity"] == pytest.approx(math.exp(-row["log_prob"] / row["num_tokens"]))
        assert (row["num_tokens"], row["boundary"]) == (score.num_tokens, score.boundary)


def test_refused_policies_and_targets(engine):
    with pytest.raises(PolicyError, match="repetition penalty"):
        PolicyLogQ(sl.SamplingPolicy(repetition_penalty=2.0))
    with pytest.raises(TargetError):
        engine.score([[5]], [[[]]])
