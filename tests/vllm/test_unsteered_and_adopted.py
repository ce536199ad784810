"""Engines that wire no layer, and a `vllm.LLM` that the user has started."""

import itertools
import math
import warnings
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.engines.vllm._client.reproducible import check_reproducible, irreproducible
from steerlab.engines.vllm._wire.config import KEY, SteeringConfig
from steerlab.engines.vllm.adopting import adopted_config

PROMPTS = ["Where did you put the keys?", "She opened the window, because the room was warm and quiet"]
TARGETS = [[" on the table", " four"]] * 2
GREEDY = {"policy": sl.SamplingPolicy.greedy(), "max_new_tokens": 8}


# --- no layer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unsteered(start, tiny_path):
    """An engine without layers, of a model in which no stream is looked for."""
    from steerlab.engines.vllm._worker import wiring

    def refused(*_):
        raise sl.HookPointError("no stream can be identified")

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wiring, "find_layers", refused)
            patch.setattr(wiring, "probe", refused)
            engine = stack.enter_context(start(tiny_path, layers=[]))
        yield engine


@pytest.mark.vllm
@pytest.mark.slow
def test_without_layers_texts_are_scored_and_continued(unsteered, lens):
    found, expected = unsteered.score(PROMPTS, TARGETS), lens.score(PROMPTS, TARGETS)
    assert [row.log_prob for row in found] == pytest.approx([row.log_prob for row in expected], abs=1e-3)
    again = unsteered.score(PROMPTS, TARGETS)
    assert [row.log_prob for row in again] == pytest.approx([row.log_prob for row in found], abs=1e-5)
    rows, theirs = unsteered.generate(PROMPTS, **GREEDY), lens.generate(PROMPTS, **GREEDY)
    assert [row.token_ids for row in rows] == [row.token_ids for row in theirs]
    assert unsteered.traits.layers == ()


@pytest.mark.vllm
@pytest.mark.slow
def test_without_layers_nothing_is_steered_or_read(unsteered, vector):
    plan = sl.Plan(sl.add(vector(1), coef=1.0))
    with pytest.raises(sl.PlanError, match=r"started with layers=\[\]. Start it with layers=\[1\]"):
        unsteered.score(PROMPTS, TARGETS, plan=plan)
    with pytest.raises(sl.PlanError, match=r"started with layers=\[\]"):
        unsteered.capture(PROMPTS, layers=[1])
    assert len(unsteered.score(PROMPTS, TARGETS)) == 4  # the engine goes on


# --- the same text twice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "dtype", "found"),
    [
        ([-1.0, -2.0], "float32", None),
        ([-1.0, -2.05], "bfloat16", None),
        ([-1.0, -2.05], "float32", "-3.00 and -3.05 nats in all"),
        ([-1.0, -3.0], "bfloat16", "-3.00 and -4.00 nats in all"),
        ([-1.0, math.nan], "float32", "-3.00 and nan nats in all"),
    ],
)
def test_what_counts_as_irreproducible(second, dtype, found):
    assert irreproducible(np.array([-1.0, -2.0]), np.array(second), dtype) == found


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_scores_otherwise_each_time_is_named(unsteered, monkeypatch):
    connection, info = unsteered._running, unsteered.info
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_reproducible(connection, info)
    worker = unsteered.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    measuring = worker.steerlab_wired.state.measuring
    head, fill, calls = measuring.head, measuring.head.fill, itertools.count()

    def drifting(hidden, out):
        fill(hidden, out)
        out[:, next(calls)] += 1.0

    monkeypatch.setattr(measuring, "head", replace(head, fill=drifting))
    with pytest.warns(UserWarning, match=r"same text of 24 tokens twice and found .* nats .*LlamaForCausalLM"):
        check_reproducible(connection, info)


# --- adopted ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_path, started_with_vllm):
    with started_with_vllm() as make:
        yield make(str(tiny_path), additional_config={**sl.vllm_config(layers=[1]), "mine": 1})


