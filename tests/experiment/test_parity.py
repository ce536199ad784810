"""Two engines on the same weights: agreement is measured, disagreement is found."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError, PromptError
from steerlab.experiment.measurements.parity import FLOOR, parity

TEXTS = ["The ferry leaves the harbour at seven.", "Nobody knew why the old clock had stopped."]


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), dose=1.0))


@pytest.fixture(scope="module")
def half(tiny_llama_path):
    with sl.load(tiny_llama_path, device="cpu", dtype="bfloat16") as engine:
        yield engine


@pytest.fixture(scope="module")
def found(tiny_llama_engine, half, plan):
    return parity(tiny_llama_engine, half, plan, texts=TEXTS)


class Changed:
    """A real engine whose steered scores are off, or whose receipts are."""

    def __init__(self, engine, *, by=0.0, lost=0):
        self._engine, self._by, self._lost = engine, by, lost

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def score(self, prompts, targets, *, plan=None):
        scores = self._engine.score(prompts, targets, plan=plan)
        if plan is None:
            return scores
        first, *rest = scores
        values = (*first.token_log_probs[:-1], first.token_log_probs[-1] + self._by)
        receipts = tuple(
            replace(r, edits=tuple(replace(e, edited=e.edited - self._lost) for e in r.edits)) for r in scores.receipts
        )
        return replace(scores, rows=(replace(first, token_log_probs=values), *rest), receipts=receipts)


def test_another_dtype_agrees_within_what_it_differs_by_unsteered(found, tiny_llama_engine, plan):
    assert found.passed, str(found)
    assert 0 < found.max_unsteered_delta < 1
    assert found.tolerance == pytest.approx(4 * found.max_unsteered_delta)
    assert "parity: LensEngine" in str(found)
    assert "float32 against" in str(found)
    assert isinstance(found.rows.index, pd.RangeIndex)
    ids = [tiny_llama_engine.tokenizer(text)["input_ids"] for text in TEXTS]
    assert found.rows.token_id.tolist() == [*ids[0][1:], *ids[1][1:]]
    assert found.rows[found.rows.text == 1].position.tolist() == list(range(1, len(ids[1])))
    scores = tiny_llama_engine.score([ids[0][:1]], [[ids[0][1:]]], plan=plan)
    assert found.rows[found.rows.text == 0].log_prob_a.to_numpy() == pytest.approx(
        np.array(scores[0].token_log_probs), abs=1e-5
    )
    assert (found.rows.delta == found.rows.log_prob_b - found.rows.log_prob_a).all()
    assert found.receipts.edited_a.tolist() == [len(ids[0]) - 1, len(ids[1]) - 1]
    assert found.receipts["equal"].all()


def test_the_same_engine_agrees_to_the_bit(tiny_llama_engine, plan):
    same = parity(tiny_llama_engine, tiny_llama_engine, plan, texts=TEXTS)
    assert same.passed
    assert same.max_delta == 0
    assert same.tolerance == FLOOR


def test_continuations_of_prompts_are_scored(tiny_llama_engine, half, plan):
    found = parity(tiny_llama_engine, half, plan, prompts=["The ferry", "A cat sat"], max_new_tokens=5)
    made = tiny_llama_engine.generate(
        ["The ferry", "A cat sat"], plan=plan, policy=sl.SamplingPolicy.greedy(), max_new_tokens=5
    )
    assert found.rows.token_id.tolist() == [token for one in made for token in one.token_ids]
    assert found.rows.position.iloc[0] == len(made.prompt_token_ids[0])


def test_one_wrong_token_is_found(tiny_llama_engine, plan):
    wrong = parity(tiny_llama_engine, Changed(tiny_llama_engine, by=1e-3), plan, texts=TEXTS)
    assert not wrong.passed
    assert wrong.max_delta == pytest.approx(1e-3, rel=1e-3)
    assert "beyond the tolerance" in str(wrong)
    assert parity(tiny_llama_engine, Changed(tiny_llama_engine, by=1e-3), plan, texts=TEXTS, tolerance=0.01).passed


def test_a_lost_edit_is_found(tiny_llama_engine, plan):
    lost = parity(tiny_llama_engine, Changed(tiny_llama_engine, lost=1), plan, texts=TEXTS)
    assert not lost.passed
    assert "2 of 2 receipts differ" in str(lost)


def test_a_plan_too_weak_to_tell_is_no_evidence(tiny_llama_engine, half, plan):
    weak = parity(tiny_llama_engine, half, plan.scaled(1e-6), texts=TEXTS)
    assert not weak.passed
    assert "stronger plan" in str(weak)


def test_what_cannot_be_compared_is_refused(tiny_llama_engine, tiny_gpt2_engine, plan):
    with pytest.raises(InputError, match="same model"):
        parity(tiny_llama_engine, tiny_gpt2_engine, plan, texts=TEXTS)
    for options in ({}, {"texts": TEXTS, "prompts": ["a"]}):
        with pytest.raises(InputError, match="either prompts= to continue or texts="):
            parity(tiny_llama_engine, tiny_llama_engine, plan, **options)
    with pytest.raises(PromptError, match="at least two tokens; text 0 has 1"):
        parity(tiny_llama_engine, tiny_llama_engine, plan, texts=["a"])
    with pytest.raises(InputError, match="tolerance"):
        parity(tiny_llama_engine, tiny_llama_engine, plan, texts=TEXTS, tolerance=-1)
    with pytest.raises(InputError, match="factor"):
        parity(tiny_llama_engine, tiny_llama_engine, plan, texts=TEXTS, factor=0.5)
