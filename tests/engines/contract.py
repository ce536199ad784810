"""What every engine does in the same way: a class of tests that takes an engine from its fixture `engine`.

An engine of one's own is tested so:

    @pytest.fixture(scope="module")
    def engine(): ...

    class TestMyEngine(EngineContract):
        pass
"""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import (
    ContextLengthError,
    HookPointError,
    InputError,
    PlanError,
    PromptError,
    TargetError,
    VectorShapeError,
)
from steerlab.measures.quantities import LogDistribution, TokenLogProb

GREEDY = sl.SamplingPolicy.greedy()
SAMPLED = sl.SamplingPolicy(temperature=0.9, top_p=0.8)
PROMPTS = ["The ferry leaves", "Nobody knew why the old clock had stopped", "Two plus two"]
TARGETS = [[" the harbour", " at seven"], [" again"], [" equals four", " is", " three!"]]


def direction(engine, layer, seed=0):
    """A random vector of the engine's width."""
    values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=layer, name=f"random {seed}")


def strong(engine, **options):
    """A plan that changes what is generated."""
    return sl.Plan(sl.add(direction(engine, engine.traits.layers[0]), dose=2.0, **options))


class EngineContract:
    """The tests; `atol` is how far two ways to compute one log-prob may differ, in nats."""

    atol = 1e-3

    # --- what it is ---------------------------------------------------------------------------------------------

    def test_it_is_an_engine_and_says_what_it_runs(self, engine):
        assert isinstance(engine, sl.Engine)
        assert engine.traits.layers
        assert set(engine.traits.layers) <= set(range(engine.info.n_layers))
        assert engine.traits.backend
        assert engine.info.d_vocab >= len(engine.tokenizer) - 8

    # --- generation ---------------------------------------------------------------------------------------------

    def test_completions_are_in_order_of_prompt_then_sample(self, engine):
        made = engine.generate(PROMPTS, policy=SAMPLED, n=2, max_new_tokens=4, seed=3)
        assert [(c.prompt_index, c.sample_index) for c in made] == [(i, g) for i in range(3) for g in range(2)]
        assert len(made.prompt_token_ids) == 3
        for row in made:
            assert len(row.token_ids) == len(row.token_log_probs) == len(row.token_log_qs) <= 4
            assert row.finish_reason in ("eos", "length")
            assert row.log_prob == pytest.approx(math.fsum(row.token_log_probs))

    def test_draws_are_keyed_by_seed_prompt_and_sample(self, engine):
        options = {"policy": SAMPLED, "n": 2, "max_new_tokens": 6}
        first = engine.generate(PROMPTS, seed=1, **options)
        assert [c.token_ids for c in first] == [c.token_ids for c in engine.generate(PROMPTS, seed=1, **options)]
        assert [c.token_ids for c in first] != [c.token_ids for c in engine.generate(PROMPTS, seed=2, **options)]
        assert first[0].token_ids != first[1].token_ids

    def test_a_batch_equals_one_by_one(self, engine):
        for plan in (None, strong(engine)):
            together = engine.generate(PROMPTS, policy=GREEDY, max_new_tokens=5, plan=plan)
            for prompt, row in zip(PROMPTS, together, strict=True):
                (alone,) = engine.generate(prompt, policy=GREEDY, max_new_tokens=5, plan=plan)
                assert row.token_ids == alone.token_ids
                assert row.token_log_probs == pytest.approx(alone.token_log_probs, abs=self.atol)

    def test_generated_tokens_score_as_they_were_generated(self, engine):
        for plan in (None, strong(engine)):
            made = engine.generate(PROMPTS, policy=SAMPLED, max_new_tokens=5, seed=4, plan=plan)
            ids = [list(made.prompt_token_ids[c.prompt_index]) for c in made]
            scores = engine.score(ids, [[list(c.token_ids)] for c in made], plan=plan)
            for row, score in zip(made, scores, strict=True):
                assert row.token_log_probs == pytest.approx(list(score.token_log_probs), abs=self.atol)

    def test_no_new_tokens_give_empty_completions(self, engine):
        made = engine.generate(PROMPTS, max_new_tokens=0)
        assert [c.text for c in made] == [""] * 3
        assert all(len(c.token_ids) == 0 for c in made)

    def test_text_is_cut_before_a_stop_string(self, engine):
        (whole,) = engine.generate(PROMPTS[0], policy=GREEDY, max_new_tokens=8)
        stop = whole.text[2:4]
        (cut,) = engine.generate(PROMPTS[0], policy=GREEDY, max_new_tokens=8, stop=stop)
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]

    # --- plans and receipts -------------------------------------------------------------------------------------

    def test_a_plan_acts_and_dose_zero_does_not(self, engine):
        plain = engine.score(PROMPTS, TARGETS)
        zero = engine.score(PROMPTS, TARGETS, plan=strong(engine).scaled(0))
        assert zero.log_prob == pytest.approx(plain.log_prob, abs=self.atol)
        steered = engine.score(PROMPTS, TARGETS, plan=strong(engine))
        assert np.abs(steered.log_prob - plain.log_prob).min() > 10 * self.atol
        after = engine.score(PROMPTS, TARGETS)
        assert after.log_prob == pytest.approx(plain.log_prob, abs=self.atol)

    def test_each_prompt_has_its_own_plan(self, engine):
        plans = [strong(engine), None, strong(engine).scaled(0.5)]
        together = engine.score(PROMPTS, TARGETS, plan=plans)
        for index, (prompt, plan) in enumerate(zip(PROMPTS, plans, strict=True)):
            alone = engine.score(prompt, TARGETS[index], plan=plan)
            assert [s.log_prob for s in together.of(index)] == pytest.approx(list(alone.log_prob), abs=self.atol)

    def test_results_carry_one_receipt_per_row(self, engine):
        plan = strong(engine, where=sl.where.all())
        scores = engine.score(PROMPTS, TARGETS, plan=plan)
        assert [r.row_index for r in scores.receipts] == list(range(6))
        assert [r.prompt_index for r in scores.receipts] == [0, 0, 1, 2, 2, 2]
        for receipt, score in zip(scores.receipts, scores, strict=True):
            n_prompt = len(engine.tokenizer(PROMPTS[receipt.prompt_index])["input_ids"])
            assert receipt.edited == receipt.expected == n_prompt + score.num_tokens - 1
            assert receipt.plan_hash == plan.hash
            assert 0 < receipt.mean_relative_change < math.inf
        assert list(engine.receipts) == list(scores.receipts)
        made = engine.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=3, n=2)
        assert [(r.prompt_index, r.row_index) for r in made.receipts] == [(i // 2, i) for i in range(6)]
        measured = engine.measure(PROMPTS, TARGETS, {"log_prob": TokenLogProb()}, plan=plan)
        assert [r.edited for r in measured.receipts] == [r.edited for r in scores.receipts]
        read = engine.capture(PROMPTS, layers=engine.traits.layers[0], plan=plan)
        assert len(read.receipts) == 3
        assert all(r.edits == () for r in engine.score(PROMPTS, TARGETS).receipts)

    def test_an_empty_set_of_positions_is_told_of(self, engine):
        with pytest.warns(UserWarning, match="selects no token"):
            engine.score(PROMPTS[0], ["x"], plan=strong(engine, where=sl.where.generated(after=50)))

    # --- scores and measures ------------------------------------------------------------------------------------

    def test_scores_are_the_models_log_softmax(self, engine):
        rows = engine.measure(PROMPTS, TARGETS, {"log_p": LogDistribution(), "log_prob": TokenLogProb()})
        for row, score in zip(rows, engine.score(PROMPTS, TARGETS), strict=True):
            log_p = row["log_p"].astype(np.float64)
            assert np.exp(log_p).sum(axis=-1) == pytest.approx(1.0, abs=1e-4)
            chosen = log_p[np.arange(score.num_tokens), list(score.token_ids)]
            assert chosen == pytest.approx(list(score.token_log_probs), abs=self.atol)
            assert row["log_prob"] == pytest.approx(list(score.token_log_probs), abs=self.atol)

    def test_a_function_of_logits_is_measured_or_refused(self, engine):
        def largest(logits, tokens):
            return logits.amax(dim=-1)

        if engine.traits.takes_functions:
            rows = engine.measure(PROMPTS, TARGETS, {"largest": largest})
            assert [len(row["largest"]) for row in rows] == [s.num_tokens for s in engine.score(PROMPTS, TARGETS)]
        else:
            with pytest.raises(InputError):
                engine.measure(PROMPTS, TARGETS, {"largest": largest})

    def test_variants_and_eos_are_scored(self, engine):
        scores = engine.score(PROMPTS[0], ["the"], variants=("", " "))
        assert scores.variant == ["", " "]
        (longer,) = engine.score(PROMPTS[0], [" the"], score_eos=True)
        assert longer.token_ids == (*scores[1].token_ids, engine.tokenizer.eos_token_id)
        assert longer.token_log_probs[:-1] == pytest.approx(scores[1].token_log_probs, abs=self.atol)

    # --- activations --------------------------------------------------------------------------------------------

    def test_activations_are_what_the_plan_left(self, engine):
        layer, last = engine.traits.layers[0], sl.where.last_prompt()
        vector = direction(engine, layer)
        plain = engine.capture(PROMPTS, layers=layer, where=last, pool="last")
        plan = sl.Plan(sl.add(vector, coef=3.0, where=last))
        steered = engine.capture(PROMPTS, layers=layer, where=last, pool="last", plan=plan)
        assert plain[layer].shape == (3, engine.info.d_model)
        expected = plain[layer] + 3.0 * vector.values.float()
        torch.testing.assert_close(steered[layer], expected, atol=1e-3, rtol=1e-3)

    def test_every_position_can_be_read(self, engine):
        layer = engine.traits.layers[0]
        found = engine.capture(PROMPTS, layers=[layer])
        lengths = [len(engine.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
        assert [len(row) for row in found.positions] == lengths
        assert found[layer].shape == (sum(lengths), engine.info.d_model)
        mean = engine.capture(PROMPTS, layers=[layer], pool="mean")
        torch.testing.assert_close(mean.of(1, layer), found.of(1, layer).mean(dim=0), atol=1e-4, rtol=1e-4)

    def test_the_median_norm_leaves_receipts_alone(self, engine):
        engine.score(PROMPTS, TARGETS, plan=sl.Plan(sl.add(direction(engine, engine.traits.layers[0]), coef=1.0)))
        receipts = list(engine.receipts)
        layer = engine.traits.layers[-1]
        assert engine.median_norm(layer) > 0
        assert engine.median_norm(layer) == engine.median_norm(layer)
        assert list(engine.receipts) == receipts

    # --- input that cannot be used ------------------------------------------------------------------------------

    def test_bad_input_is_one_error_of_ours(self, engine):
        layer = engine.traits.layers[0]
        with pytest.raises(PromptError):
            engine.generate([[]], max_new_tokens=1)
        for table in (pd.DataFrame({"prompt": PROMPTS}), {"prompt": PROMPTS}):
            with pytest.raises(PromptError, match="elements are names"):
                engine.generate(table, max_new_tokens=1)
        with pytest.raises(ContextLengthError):
            engine.generate([[5] * engine.info.context_length], max_new_tokens=5)
        with pytest.raises(TargetError):
            engine.score(PROMPTS[0], [""])
        with pytest.raises(InputError):
            engine.generate(PROMPTS, max_new_tokens=-1)
        with pytest.raises(InputError):
            engine.generate(PROMPTS, n=0)
        with pytest.raises(HookPointError):
            engine.capture(PROMPTS, layers=engine.info.n_layers)
        with pytest.raises(InputError):
            engine.capture(PROMPTS, layers=layer, pool="median")
        with pytest.raises(PlanError):
            engine.score(PROMPTS, TARGETS, plan=[strong(engine)])
        narrow = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model + 1), layer=layer)
        with pytest.raises(VectorShapeError):
            engine.score(PROMPTS, TARGETS, plan=sl.Plan(sl.add(narrow, coef=1.0)))
