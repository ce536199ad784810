"""What steered requests leave in the prefix cache, and what others find there."""

import numpy as np
import pytest

import steerlab as sl

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = sl.SamplingPolicy.greedy()
BLOCK = 32
PROMPT = [5 + (7 * i) % 300 for i in range(4 * BLOCK + 3)]
OTHER = [9 + (11 * i) % 300 for i in range(3 * BLOCK + 1)]


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    """Room for sixteen requests, and blocks for about four long ones: the others are preempted."""
    with start(tiny_path, layers=[1, 2], num_gpu_blocks_override=26, max_num_batched_tokens=96) as engine:
        yield engine


@pytest.fixture(scope="module")
def plans(vector):
    w = sl.where
    passes = sl.when(vector(1, 5), above=-1e9, read=w.index(3, 30))
    return {
        "plain": None,
        "all": sl.Plan(sl.add(vector(1), coef=2.0, where=w.all())),
        "stronger": sl.Plan(sl.add(vector(1), coef=4.0, where=w.all())),
        "other vector": sl.Plan(sl.add(vector(1, 1), coef=2.0, where=w.all())),
        "other layer": sl.Plan(sl.add(vector(2), coef=2.0, where=w.all())),
        "default": sl.Plan(sl.add(vector(1), coef=4.0)),
        "generated": sl.Plan(sl.add(vector(1), coef=4.0, where=w.generated())),
        "middle": sl.Plan(sl.ablate(vector(1), where=w.index(40, -3))),
        "fading": sl.Plan(sl.add(vector(1), coef=4.0, where=w.all(), schedule=sl.schedule.decay(8.0), norm="keep")),
        "asked": sl.Plan(
            sl.rotate(vector(1), vector(1, 1), angle=1.0, when=passes, where=w.index(40, -3) | w.generated())
        ),
    }


@pytest.fixture(scope="module")
def by_tokens(vector):
    w = sl.where
    return {
        "between": sl.Plan(
            sl.add(
                vector(1),
                coef=4.0,
                where=w.between({PROMPT[3], OTHER[3], OTHER[3] + 3, OTHER[3] + 6}, {31, 130, 170}),
            )
        ),
        "after": sl.Plan(
            sl.add(
                vector(1),
                coef=3.0,
                where=w.after({PROMPT[4], OTHER[4], OTHER[4] + 7, 50, (20, 31)}, 6) & ~w.ids(*range(100, 130)),
            )
        ),
    }


def run(engine, prompt, plan, **options):
    (row,) = engine.generate([prompt], plan=plan, policy=GREEDY, **{"max_new_tokens": 2, **options})
    return row


def fresh(engine, prompt, plan, **options):
    """What an engine says that has seen nothing yet."""
    engine.llm.reset_prefix_cache()
    return run(engine, prompt, plan, **options)


def assert_equal(ours, theirs):
    assert ours.token_ids == theirs.token_ids
    assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-4)


def test_no_order_of_plans_changes_any_answer(engine, plans):
    clean = {name: fresh(engine, PROMPT, plan) for name, plan in plans.items()}
    assert len({tuple(row.token_log_probs) for row in clean.values()}) == len(plans)
    for first, one in plans.items():
        engine.llm.reset_prefix_cache()
        run(engine, PROMPT, one)
        for second, other in plans.items():
            assert_equal(run(engine, PROMPT, other), clean[second])
        assert_equal(run(engine, PROMPT, one), clean[first])


def test_a_random_mixture_answers_as_clean_engines_do(engine, plans):
    rng = np.random.default_rng(0)
    prompts = [PROMPT[:-1], PROMPT, OTHER, PROMPT[: 2 * BLOCK], OTHER[:BLOCK]]
    names = list(plans)
    clean = {(p, n): fresh(engine, prompts[p], plans[n]) for p in range(len(prompts)) for n in names}
    engine.llm.reset_prefix_cache()
    drawn = [(int(rng.integers(len(prompts))), names[rng.integers(len(names))]) for _ in range(250)]
    for start in range(0, len(drawn), 100):
        batch = drawn[start : start + 100]
        rows = engine.generate(
            [prompts[p] for p, _ in batch], plan=[plans[n] for _, n in batch], policy=GREEDY, max_new_tokens=2
        )
        for key, row in zip(batch, rows, strict=True):
            assert_equal(row, clean[key])


