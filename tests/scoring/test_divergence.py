import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.errors import InputError, PlanError, PolicyError, PromptError
from steerlab.measures.divergence import kl
from steerlab.measures.nucleus import policy_log_probs
from steerlab.scoring.divergence import _compare, jensen_shannon
from tests.tiny_models import SENTENCES, build_tiny_llama

TEXT = " ".join(SENTENCES[:4])
SIZES = {"context_length": 40, "stride": 20}


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("other") / "llama", seed=1)


@pytest.fixture(scope="module")
def other(other_path):
    with sl.load(other_path, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), coef=1.0))


# --- formulas -----------------------------------------------------------------------------------------------------


def compared(p, q, policy=None, token=0):
    log_p, log_q = (torch.tensor([row], dtype=torch.float64).log() for row in (p, q))
    return {name: values[0] for name, values in _compare(log_p, log_q, torch.tensor([token]), policy).items()}


def test_a_hand_worked_case():
    found = compared([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], token=1)
    assert found["kl"] == pytest.approx(0.25 * math.log(2))  # ½ ln 2 − ¼ ln 2
    assert found["reverse_kl"] == pytest.approx(0.25 * math.log(2))
    middle = [0.375, 0.375, 0.25]
    js = 0.5 * math.log(0.5 / middle[0]) + 0.25 * math.log(0.25 / middle[1])
    assert found["jensen_shannon"] == pytest.approx(js)
    assert (found["nll_a"], found["nll_b"]) == (pytest.approx(math.log(4)), pytest.approx(math.log(2)))
    assert (found["overlap"], found["reverse_overlap"]) == (pytest.approx(1), pytest.approx(1))


def test_disjoint_supports_are_infinite_under_the_policy_and_finite_without():
    p, q = [0.6, 0.3, 0.1], [0.1, 0.3, 0.6]
    greedy = compared(p, q, sl.SamplingPolicy(temperature=0))
    assert greedy["kl"] == greedy["reverse_kl"] == math.inf
    assert greedy["jensen_shannon"] == pytest.approx(math.log(2))
    assert greedy["overlap"] == greedy["reverse_overlap"] == 0
    assert math.isfinite(compared(p, q)["kl"])


def test_partly_overlapping_supports():
    # top_p = 0.8 keeps {0, 1} of p and {1, 2} of q
    found = compared([0.6, 0.3, 0.1], [0.1, 0.3, 0.6], sl.SamplingPolicy(top_p=0.8))
    assert found["kl"] == math.inf
    assert found["overlap"] == pytest.approx(1 / 3)
    assert found["nll_a"] == pytest.approx(-math.log(0.6))  # of the softmax, whatever the policy
    inside = compared([0.98, 0.01, 0.01], [0.5, 0.4, 0.1], sl.SamplingPolicy(top_p=0.8))
    assert inside["kl"] == pytest.approx(-math.log(0.5 / 0.9))
    assert inside["reverse_kl"] == math.inf
    assert (inside["overlap"], inside["reverse_overlap"]) == (pytest.approx(1), pytest.approx(0.5 / 0.9))


logits = st.lists(st.floats(-8, 8), min_size=5, max_size=5)


@given(logits, logits)
def test_against_scipy_and_its_properties(a, b):
    log_p, log_q = (torch.tensor(row, dtype=torch.float64).log_softmax(-1) for row in (a, b))
    p, q = log_p.exp().numpy(), log_q.exp().numpy()
    found = compared(p.tolist(), q.tolist())
    assert found["kl"] == pytest.approx(rel_entr(p, q).sum(), abs=1e-9)
    assert found["kl"] == pytest.approx(kl(log_p, log_q).item(), abs=1e-12)
    m = (p + q) / 2
    js = jensen_shannon(log_p, log_q).item()
    assert js == pytest.approx((rel_entr(p, m).sum() + rel_entr(q, m).sum()) / 2, abs=1e-9)
    assert 0 <= js <= math.log(2) + 1e-12
    assert js == pytest.approx(jensen_shannon(log_q, log_p).item(), abs=1e-12)


# --- on engines ---------------------------------------------------------------------------------------------------


def test_two_models_position_by_position(tiny_llama_engine, other, tiny_llama_path, other_path):
    found = sl.divergence(tiny_llama_engine, other, TEXT)
    ids = tiny_llama_engine.tokenizer(TEXT)["input_ids"]
    models = [
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        for path in (tiny_llama_path, other_path)
    ]
    with torch.no_grad():
        p, q = (model(torch.tensor([ids])).logits[0, :-1].double().softmax(-1).numpy() for model in models)
    assert found.positions.tolist() == list(range(1, len(ids)))
    assert found.token_ids.tolist() == ids[1:]
    assert found.kl == pytest.approx(rel_entr(p, q).sum(-1), abs=1e-4)
    assert found.reverse_kl == pytest.approx(rel_entr(q, p).sum(-1), abs=1e-4)
    assert found.nll_a == pytest.approx(-np.log(p[np.arange(len(ids) - 1), ids[1:]]), abs=1e-4)
    assert found.nll_b == pytest.approx(sl.perplexity(other, TEXT).token_nlls, abs=1e-4)
    assert found.mean_kl == pytest.approx(found.kl.mean())
    frame = found.to_frame()
    assert list(frame.columns) == [
        *("position", "token_id", "kl", "reverse_kl", "jensen_shannon"),
        *("overlap", "reverse_overlap", "nll_a", "nll_b"),
    ]
    assert len(frame) == found.num_tokens == len(ids) - 1


