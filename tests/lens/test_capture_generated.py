"""Reading activations while generating, and batches: their size, their order, and rows that leave them early."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import steerlab as sl
from steerlab._runtime.decoding import Decoding, eos_token_ids
from steerlab._runtime.rows import Rows
from steerlab.core.errors import InputError
from steerlab.engines.lens import _generating as generating
from tests.lens.helpers import PROMPTS, random_vector, strong_plan

GREEDY = sl.SamplingPolicy.greedy()
HOT = sl.SamplingPolicy(temperature=1.5)


@pytest.fixture
def ending(tiny_engine, monkeypatch):
    """A tiny engine whose rows end at many different steps: a third of the vocabulary ends a text."""
    _, engine = tiny_engine
    ids = [1, *range(3, 384, 12)]
    monkeypatch.setattr(engine.model.original_model.generation_config, "eos_token_id", ids)
    return engine


def never_narrowed(monkeypatch):
    monkeypatch.setattr(Rows, "can_narrow", False)


# --- capture while generating -------------------------------------------------------------------------------------

WHERES = [sl.where.all(), sl.where.generated() | sl.where.last_prompt(), sl.where.prompt(), ~sl.where.index(0, 1)]


@pytest.mark.parametrize("pool", [None, "mean", "last"])
@pytest.mark.parametrize("steered", [False, True])
def test_it_equals_captures_of_the_whole_sequences_afterwards(ending, pool, steered):
    """Several rows that end at different times; with a plan, as edited."""
    plan = None
    if steered:
        # positions 0-based in the whole row, so that the second capture, all prompt, is edited alike
        plan = sl.Plan(sl.add(random_vector(ending, layer=1), coef=2.0, where=~sl.where.index(0)))
    options = {"layers": [0, 2, 3], "pool": pool, "plan": plan}
    found = ending.capture(PROMPTS, where=sl.where.all(), max_new_tokens=10, policy=HOT, seed=5, **options)
    receipts = [r.edited for r in ending.receipts]
    assert len({len(c) for c in found.completion_token_ids}) > 2
    ran = [[*p, *c[:-1]] for p, c in zip(found.prompt_token_ids, found.completion_token_ids, strict=True)]
    after = ending.capture(ran, where=sl.where.all(), **options)
    assert receipts == [r.edited for r in ending.receipts]
    assert found.positions == after.positions == tuple(tuple(range(len(ids))) for ids in ran)
    for layer in options["layers"]:
        for row in range(len(PROMPTS)):
            torch.testing.assert_close(found.of(row, layer), after.of(row, layer), atol=1e-3, rtol=1e-3)
    generated = ending.generate(PROMPTS, plan=plan, max_new_tokens=10, policy=HOT, seed=5)
    assert [tuple(c.token_ids) for c in generated] == list(found.completion_token_ids)


@pytest.mark.parametrize("pool", [None, "mean", "last"])
@pytest.mark.parametrize("where", WHERES, ids=str)
def test_positions_and_pools(tiny_llama_engine, where, pool):
    engine = tiny_llama_engine
    prompts = [p for p in PROMPTS if len(engine.tokenizer(p)["input_ids"]) > 2]
    plan = strong_plan(engine)
    options = {"layers": 2, "max_new_tokens": 6, "plan": plan}
    whole = engine.capture(prompts, where=sl.where.all(), **options)
    found = engine.capture(prompts, where=where, pool=pool, **options)
    assert found.completion_token_ids == whole.completion_token_ids
    for row, ids in enumerate(found.prompt_token_ids):
        length = len(ids) + len(found.completion_token_ids[row]) - 1
        chosen = {
            str(WHERES[0]): range(length),
            str(WHERES[1]): range(len(ids) - 1, length),
            str(WHERES[2]): range(len(ids)),
            str(WHERES[3]): range(2, length),
        }[str(where)]
        assert found.positions[row] == tuple(chosen)
        values = whole.of(row, 2)[list(chosen)]
        expected = {None: values, "mean": values.mean(0), "last": values[-1]}[pool]
        torch.testing.assert_close(found.of(row, 2), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "attn_out", "mlp_out"])
def test_other_sites(tiny_engine, site):
    _, engine = tiny_engine
    found = engine.capture(PROMPTS[:3], layers=1, site=site, max_new_tokens=4)
    ran = [[*p, *c[:-1]] for p, c in zip(found.prompt_token_ids, found.completion_token_ids, strict=True)]
    after = engine.capture(ran, layers=1, site=site)
    torch.testing.assert_close(found[1], after[1], atol=1e-3, rtol=1e-3)


def test_a_plan_per_prompt_keeps_the_order(tiny_llama_engine):
    engine = tiny_llama_engine
    plans = [None, strong_plan(engine), strong_plan(engine).scaled(-1), None, strong_plan(engine), sl.Plan()]
    options = {"layers": 2, "max_new_tokens": 5}
    together = engine.capture(PROMPTS[:6], plan=plans, **options)
    receipts = [(r.plan_hash, r.edited) for r in engine.receipts]
    for row, (prompt, plan) in enumerate(zip(PROMPTS, plans, strict=False)):
        alone = engine.capture([prompt], plan=plan, **options)
        assert together.completion_token_ids[row] == alone.completion_token_ids[0]
        assert receipts[row] == (engine.receipts[0].plan_hash, engine.receipts[0].edited)
        torch.testing.assert_close(together.of(row, 2), alone.of(0, 2), atol=1e-4, rtol=1e-4)


def test_a_row_in_which_nothing_is_selected_is_an_error(tiny_llama_engine):
    with pytest.raises(InputError, match=r"generated\(after=9\) selects no token in prompt 0"):
        tiny_llama_engine.capture(PROMPTS, layers=0, where=sl.where.generated(after=9), max_new_tokens=5)
    # with one new token nothing is ever fed back
    with pytest.raises(InputError, match=r"generated\(\) selects no token"):
        tiny_llama_engine.capture(PROMPTS, layers=0, where=sl.where.generated(), max_new_tokens=1)


# --- rows that leave the batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [HOT, sl.SamplingPolicy(temperature=1.5, repetition_penalty=1.5)])
@pytest.mark.parametrize("name", ["fast", "bridge"])
def test_dropping_finished_rows_changes_nothing(ending, policy, name, monkeypatch):
    plan = sl.Plan(
        sl.add(random_vector(ending, layer=1), coef=2.0, where=sl.where.all()),
        sl.clamp(random_vector(ending, layer=2), hi=0.5, where=sl.where.generated(after=2)),
    )
    options = {"plan": plan, "policy": policy, "max_new_tokens": 14, "n": 2, "seed": 1, "engine": name}
    narrowed, original = [], Rows.narrow
    monkeypatch.setattr(Rows, "narrow", lambda rows, kept: (narrowed.append(len(kept)), original(rows, kept))[1])

    def everything():
        out = ending.generate(PROMPTS, **options)
        receipts = [(r.row_index, [(e.edited, e.expected) for e in r.edits]) for r in ending.receipts]
        changes = [e.mean_relative_change for r in ending.receipts for e in r.edits if e.edited]
        return out, receipts, changes

    out, receipts, changes = everything()
    assert narrowed
    assert narrowed == sorted(narrowed, reverse=True)
    never_narrowed(monkeypatch)
    other, other_receipts, other_changes = everything()
    assert [c.token_ids for c in out] == [c.token_ids for c in other]
    assert [c.finish_reason for c in out] == [c.finish_reason for c in other]
    assert receipts == other_receipts
    assert changes == pytest.approx(other_changes, rel=1e-3)
    for a, b in zip(out, other, strict=True):
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=1e-3)


@pytest.mark.parametrize("pool", [None, "mean", "last"])
def test_dropping_finished_rows_does_not_mix_captures_up(ending, pool, monkeypatch):
    options = {"layers": [1, 3], "pool": pool, "max_new_tokens": 14, "policy": HOT, "plan": strong_plan(ending)}
    found = ending.capture(PROMPTS, **options)
    never_narrowed(monkeypatch)
    other = ending.capture(PROMPTS, **options)
    assert found.completion_token_ids == other.completion_token_ids
    for layer in (1, 3):
        torch.testing.assert_close(found[layer], other[layer], atol=1e-3, rtol=1e-3)


def test_hooks_see_which_rows_are_left(tiny_llama_engine):
    seen = []
    prompts = torch.tensor([[5, 60], [7, 90], [12, 200], [31, 44]])
    free = sl.hooked_generate(
        tiny_llama_engine.model, prompts, 9, "blocks.1.hook_out", lambda value, hook: None, do_sample=False
    )

    def watch(value, hook):
        step = sl.current_step()
        seen.append((step.rows.tolist(), step.live.tolist(), step.positions[:, -1].tolist()))
        assert len(value) == len(step.rows) == len(step.prompt_lens)

    stops = {int(free[0, 2]), int(free[1, 3]), int(free[2, 3])}
    out = sl.hooked_generate(
        tiny_llama_engine.model, prompts, 9, "blocks.1.hook_out", watch, do_sample=False, stop_token_ids=stops
    )
    assert seen[0][0] == [0, 1, 2, 3]
    assert len(seen[-1][0]) < 4
    for index, (rows, live, positions) in enumerate(seen[1:]):
        for row, alive, position in zip(rows, live, positions, strict=True):
            ended = any(int(t) in stops for t in out[row, 2 : 3 + index])
            assert alive == (not ended)
            assert position == (-1 if ended else 2 + index)


# --- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 100, "auto"])
def test_the_batch_size_changes_neither_results_nor_order(ending, batch_size, monkeypatch):
    monkeypatch.setattr(ending, "batch_tokens", 50)
    plans = [strong_plan(ending), None, *[strong_plan(ending)] * 3, None, None, strong_plan(ending).scaled(-1)]
    options = {"policy": HOT, "max_new_tokens": 6, "n": 2, "seed": 2, "plan": plans}
    expected = ending.generate(PROMPTS, batch_size=16, **options)
    expected_receipts = [(r.prompt_index, r.row_index, r.edited) for r in ending.receipts]
    sizes, original = [], generating.GenerationTask.run

    def run(self, jobs, *args):
        sizes.append(len(jobs))
        return original(self, jobs, *args)

    monkeypatch.setattr(generating.GenerationTask, "run", run)
    found = ending.generate(PROMPTS, batch_size=batch_size, **options)
    assert max(sizes) <= (16 if batch_size == "auto" else batch_size)
    assert sum(sizes) == 16
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [(c.prompt_index, c.sample_index) for c in found] == [(i, g) for i in range(8) for g in range(2)]
    assert [(r.prompt_index, r.row_index, r.edited) for r in ending.receipts] == expected_receipts


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "all", None])
def test_a_bad_batch_size_is_refused(tiny_llama_engine, bad):
    with pytest.raises(InputError, match="batch_size"):
        tiny_llama_engine.generate("Hi", max_new_tokens=1, batch_size=bad)


# --- ends and penalties -------------------------------------------------------------------------------------------


def test_every_source_of_eos_ids_counts(tiny_llama_engine, monkeypatch):
    engine = tiny_llama_engine
    model, tokenizer = engine.model.original_model, engine.tokenizer
    (free,) = engine.generate("Hi", policy=GREEDY, max_new_tokens=8)
    tokens = list(dict.fromkeys(free.token_ids))
    places = {token: free.token_ids.index(token) for token in tokens}
    sources = [(model.config, "eos_token_id"), (model.generation_config, "eos_token_id"), (tokenizer, "eos_token")]
    for source, attribute in sources:
        for value in (tokens[2], [tokens[2], 382], [tokens[3], tokens[1]]):
            if attribute == "eos_token":
                value = tokens[2]
            wanted = min(places[t] for t in ([value] if isinstance(value, int) else value) if t in places)
            given = tokenizer.convert_ids_to_tokens(value) if attribute == "eos_token" else value
            before = getattr(source, attribute)
            setattr(source, attribute, given)
            try:
                assert {value} if isinstance(value, int) else set(value) <= eos_token_ids(model, tokenizer)
                (found,) = engine.generate("Hi", policy=GREEDY, max_new_tokens=8)
            finally:
                setattr(source, attribute, before)
            assert found.token_ids == free.token_ids[: wanted + 1]
            assert found.finish_reason == "eos"
    assert eos_token_ids(model, tokenizer) == {1}


@pytest.mark.parametrize("penalty", [1.3, 0.7, 5.0])
def test_the_repetition_penalty_is_huggingfaces(tiny_engine, references, penalty):
    name, engine = tiny_engine
    policy = sl.SamplingPolicy(temperature=0.0, repetition_penalty=penalty)
    out = engine.generate(PROMPTS, policy=policy, max_new_tokens=10)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for completion, prompt in zip(out, out.prompt_token_ids, strict=True):
        ids = torch.tensor([prompt])
        theirs = references(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, repetition_penalty=penalty
        )
        assert completion.token_ids == theirs[0, len(prompt) :].tolist()
        so_far = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
        logits = engine.logits(so_far[0].tolist())[-1:]
        assert int(processor(so_far, logits.clone()).argmax()) == completion.token_ids[-1]
    if penalty > 1:
        plain = engine.generate(PROMPTS, policy=GREEDY, max_new_tokens=10)
        assert [c.token_ids for c in out] != [c.token_ids for c in plain]


def test_on_an_accelerator_rows_are_looked_at_only_now_and_then(ending, monkeypatch):
    """Polling every eighth step gives what polling every step gives."""
    options = {"plan": strong_plan(ending), "policy": HOT, "max_new_tokens": 20, "seed": 6}
    expected = ending.generate(PROMPTS, **options)
    receipts = [r.edited for r in ending.receipts]
    captured = ending.capture(PROMPTS, layers=1, **options)
    monkeypatch.setattr(Decoding, "_polls", lambda self, index, device: index % 8 == 7)
    found = ending.generate(PROMPTS, **options)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [r.edited for r in ending.receipts] == receipts
    seldom = ending.capture(PROMPTS, layers=1, **options)
    assert seldom.positions == captured.positions
    torch.testing.assert_close(seldom[1], captured[1], atol=1e-3, rtol=1e-3)