@pytest.mark.vllm
@pytest.mark.slow
def test_an_adopted_llm_steers_scores_and_goes_on(llm, lens, vector):
    from vllm import SamplingParams

    plan = sl.Plan(sl.add(vector(1), coef=4.0))
    engine = sl.VLLMEngine.adopt(llm)
    assert engine.llm is llm
    assert engine.config.points == (HookPoint(1),)
    for each in (None, plan):
        found, expected = engine.score(PROMPTS, TARGETS, plan=each), lens.score(PROMPTS, TARGETS, plan=each)
        assert [row.log_prob for row in found] == pytest.approx([row.log_prob for row in expected], abs=1e-3)
    rows = engine.generate(PROMPTS, plan=plan, **GREEDY)
    assert [row.token_ids for row in rows] == [row.token_ids for row in lens.generate(PROMPTS, plan=plan, **GREEDY)]
    assert [receipt.edited for receipt in rows.receipts] == [1 + 7] * 2
    engine.close()
    own = llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    (plain,) = lens.generate(PROMPTS[:1], **GREEDY)
    assert list(own[0].outputs[0].token_ids) == plain.token_ids


@pytest.mark.vllm
@pytest.mark.slow
def test_sequence_prob_takes_an_llm(llm, lens):
    from steerlab.vllm import SequenceProb

    found = SequenceProb(llm).get_log_prob(PROMPTS, TARGETS[0])
    expected = [row.log_prob for row in lens.score(PROMPTS, TARGETS)]
    assert [row["log_prob"] for row in found] == pytest.approx(expected, abs=1e-3)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("additional", [{}, {"mine": 1}, {KEY: None}])
def test_an_llm_of_another_start_is_refused_with_what_to_do(llm, additional, monkeypatch):
    monkeypatch.setattr(llm.llm_engine.vllm_config, "additional_config", additional)
    with pytest.raises(sl.InputError, match=r"additional_config=sl\.vllm_config\(layers=\[…\]\), or layers=\[\]"):
        sl.VLLMEngine.adopt(llm)


def test_what_is_no_llm_is_refused():
    with pytest.raises(sl.InputError, match=r"adopt takes a vllm\.LLM, got str"):
        adopted_config("llm")


def test_an_llm_whose_log_probs_are_others_is_refused():
    model = SimpleNamespace(logprobs_mode="processed_logprobs", runner_type="generate")
    config = SimpleNamespace(additional_config=sl.vllm_config(layers=[1]), model_config=model)
    with pytest.raises(sl.InputError, match="logprobs_mode='processed_logprobs'"):
        adopted_config(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)))


# --- the configuration --------------------------------------------------------------------------------------------


def test_a_configuration_is_what_the_workers_read():
    made = sl.vllm_config(layers=[3, 1], sites=["mlp_out", "resid_post"], capture_tokens=0)
    read = SteeringConfig.of(SimpleNamespace(additional_config=made))
    assert read == SteeringConfig((1, 3), sites=("mlp_out", "resid_post"), capture_tokens=0)
    assert sl.vllm_config(layers=[])[KEY]["layers"] == []
    assert sl.vllm_config(layers=2)[KEY]["layers"] == [2]
    assert sl.vllm_config(layers=range(2))[KEY]["layers"] == [0, 1]


@pytest.mark.parametrize("layers", ["all", -1, [0, -1], "0"])
def test_layers_that_need_the_model_say_so(layers):
    with pytest.raises(sl.InputError, match="cannot be numbered without the model: pass model= too"):
        sl.vllm_config(layers=layers)


def test_a_layer_is_named_once():
    with pytest.raises(sl.HookPointError, match="twice"):
        sl.vllm_config(layers=[1, 1])


@pytest.mark.vllm
def test_with_the_model_all_layers_can_be_named(tiny_path):
    n_layers = len(sl.vllm_config(layers="all", model=tiny_path)[KEY]["layers"])
    assert sl.vllm_config(layers=-1, model=tiny_path)[KEY]["layers"] == [n_layers - 1]
