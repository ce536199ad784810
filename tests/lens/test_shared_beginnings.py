import pytest

import steerlab as sl
from steerlab._runtime.shared_prefix import edits_from_the_last_token
from tests.lens.helpers import passes, random_vector

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3], [9, 8, 7, 6, 5, 2], list(range(20, 40))]
TARGETS = [[[11, 12, 13], [14]], [[15, 16]], [[17]], [[18, 19], [20], [21]], [[22, 23]]]


def plans_of(engine):
    """Plans that begin at the last token of a prompt, and others."""
    v, w = (random_vector(engine, seed=seed) for seed in (0, 1))
    return {
        "nothing": None,
        "last": sl.Plan(sl.add(v, coef=2.0)),
        "last, two edits": sl.Plan(sl.add(w, coef=-3.0), sl.ablate(v)),
        "generated": sl.Plan(sl.add(v, coef=2.0, where=sl.where.generated())),
        "index −1": sl.Plan(sl.add(v, coef=2.0, where=sl.where.index(-1))),
        "schedule": sl.Plan(sl.add(v, coef=2.0, schedule=sl.schedule.linear(1.0, 0.0, over=4))),
        "all": sl.Plan(sl.add(v, coef=2.0, where=sl.where.all())),
        "the token before the last": sl.Plan(sl.add(v, coef=2.0, where=sl.where.index(-2))),
        "the fifth token": sl.Plan(sl.add(v, coef=2.0, where=sl.where.index(4))),
        "condition": sl.Plan(sl.add(v, coef=2.0, when=sl.when(w, above=0.0))),
        "condition, a later layer": sl.Plan(
            sl.add(v, coef=2.0, when=sl.when(random_vector(engine, layer=3), above=0.0), where=sl.where.generated())
        ),
        "condition, all": sl.Plan(
            sl.add(v, coef=2.0, when=sl.when(w, above=0.0), where=sl.where.all() & ~sl.where.index(0))
        ),
        "mask": sl.Plan(sl.add(v, coef=2.0, where=sl.where.mask([[True, False, True]]))),
        "ids": sl.Plan(sl.add(v, coef=2.0, where=sl.where.ids(7))),
        "after a token": sl.Plan(sl.add(v, coef=2.0, where=sl.where.after([7]))),
    }


SHARING = ["nothing", "last", "last, two edits", "generated", "index −1", "schedule"]
OTHERS = ["all", "the token before the last", "the fifth token", "condition"]
OTHERS += ["condition, a later layer", "condition, all", "mask", "ids", "after a token"]


def test_which_plans_leave_the_beginning_alone(tiny_llama_engine):
    plans = {name: sl.Plan() if plan is None else plan for name, plan in plans_of(tiny_llama_engine).items()}
    assert list(plans) == SHARING + OTHERS
    leaving = [name for name, plan in plans.items() if edits_from_the_last_token(plan, {3, 6, 20})]
    assert [name for name in leaving if not plans[name].conditions] == SHARING
    short = [name for name, plan in plans.items() if edits_from_the_last_token(plan, {3, 5})]
    assert [name for name in short if not plans[name].conditions] == [*SHARING, "the fifth token"]


@pytest.mark.parametrize("budget", [4096, 24])
def test_many_plans_in_a_call_give_what_each_gives_alone(tiny_engine, budget, monkeypatch):
    _, engine = tiny_engine
    monkeypatch.setattr(engine, "batch_tokens", budget)
    plans = list(plans_of(engine).values())
    together = engine.score(PROMPTS * len(plans), TARGETS * len(plans), plan=[p for p in plans for _ in PROMPTS])
    alone = [engine.score(PROMPTS, TARGETS, plan=[plan] * len(PROMPTS)) for plan in plans]
    assert [one.token_log_probs for one in together] == [one.token_log_probs for scores in alone for one in scores]
    edits = [[(edit.edited, edit.expected) for edit in receipt.edits] for receipt in together.receipts]
    assert edits == [[(e.edited, e.expected) for e in r.edits] for scores in alone for r in scores.receipts]