def test_a_continued_prompt_is_not_read_as_generated(engine, vector, seen):
    """The same tokens under the same plan, once as prompt and once generated, are edited at other positions."""
    plan = sl.Plan(sl.add(vector(1), coef=4.0, where=sl.where.index(-4) | sl.where.generated()))
    prompt = [*PROMPT, 11, 12, 13]  # both calls edit something in the block from 128 to 159, and nothing before it
    row = fresh(engine, prompt, plan, max_new_tokens=2 * BLOCK)
    longer = [*prompt, *row.token_ids[:29]]
    warm = run(engine, longer, plan)
    assert seen[-1][0].output.num_cached_tokens == 4 * BLOCK
    assert_equal(warm, fresh(engine, longer, plan))


def test_generated_only_plans_share_the_prompt_with_everybody(engine, plans, seen):
    engine.llm.reset_prefix_cache()
    run(engine, PROMPT, None)
    run(engine, PROMPT, plans["generated"])
    run(engine, PROMPT, plans["default"])
    run(engine, PROMPT, plans["middle"])
    run(engine, PROMPT, plans["all"])
    cached = [outcome.output.num_cached_tokens for (outcome,) in seen]
    assert cached == [0, 4 * BLOCK, 4 * BLOCK, BLOCK, 0]


def test_a_plan_finds_its_own_blocks_and_lists_them(engine, plans, seen):
    first = fresh(engine, PROMPT, plans["all"])
    assert engine.inherited[0].positions == ((),)
    again = run(engine, PROMPT, plans["all"])
    assert_equal(again, first)
    assert seen[-1][0].output.num_cached_tokens == 4 * BLOCK
    assert engine.inherited[0].positions == (tuple(range(4 * BLOCK)),)
    (receipt,) = engine.receipts
    assert receipt.edits[0].edited == receipt.edits[0].expected == len(PROMPT) + len(again.token_ids) - 1


def test_equal_plans_made_apart_share_blocks(engine, plans, vector, seen):
    fresh(engine, PROMPT, plans["all"])
    twin = sl.Plan(sl.add(vector(1), coef=2.0, where=sl.where.all()))
    run(engine, PROMPT, twin)
    assert seen[-1][0].output.num_cached_tokens == 4 * BLOCK


def test_a_salt_keeps_calls_apart(engine, plans, seen):
    fresh(engine, PROMPT, plans["all"])
    run(engine, PROMPT, plans["all"], cache_salt="mine")
    run(engine, PROMPT, plans["all"], cache_salt="mine")
    assert [outcome.output.num_cached_tokens for (outcome,) in seen] == [0, 0, 4 * BLOCK]


def test_preempted_requests_are_edited_as_if_they_had_not_been(engine, plans, by_tokens, seen):
    prompts = [[token + k for token in OTHER[: len(OTHER) - 3 * k]] for k in range(8)]
    names = ("all", "plain", "default", "between", "fading", "asked", "between", "after")
    chosen = [{**plans, **by_tokens}[name] for name in names]
    options = {"policy": sl.SamplingPolicy(temperature=1.0), "seed": list(range(8)), "max_new_tokens": 72}
    alone = []
    for first in range(0, 8, 3):  # for so many there is room
        engine.llm.reset_prefix_cache()
        some = slice(first, first + 3)
        alone += engine.generate(prompts[some], plan=chosen[some], **{**options, "seed": options["seed"][some]})
    assert all(len(outcome.ran) <= 1 for outcomes in seen for outcome in outcomes)
    engine.llm.reset_prefix_cache()
    seen.clear()
    together = engine.generate(prompts, plan=chosen, **options)
    assert any(len(outcome.ran) > 1 for outcome in seen[-1])  # somebody was preempted
    assert len(engine.receipts) == 8
    for ours, theirs in zip(together, alone, strict=True):
        assert_equal(ours, theirs)