def test_a_plan_against_the_model_itself(tiny_llama_engine, plan):
    engine = tiny_llama_engine
    same = sl.divergence(engine, engine, TEXT, **SIZES)
    assert same.kl.max() == same.reverse_kl.max() == 0
    assert same.jensen_shannon.max() < 1e-15
    zero = sl.divergence(engine, engine, TEXT, **SIZES, plan_a=plan.scaled(0.0))
    assert zero.kl.max() == 0
    steered = sl.divergence(engine, engine, TEXT, **SIZES, plan_a=plan)
    assert steered.kl.min() > 0
    assert steered.nll_a == pytest.approx(sl.perplexity(engine, TEXT, **SIZES, plan=plan).token_nlls, abs=1e-4)
    assert steered.nll_b == pytest.approx(sl.perplexity(engine, TEXT, **SIZES).token_nlls, abs=1e-4)
    turned = sl.divergence(engine, engine, TEXT, **SIZES, plan_b=plan)
    assert turned.kl == pytest.approx(steered.reverse_kl, abs=1e-6)
    assert (steered.context_length, steered.stride) == (40, 20)


def test_under_a_policy(tiny_llama_engine, plan):
    policy = sl.SamplingPolicy(temperature=0.7, top_p=0.5)
    found = sl.divergence(tiny_llama_engine, tiny_llama_engine, TEXT, plan_a=plan, policy=policy)
    ids = tiny_llama_engine.tokenizer(TEXT)["input_ids"]
    (edit,) = plan
    everywhere = sl.Plan(sl.add(edit.vector, coef=1.0, where=sl.where.all()))
    logits = [tiny_llama_engine.logits(ids, plan=one)[:-1].double() for one in (everywhere, None)]
    a, b = (policy_log_probs(row, policy) for row in logits)
    lost = (a.exp() * (b == -math.inf)).sum(-1)
    assert 0 < found.num_infinite < found.num_tokens
    assert found.num_infinite == (lost > 0).sum()
    assert found.overlap == pytest.approx((1 - lost).numpy(), abs=1e-4)
    assert not np.isnan(found.kl).any()
    assert found.mean_kl == math.inf
    assert found.policy == policy
    assert found.jensen_shannon.max() <= math.log(2) + 1e-9


def test_default_windows_hold_a_bounded_table(tiny_llama_engine, monkeypatch):
    from steerlab.scoring import divergence as module

    monkeypatch.setattr(module, "WINDOW_BYTES", 4 * 384 * 30)
    monkeypatch.setattr(module, "ROWS", 7)
    found = sl.divergence(tiny_llama_engine, tiny_llama_engine, TEXT)
    assert found.context_length == 30
    assert found.num_tokens == len(tiny_llama_engine.tokenizer(TEXT)["input_ids"]) - 1


class Renamed:
    """An engine with something else in its place."""

    def __init__(self, engine, **other):
        self.__dict__.update(engine=engine, **other)

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_other_vocabularies_are_refused(tiny_llama_engine, lens_engine):
    with pytest.raises(InputError, match="49152"):
        sl.divergence(tiny_llama_engine, lens_engine, TEXT)
    swapped = type("Tokenizer", (), {"get_vocab": lambda self: {"a": 1, "b": 0}})()
    with pytest.raises(InputError, match="The tokenizers of"):
        sl.divergence(tiny_llama_engine, Renamed(tiny_llama_engine, tokenizer=swapped), TEXT)
    longer = dataclasses.replace(tiny_llama_engine.info, context_length=20)
    found = sl.divergence(tiny_llama_engine, Renamed(tiny_llama_engine, info=longer), TEXT[:80])
    assert found.context_length == 20


def test_what_cannot_be_compared(tiny_llama_engine):
    with pytest.raises(PolicyError, match="repetition_penalty"):
        sl.divergence(tiny_llama_engine, tiny_llama_engine, TEXT, policy=sl.SamplingPolicy(repetition_penalty=1.2))
    with pytest.raises(PromptError):
        sl.divergence(tiny_llama_engine, tiny_llama_engine, "")
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    placed = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.index(3)))
    with pytest.raises(PlanError, match="windows"):
        sl.divergence(tiny_llama_engine, tiny_llama_engine, TEXT, **SIZES, plan_b=placed)


def test_bos_each_window_is_that_of_perplexity(tiny_llama_engine, other):
    options = {"context_length": 20, "stride": 10, "bos_each_window": True}
    found = sl.divergence(tiny_llama_engine, other, TEXT, **options)
    for nll, engine in ((found.nll_a, tiny_llama_engine), (found.nll_b, other)):
        expected = sl.perplexity(engine, TEXT, **options)
        np.testing.assert_allclose(nll, expected.token_nlls, atol=1e-5)
    assert found.positions.tolist() == list(range(expected.num_tokens))
    without = sl.divergence(tiny_llama_engine, other, TEXT, context_length=20, stride=10)
    assert without.num_tokens == found.num_tokens - 1