@pytest.mark.parametrize("name", SHARING + OTHERS)
def test_a_prompt_in_two_steps_gives_what_it_gives_whole(tiny_engine, name):
    _, engine = tiny_engine
    plan = plans_of(engine)[name]
    found = engine.score(PROMPTS, TARGETS, plan=[plan] * len(PROMPTS))
    expected = engine.score(PROMPTS, TARGETS, plan=plan)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-5)
    for ours, theirs in zip(found.receipts, expected.receipts, strict=True):
        assert (ours.prompt_index, ours.row_index, ours.plan_hash) == (
            theirs.prompt_index,
            theirs.row_index,
            theirs.plan_hash,
        )
        for a, b in zip(ours.edits, theirs.edits, strict=True):
            assert (a.edited, a.expected) == (b.edited, b.expected)
            assert a.mean_relative_change == pytest.approx(b.mean_relative_change, rel=1e-4, nan_ok=True)


def test_what_no_plan_edits_runs_once(tiny_llama_engine, monkeypatch):
    seen = passes(monkeypatch)
    v = random_vector(tiny_llama_engine)
    plans = [None, *(sl.Plan(sl.add(v, coef=coef)) for coef in (1.0, 2.0, 3.0))]
    prompts = [[5, 6, 7, 8], [9, 8, 7, 6], [5, 6, 7, 9]]  # the first and the last begin alike
    tiny_llama_engine.score(prompts * 4, [[[11]]] * 12, plan=[plan for plan in plans for _ in prompts])
    assert seen == [(2, 3), *[(3, 1)] * 4]


def test_plans_on_other_prompts_share_nothing(tiny_llama_engine, monkeypatch):
    """Their rows would be padded otherwise than by themselves, and their numbers differ in the last digits."""
    seen = passes(monkeypatch)
    v = random_vector(tiny_llama_engine)
    prompts = [[5, 6, 7, 8], [9, 8, 7, 6, 5]]
    tiny_llama_engine.score(prompts, [[[11]], [[12]]], plan=[None, sl.Plan(sl.add(v, coef=1.0))])
    assert seen == [(1, 3), (1, 1), (1, 4), (1, 1)]


def test_a_function_of_ones_own_measures_the_same(tiny_llama_engine):
    v = random_vector(tiny_llama_engine)
    measures = {"largest": lambda logits, tokens: logits.max(dim=-1).values}
    plans = [sl.Plan(sl.add(v, coef=coef)) for coef in (1.0, 2.0)]
    given = [plan for plan in plans for _ in PROMPTS]
    together = tiny_llama_engine.measure(PROMPTS * 2, TARGETS * 2, measures, plan=given)
    alone = [one for plan in plans for one in tiny_llama_engine.measure(PROMPTS, TARGETS, measures, plan=plan)]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["largest"].tolist() == pytest.approx(theirs["largest"].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["mistral_narrow", "gemma3_narrow", "mamba"])
def test_every_kind_of_cache(family, name):
    """Sliding windows, and a state that no cache can be chosen from: such rows run whole."""
    engine, _ = family(name)
    plan = sl.Plan(sl.add(random_vector(engine), coef=2.0))
    together = engine.score(PROMPTS * 2, TARGETS * 2, plan=[None] * len(PROMPTS) + [plan] * len(PROMPTS))
    alone = [one for given in (None, plan) for one in engine.score(PROMPTS, TARGETS, plan=given)]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-4)


@pytest.mark.parametrize("targets", [[" !", "ble"], ["ble", " !"]], ids=str)
def test_a_span_is_looked_for_in_every_context_of_a_prompt(tiny_gpt2_engine, targets):
    """The second target merges with the whole prompt; of the contexts, one token each, only one holds the span."""
    where = sl.where.span("a") | sl.where.generated()
    plan = sl.Plan(sl.add(random_vector(tiny_gpt2_engine), coef=5.0, where=where))
    for given in (plan, [plan]):
        with pytest.raises(sl.PlanError, match="ends at the end of prompt 0"):
            tiny_gpt2_engine.score(["a"], [targets], plan=given)


def test_dose_zero_in_a_list_equals_no_plan_to_the_bit(tiny_engine):
    _, engine = tiny_engine
    plans = [plan.scaled(0) for plan in plans_of(engine).values() if plan is not None and not plan.conditions]
    assert len(plans) == 11
    expected = engine.score(PROMPTS, TARGETS, plan=[None] * len(PROMPTS)).token_log_probs
    for plan in plans:
        assert engine.score(PROMPTS, TARGETS, plan=[plan] * len(PROMPTS)).token_log_probs == expected
