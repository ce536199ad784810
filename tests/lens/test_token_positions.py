"""Positions by generated tokens on the TransformerLens engine: every way of running it edits and counts the same."""

import pytest
import torch

import steerlab as sl
from tests.tiny_models import build_tiny_llama

GREEDY = sl.SamplingPolicy.greedy()
PROMPTS = ["Two plus two equals four", "She opened", "Where did you put the keys this morning?"]
w = sl.where


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with sl.load(build_tiny_llama(tmp_path_factory.mktemp("tokens") / "llama", context=128), device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def plan(engine):
    """Spans that open and close and open again on random text, a sequence, and an edit before the first event."""
    vector = sl.SteeringVector.from_tensor(torch.linspace(-1, 1, engine.info.d_model), layer=1)
    even, odd = {*range(0, engine.info.d_vocab, 6)}, {*range(3, engine.info.d_vocab, 6)}
    return sl.Plan(
        sl.add(vector, coef=3.0, where=w.between(even, odd) | w.last_prompt()),
        sl.ablate(vector, where=w.after({7, (8, 9)} | odd, 2, inclusive=True) & w.generated(until=9)),
    )


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=1e-4)
    assert [[e.edited for e in r.edits] for r in ours.receipts] == [
        [e.edited for e in r.edits] for r in theirs.receipts
    ]


def test_every_way_of_running_edits_the_same_tokens(engine, plan):
    options = {"plan": plan, "policy": GREEDY, "max_new_tokens": 14}
    wanted = engine.generate(PROMPTS, engine="bridge", **options)
    edited = [[edit.edited for edit in receipt.edits] for receipt in wanted.receipts]
    assert all(0 < count < 14 + 24 for row in edited for count in row)
    for way in ("fast", "graph"):
        same(engine.generate(PROMPTS, engine=way, **options), wanted)
    rows = [engine.generate([prompt], **options) for prompt in PROMPTS]  # alone: without padding
    assert [row[0].token_ids for row in rows] == [row.token_ids for row in wanted]
    assert [[edit.edited for edit in row.receipts[0].edits] for row in rows] == edited


def test_what_was_generated_is_scored_and_read_under_the_same_edits(engine, plan):
    rows = engine.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=14)
    prompts = [list(ids) for ids in rows.prompt_token_ids]
    scores = engine.score(prompts, [[row.token_ids] for row in rows], plan=plan)
    assert [s.log_prob for s in scores] == pytest.approx([sum(row.token_log_probs) for row in rows], abs=1e-4)
    assert [r.edited for r in scores.receipts] == [r.edited for r in rows.receipts]
    place = plan.edits[0].where
    read = engine.capture(prompts, layers=1, where=place, plan=plan, max_new_tokens=14, policy=GREEDY)
    whole = [[*ids, *row.token_ids[:-1]] for ids, row in zip(prompts, rows, strict=True)]
    shown = [
        sl.explain(sl.Plan(plan.edits[0]), ids, completion=row.token_ids)
        for ids, row in zip(prompts, rows, strict=True)
    ]
    for row, one in enumerate(shown):
        (cells,) = one.cells.values()
        assert list(read.positions[row]) == [p for p, cell in enumerate(cells) if cell]
        assert len(cells) == len(whole[row]) + 1


def test_a_model_of_ones_own_is_edited_as_the_engine_is(engine, plan):
    rows = engine.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=10)
    model = engine.model.original_model
    with plan.applied(engine.model) as following:
        for ids, row in zip(rows.prompt_token_ids, rows, strict=True):
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            n = len(row.token_ids)
            assert out[0, len(ids) : len(ids) + n].tolist() == row.token_ids
            if n == 10:
                assert following.receipts[-1].edited == rows.receipts[row.prompt_index].edited


def test_texts_and_ids_that_the_model_lacks_are_refused(engine):
    vector = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=1)
    for place in (w.ids(engine.info.d_vocab), w.after([1, 10**6], 3)):
        with pytest.raises(sl.PlanError, match="the vocabulary of"):
            engine.generate(PROMPTS, plan=sl.Plan(sl.add(vector, coef=1.0, where=place)), max_new_tokens=2)
        with pytest.raises(sl.PlanError, match="the vocabulary of"):
            engine.capture(PROMPTS, layers=1, where=place)
    ids = engine.tokenizer("?", add_special_tokens=False)["input_ids"]
    plans = [sl.Plan(sl.add(vector, coef=1.0, where=w.after(event))) for event in ("?", ids)]
    named, given = (engine.score(PROMPTS[2:], [[" and more"]], plan=plan) for plan in plans)
    assert named[0].log_prob == given[0].log_prob
    assert named.receipts[0].edited == given.receipts[0].edited > 0
