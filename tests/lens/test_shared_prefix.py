from types import SimpleNamespace

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab._runtime import contexts as running
from steerlab._runtime.shared_prefix import shared_prefix
from tests.lens.helpers import passes, plain_log_probs, random_vector, strong_plan

HEADER = torch.randint(3, 380, (70,), generator=torch.Generator().manual_seed(0)).tolist()
CONTEXTS = [[*HEADER, *tail] for tail in ([5], [9, 8, 7], [9, 8, 7, 6, 5, 4], list(range(20, 40)))]
TARGETS = [[[11, 12, 13], [14]], [[15, 16]], [[17]], [[18, 19, 20, 21], [22, 23]]]


def length(engine, plan=None, contexts=CONTEXTS):
    return shared_prefix(
        engine.model.original_model, sl.Plan() if plan is None else plan, [tuple(context) for context in contexts]
    )


def forbid(monkeypatch):
    """Every context runs by itself."""
    monkeypatch.setattr(running, "shared_prefix", lambda *_: 0)


# --- when ---------------------------------------------------------------------------------------------------------


def test_the_longest_common_beginning_that_leaves_each_context_a_token(tiny_engine):
    _, engine = tiny_engine
    assert length(engine) == 70
    assert length(engine, contexts=[CONTEXTS[1], CONTEXTS[2]]) == 72
    assert length(engine, contexts=CONTEXTS[:1]) == 0
    assert length(engine, contexts=[context[7:] for context in CONTEXTS]) == 0
    assert length(engine, contexts=[context[6:] for context in CONTEXTS]) == 64
    assert length(engine, contexts=[*CONTEXTS, [4, *HEADER]]) == 0


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (sl.where.last_prompt() | sl.where.generated(), 70),
        (sl.where.all(), 70),
        (sl.where.prompt(), 70),
        (sl.where.index(3), 70),
        (sl.where.index(-1), 70),
        (sl.where.index(-3), 0),  # of the first context inside the header, of the last outside
        (sl.where.mask([[True] * 3]), 0),
    ],
    ids=str,
)
def test_a_plan_that_edits_the_header_alike_for_all_lets_them_share(tiny_llama_engine, where, expected):
    assert (
        length(tiny_llama_engine, sl.Plan(sl.add(random_vector(tiny_llama_engine), coef=1.0, where=where))) == expected
    )


def test_conditions_and_schedules_run_by_themselves(tiny_llama_engine):
    v = random_vector(tiny_llama_engine)
    assert length(tiny_llama_engine, sl.Plan(sl.add(v, coef=1.0, when=sl.when(v, above=0.0)))) == 0
    assert length(tiny_llama_engine, sl.Plan(sl.add(v, coef=1.0, schedule=sl.schedule.linear(1.0, 0.0, over=4)))) == 0


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": 32},
        {"model_type": "gemma3_text", "sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "mpt"},
    ],
)
def test_models_that_count_cache_slots_never_share(config):
    text_config = SimpleNamespace(**config)
    config = SimpleNamespace(get_text_config=lambda: text_config)
    bridge = SimpleNamespace(original_model=SimpleNamespace(config=config))
    assert length(SimpleNamespace(model=bridge)) == 0
    text_config.model_type, text_config.sliding_window, text_config.layer_types = "llama", None, None
    assert length(SimpleNamespace(model=bridge)) == 70


# --- what -------------------------------------------------------------------------------------------------------


def test_the_header_runs_once(tiny_llama_engine, monkeypatch):
    seen = passes(monkeypatch)
    tiny_llama_engine.score(CONTEXTS, TARGETS)
    assert seen[:2] == [(1, 70), (4, 20)]
    assert all(width <= 3 for _, width in seen[2:])


@pytest.mark.parametrize("budget", [4096, 100, 40])
def test_scores_are_those_of_one_uncached_pass_per_pair(tiny_engine, references, budget, monkeypatch):
    name, engine = tiny_engine
    monkeypatch.setattr(engine, "batch_tokens", budget)
    for score in engine.score(CONTEXTS, TARGETS):
        context = CONTEXTS[score.prompt_index]
        expected = plain_log_probs(references(name), context, score.token_ids)
        assert score.token_log_probs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("where", [sl.where.last_prompt() | sl.where.generated(), sl.where.all()], ids=str)
def test_steered_scores_and_receipts_are_those_of_contexts_run_by_themselves(tiny_engine, where, monkeypatch):
    _, engine = tiny_engine
    plan = strong_plan(engine, where=where)
    seen = passes(monkeypatch)
    found, receipts = engine.score(CONTEXTS, TARGETS, plan=plan), engine.receipts
    assert seen[0] == (1, 70)
    forbid(monkeypatch)
    seen.clear()
    expected = engine.score(CONTEXTS, TARGETS, plan=plan)
    assert seen[0] == (4, 90)
    assert np.allclose(found.log_prob, expected.log_prob, atol=1e-5)
    for ours, theirs in zip(receipts, engine.receipts, strict=True):
        (a,), (b,) = ours.edits, theirs.edits
        assert (ours.prompt_index, ours.row_index, ours.plan_hash) == (
            theirs.prompt_index,
            theirs.row_index,
            theirs.plan_hash,
        )
        assert (a.edited, a.expected) == (b.edited, b.expected)
        assert a.mean_relative_change == pytest.approx(b.mean_relative_change, rel=1e-4)


@pytest.mark.parametrize("in_a_list", [False, True])
@pytest.mark.parametrize("place", [-3, -4, 69])
def test_positions_from_the_end_reach_into_the_header(tiny_engine, place, in_a_list, monkeypatch):
    _, engine = tiny_engine
    contexts, targets = [[*HEADER, k, 5 - k] for k in range(4)], [[[11, 12]]] * 4

    def score(where):
        plan = strong_plan(engine, where=sl.where.index(where))
        return engine.score(contexts, targets, plan=[plan] * 4 if in_a_list else plan).log_prob

    seen = passes(monkeypatch)
    found, other = score(place), score(place - 1)
    assert seen[0] == (1, 70)
    forbid(monkeypatch)
    assert np.allclose(found, score(place), atol=1e-5)
    assert not np.allclose(found, other, atol=1e-4)


def test_plans_of_one_call_share_by_themselves(tiny_llama_engine):
    plans = [None, strong_plan(tiny_llama_engine), None, strong_plan(tiny_llama_engine)]
    together = tiny_llama_engine.score(CONTEXTS, TARGETS, plan=plans)
    for i, (context, targets, plan) in enumerate(zip(CONTEXTS, TARGETS, plans, strict=True)):
        alone = tiny_llama_engine.score([context], [targets], plan=plan)
        assert [s.log_prob for s in together.of(i)] == pytest.approx(alone.log_prob.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "phi3", "olmo2", "mistral_narrow", "gemma3_narrow"])
def test_every_family_gives_the_same_with_and_without(family, name, monkeypatch):
    engine, _ = family(name)
    found = engine.score(CONTEXTS, TARGETS)
    forbid(monkeypatch)
    assert np.allclose(found.log_prob, engine.score(CONTEXTS, TARGETS).log_prob, atol=1e-4)
