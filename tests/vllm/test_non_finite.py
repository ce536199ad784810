"""Rows whose activations overflow: they end with an error, and nobody else's answer changes.

One token of the model has an embedding of NaN and another one of infinity, so plain prompts overflow too.
"""

import logging

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.measures.quantities import PolicyEntropy
from steerlab.steering import plan as plan_module
from tests.vllm.conftest import INF_TOKEN as INF
from tests.vllm.conftest import NAN_TOKEN as NAN

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]

GREEDY = sl.SamplingPolicy.greedy()
BLOCK = 32
PROMPTS = [[5 + (7 * i + k) % 300 for i in range(length)] for k, length in enumerate([3, 9, 31, 33, 70, 131])]


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "scheduled ahead"])
def engine(request, start, overflowing_path):
    """Few blocks, so that each is soon given to another row; prompts longer than a pass."""
    options = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 96, "capture_tokens": 256}
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            _schedule_ahead(patch)
        with start(overflowing_path, layers=[1, 2], **options) as engine:
            scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
            assert (type(scheduler).__name__ == "AsyncScheduler") == request.param
            yield engine


def _schedule_ahead(patch):
    """As on a GPU, where the next step is under way before the last one's tokens are known; a CPU need not."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))


@pytest.fixture
def unguarded(monkeypatch):
    """Lets plans through whose strength is refused: what overflows must be harmless by itself too."""
    monkeypatch.setattr(plan_module, "check_finite_range", lambda edits, info: None)


@pytest.fixture(scope="module")
def plans(vector):
    return [
        None,
        sl.Plan(sl.add(vector(1), coef=2.0, where=sl.where.all())),
        sl.Plan(sl.add(vector(2), coef=3.0)),
        sl.Plan(sl.ablate(vector(1, 1), where=sl.where.index(2, -1))),
    ]


def deadly(vector, where=None, seed=7):
    """Strength and scale are numbers, their product is not."""
    return sl.Plan(sl.add(vector(1, seed), coef=1e30, where=sl.where.all() if where is None else where)).scaled(1e20)


def clean_answers(engine, plans):
    """Every prompt under every plan, in an engine that has seen nothing yet."""
    engine.llm.reset_prefix_cache()
    cases = [(p, q) for p in range(len(PROMPTS)) for q in range(len(plans))]
    rows = engine.generate(
        [PROMPTS[p] for p, _ in cases], plan=[plans[q] for _, q in cases], policy=GREEDY, max_new_tokens=6
    )
    assert all(np.isfinite(row.token_log_probs).all() for row in rows)
    return dict(zip(cases, rows, strict=True))


def assert_equal(ours, theirs):
    assert ours.token_ids == theirs.token_ids
    assert ours.finish_reason == theirs.finish_reason
    assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-4)


def test_500_requests_of_which_one_in_ten_overflows(engine, plans, vector, unguarded):
    clean = clean_answers(engine, plans)
    rng = np.random.default_rng(0)
    kinds = {"nan": 0, "inf": 0, "plan": 0}
    for start in range(0, 500, 50):
        prompts, chosen, expected = [], [], []
        for row in range(start, start + 50):
            p, q = int(rng.integers(len(PROMPTS))), int(rng.integers(len(plans)))
            prompt, plan = PROMPTS[p], plans[q]
            kind = [*kinds][row // 10 % 3] if row % 10 == 3 else None
            if kind == "plan":
                plan = deadly(vector)
            elif kind is not None:
                place = int(rng.integers(len(prompt)))
                prompt = [*prompt[:place], NAN if kind == "nan" else INF, *prompt[place:]]
            if kind is not None:
                kinds[kind] += 1
            prompts.append(prompt)
            chosen.append(plan)
            expected.append(None if kind else clean[p, q])
        rows = engine.generate(prompts, plan=chosen, policy=GREEDY, max_new_tokens=6)
        assert sorted(engine.errors) == [i for i, right in enumerate(expected) if right is None]
        for row, right in zip(rows, expected, strict=True):
            if right is None:
                assert (row.finish_reason, row.token_ids, row.text) == ("error", [], "")
            else:
                assert_equal(row, right)
    assert min(kinds.values()) >= 15


def test_a_row_that_overflows_while_it_is_generated_keeps_what_was_drawn_before(engine, vector, unguarded, caplog):
    prompt = PROMPTS[2]
    right = engine.generate([prompt], policy=GREEDY, max_new_tokens=10)[0]
    late = deadly(vector, sl.where.generated(after=3))
    with caplog.at_level(logging.WARNING):
        rows = engine.generate([prompt, prompt], plan=[late, None], policy=GREEDY, max_new_tokens=10)
    assert "1 of 2 completions ended with finish_reason 'error', of prompts 0. The first: The logits of" in caplog.text
    assert rows[0].finish_reason == "error"
    assert rows[0].token_ids == right.token_ids[:4]
    assert np.isfinite(rows[0].token_log_probs).all()
    assert isinstance(engine.errors[0], sl.NonFiniteError)
    assert engine.receipts[0].edits[0].edited == 1
    assert_equal(rows[1], right)


def test_sampled_rows_and_rows_without_log_probs_end_so_too(engine, plans):
    arguments = {"policy": sl.SamplingPolicy(top_p=0.9), "max_new_tokens": 6}
    prompts = [PROMPTS[1], [*PROMPTS[1], NAN], PROMPTS[3], [INF, *PROMPTS[3]]]
    for log_probs in (True, False):
        (alone,) = engine.generate(prompts[:1], log_probs=log_probs, seed=[5], **arguments)
        rows = engine.generate(prompts, log_probs=log_probs, n=2, seed=[5, 6, 7, 8], **arguments)
        assert [row.finish_reason == "error" for row in rows] == [False, False, True, True, False, False, True, True]
        assert rows[0].token_ids == alone.token_ids


@pytest.mark.parametrize("token", [NAN, INF])
def test_scores_measures_and_activations_name_the_prompt(engine, plans, token):
    prompts = [PROMPTS[1], [*PROMPTS[4], token, 9], PROMPTS[3]]
    targets = [[[7, 8, 9], [11]], [[7, 8, 9], [12]], [[10, 11]]]
    right = engine.score([prompts[0], prompts[2]], [targets[0], targets[2]]).to_frame().log_prob
    with pytest.raises(sl.NonFiniteError, match="of prompt 1 are not finite"):
        engine.score(prompts, targets)
    measures = {"entropy": PolicyEntropy(sl.SamplingPolicy())}
    with pytest.raises(sl.NonFiniteError, match="of prompt 1 are not finite"):
        engine.measure(prompts, targets, measures)
    with pytest.raises(sl.NonFiniteError, match="of prompt 1 are not finite"):
        engine.capture(prompts, layers=[1])
    with pytest.raises(sl.NonFiniteError, match="of prompts 0, 1 are not finite"):
        engine.score([[token, 4], [4, token], [4, 5]], [[[7]], [[7]], [[7]]])
    again = engine.score([prompts[0], prompts[2]], [targets[0], targets[2]]).to_frame().log_prob
    assert again.tolist() == pytest.approx(right.tolist(), abs=1e-5)


def test_a_target_that_overflows_harms_its_own_score_only(engine):
    with pytest.raises(sl.NonFiniteError, match="of prompt 0 are not finite"):
        engine.score([PROMPTS[0]], [[[7, NAN, 9]]])
    found = engine.score([PROMPTS[0]], [[[7, 8, NAN]]])  # the last token of a target drives nothing
    assert np.isfinite(found[0].log_prob)


def test_equal_requests_after_a_failed_one_fail_alike(engine):
    """What it left in the prefix cache is not taken for something finite."""
    prompt = [*PROMPTS[4], INF, *PROMPTS[4]]
    engine.llm.reset_prefix_cache()
    for _ in range(2):
        with pytest.raises(sl.NonFiniteError, match="of prompt 0 are not finite"):
            engine.generate([prompt], policy=GREEDY, max_new_tokens=4)
        (row,) = engine.generate([prompt], policy=GREEDY, max_new_tokens=4, on_error="return")
        assert row.finish_reason == "error"


def test_a_spoilt_block_that_prompts_share_costs_nobody_an_answer(engine, vector):
    """As a row that overflows may leave it on some kinds of attention: the same tokens, the values NaN."""
    prompt, plan = PROMPTS[5], sl.Plan(sl.add(vector(1), coef=2.0, where=sl.where.index(-1)))
    engine.llm.reset_prefix_cache()
    right = [engine.generate([prompt], plan=p, policy=GREEDY, max_new_tokens=10)[0] for p in (None, plan)]
    scored = engine.score([prompt], [[[7, 8, 9], [10]]], plan=plan).to_frame().log_prob.tolist()
    caches = _caches(engine)
    assert caches
    for cache in caches:
        cache.fill_(torch.nan)
    rows = engine.generate([prompt, prompt], plan=[None, plan], policy=GREEDY, max_new_tokens=10)
    assert engine.errors == {}
    for row, expected in zip(rows, right, strict=True):
        assert_equal(row, expected)
    assert [receipt.edited for receipt in engine.receipts] == [0, 1]
    for cache in caches:
        cache.fill_(torch.nan)
    assert engine.score([prompt], [[[7, 8, 9], [10]]], plan=plan).to_frame().log_prob.tolist() == pytest.approx(scored)
    for _ in range(2):  # and what took its place is found in the cache again
        (row,) = engine.generate([prompt], policy=GREEDY, max_new_tokens=10)
        assert_equal(row, right[0])


def test_a_row_that_runs_once_more_draws_what_it_would_have_drawn(engine):
    prompt, policy = PROMPTS[5], {"policy": sl.SamplingPolicy(), "max_new_tokens": 10, "seed": [5]}
    engine.llm.reset_prefix_cache()
    (right,) = engine.generate([prompt], **policy)
    for cache in _caches(engine):
        cache.fill_(torch.nan)
    (row,) = engine.generate([prompt], **policy)
    assert engine.errors == {}
    assert_equal(row, right)


def _caches(engine):
    core = engine.llm.llm_engine.engine_core.engine_core
    layers = core.model_executor.driver_worker.worker.model_runner.compilation_config.static_forward_context
    return [layer.kv_cache for layer in layers.values() if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)]


def test_strengths_that_overflow_are_refused(engine, vector):
    unseen = deadly(vector, seed=8)  # the engine keeps plans that it has made ready
    for plan in (unseen, sl.Plan(sl.add(vector(1), coef=1e38)), sl.Plan(sl.add(vector(1), dose=1e30))):
        with pytest.raises(sl.PlanError, match="leaves the finite range"):
            engine.generate([PROMPTS[0]], plan=plan, policy=GREEDY, max_new_tokens=4)
    rows = engine.generate([PROMPTS[0]] * 2, plan=[unseen, None], policy=GREEDY, max_new_tokens=4, on_error="return")
    assert [row.finish_reason == "error" for row in rows] == [True, False]
