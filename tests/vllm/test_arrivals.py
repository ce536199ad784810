"""Requests that start together, and what a call that is interrupted leaves behind; on a real engine in this process."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import steerlab as sl
from steerlab.engines.vllm._client.interrupts import DeferredInterrupt
from steerlab.engines.vllm._client.requests import Request
from steerlab.engines.vllm._client.run_requests import WAITS_FOR, first_pass
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.steering._plan_assignment import AssignedPlan

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = ["Where did you put the keys?", "She opened the window, because the room was warm", "Two plus two"]


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    with start(tiny_path, layers=[1]) as engine:
        yield engine


@pytest.fixture
def submit(engine):
    """Submits a request for one token; what is left of them is ended."""
    from vllm import SamplingParams

    def submitting(row, group=None):
        spec = RequestSpec(row, None, group=group)
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=spec.to_args())
        return engine.llm.enqueue([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)

    yield submitting
    engine._running.abandon(list("abcdef"))


def waiting(engine):
    """How many requests the scheduler knows of."""
    return len(engine.llm.llm_engine.engine_core.engine_core.scheduler.requests)


def accounts(engine):
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.steerlab_wired.state.records


def test_none_of_a_group_runs_before_all_have_arrived(engine, submit):
    submit("a", ("first", 3))
    submit("b", ("first", 3))
    assert waiting(engine) == 0
    submit("c")
    submit("d", ("second", 2))
    assert waiting(engine) == 1  # what belongs to no group does not wait, and another group does not count
    submit("e", ("first", 3))
    assert waiting(engine) == 4
    submit("f", ("second", 2))
    assert waiting(engine) == 6
    assert len(engine.llm.wait_for_completion(use_tqdm=False)) == 6


def test_calls_of_several_threads_wait_for_each_other(engine):
    """Two at once broke the engine in this process; its memory, even."""
    values = torch.randn(128, generator=torch.Generator().manual_seed(0))
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), coef=4.0))

    def call(k):
        options = {"policy": sl.SamplingPolicy.greedy(), "max_new_tokens": 24}
        (row,) = engine.generate(PROMPTS[:1], plan=(None, plan)[k % 2], **options)
        return row.token_ids

    expected = [call(0), call(1)]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(12))) == expected * 6


def test_a_group_of_which_some_will_never_come_does_not_wait(engine, submit):
    (mine,) = submit("a", ("third", 3))
    submit("b", ("third", 3))
    engine.llm.llm_engine.abort_request([mine], internal=True)
    assert waiting(engine) == 1
    assert len(engine.llm.wait_for_completion(use_tqdm=False)) == 1


def test_the_first_requests_of_a_scoring_call_share_its_first_pass(engine, monkeypatch):
    core = engine.llm.llm_engine.engine_core.engine_core
    sizes, schedule = [], core.scheduler.schedule

    def noting(*args, **kwargs):
        found = schedule(*args, **kwargs)
        sizes.append(len(found.num_scheduled_tokens))
        return found

    monkeypatch.setattr(core.scheduler, "schedule", noting)
    groups = []
    of = RequestSpec.of
    monkeypatch.setattr(RequestSpec, "of", lambda params: groups.append(of(params)) or groups[-1])
    engine.score(PROMPTS, [[" on", " four"]] * 3)
    assert sizes[0] == 6
    assert {spec.group[1] for spec in groups if spec is not None} == {6}


@pytest.mark.parametrize("prefix", [None, ("shared", 900)], ids=["apart", "shared"])
def test_a_first_pass_is_filled_to_its_share(prefix):
    def request(n_tokens):
        return Request(0, 0, tuple(range(n_tokens)), {}, AssignedPlan(sl.Plan(), None), prefix=prefix)

    requests = [request(1000)] * 40
    step = 1000 if prefix is None else 100
    wanted = min(40, 1 + -(-(WAITS_FOR * 16000 - 1000) // step))
    assert first_pass(requests, 16000, 256) == wanted
    assert first_pass(requests, 16000, 3) == 3
    assert first_pass(requests[:2], 16000, 256) == 2
    assert first_pass([request(60_000), *requests], 16000, 256) == 1


def test_an_interrupted_call_leaves_nothing_behind(engine, vector, monkeypatch):
    plan = sl.Plan(sl.add(vector(1), coef=2.0))
    greedy = {"plan": plan, "policy": sl.SamplingPolicy.greedy(), "max_new_tokens": 12}
    wanted = engine.generate(PROMPTS, **greedy)
    stepping, step = engine.llm.llm_engine, engine.llm.llm_engine.step
    left = [3]

    def interrupted():
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(stepping, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[::-1], plan=plan, max_new_tokens=50)
    assert not accounts(engine)
    assert not stepping.has_unfinished_requests()
    found = engine.generate(PROMPTS, **greedy)
    assert [row.token_ids for row in found] == [row.token_ids for row in wanted]
    assert all(receipt.edits[0].edited == receipt.edits[0].expected for receipt in engine.receipts)
    scores = engine.score(PROMPTS, [[" on"]] * 3, plan=plan)
    assert len(scores) == 3


@pytest.mark.parametrize("moment", ["schedule", "update_from_output"])
def test_an_interrupt_waits_until_a_step_is_whole(engine, monkeypatch, moment):
    """An engine in this process names cache blocks before it fills them."""
    contexts = [[5 + (7 * i + j) % 90 for j in range(100)] for i in range(4)]
    core = engine.llm.llm_engine.engine_core.engine_core
    wanted = engine.score(contexts, [[[7, 8, 9]]] * 4).token_log_probs
    core.reset_prefix_cache()
    usual = getattr(core.scheduler, moment)

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return usual(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.score(contexts, [[[7, 8, 9]]] * 4)
    for a, b in zip(engine.score(contexts, [[[7, 8, 9]]] * 4).token_log_probs, wanted, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_plan_that_did_not_arrive_is_sent_again(engine, vector, monkeypatch):
    from steerlab.engines.vllm._client import run_requests

    plan = sl.Plan(sl.add(vector(1, 5), coef=2.0))
    with monkeypatch.context() as patch:
        patch.setattr(run_requests, "plans_message", lambda plans: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.score(PROMPTS, [[" on"]] * 3, plan=plan)
    assert len(engine.score(PROMPTS, [[" on"]] * 3, plan=plan)) == 3


def test_a_second_interrupt_is_let_through_and_the_engine_says_that_it_is_lost(engine, monkeypatch):
    def interrupted_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second was not let through")

    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.llm_engine, "step", interrupted_twice)
        with pytest.raises(KeyboardInterrupt):
            engine.score(PROMPTS, [[" on"]] * 3)
    with pytest.raises(sl.EngineError, match="was interrupted twice"):
        engine.score(PROMPTS, [[" on"]] * 3)


def test_an_interrupt_that_waits_is_raised_at_the_end_or_where_it_may_be():
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == usual
    with DeferredInterrupt() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
    assert not interrupts.is_torn
    with DeferredInterrupt() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts.is_torn
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_in_another_thread_or_where_interrupts_are_ignored_nothing_is_put_off():
    usual = signal.getsignal(signal.SIGINT)
    seen = []

    def elsewhere():
        with DeferredInterrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [usual]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredInterrupt():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, usual)
