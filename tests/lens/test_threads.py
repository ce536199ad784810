"""Several threads on one model: a hook acts on every pass, so passes of other calls must not run beside it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch

import steerlab as sl
from tests.lens.helpers import random_vector
from tests.tiny_models import build_tiny_family

GREEDY = sl.SamplingPolicy.greedy()
PROMPT, THREADS, TIMES = [5, 60, 12, 200, 31], 4, 6
CALLS = {
    "generate": lambda engine, plan: engine.generate([PROMPT], plan=plan, policy=GREEDY, max_new_tokens=6).completions,
    "score": lambda engine, plan: engine.score([PROMPT], [[[6, 7, 8]]], plan=plan).rows,
    "capture": lambda engine, plan: engine.capture([PROMPT], layers=[2], plan=plan)[2].tolist(),
    "stream": lambda engine, plan: list(engine.stream(PROMPT, plan=plan, policy=GREEDY, max_new_tokens=6)),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_thread_steers_or_reads_anothers_call(call, tiny_llama_engine):
    plan = sl.Plan(sl.add(random_vector(tiny_llama_engine, layer=1), coef=6.0, where=sl.where.all()))
    expected = [CALLS[call](tiny_llama_engine, each) for each in (None, plan)]
    assert expected[0] != expected[1]
    barrier = Barrier(THREADS)

    def work(k):
        barrier.wait()
        return [CALLS[call](tiny_llama_engine, (None, plan)[k % 2]) for _ in range(TIMES)]

    with ThreadPoolExecutor(THREADS) as pool:
        for k, found in enumerate(pool.map(work, range(THREADS))):
            assert found == [expected[k % 2]] * TIMES


@pytest.mark.parametrize("engine", ["bridge", "fast", "graph"])
def test_parameters_that_a_processor_puts_in_for_a_call_are_in_no_other(engine, tiny_llama_engine):
    """Engine and processor share the tables in which parameters are looked up, and had a lock each."""
    options = {"policy": GREEDY, "max_new_tokens": 6, "engine": engine}
    expected = tiny_llama_engine.generate([PROMPT], **options).completions
    processor = sl.SequenceProcessor(tiny_llama_engine, config={"generation": {"max_new_tokens": 3}})
    sequences = processor.generate_batched([PROMPT], 1, seed=0)
    plain = processor.plain_model()
    others = {name: -parameter.detach() for name, parameter in plain.named_parameters()}
    inside, done = Event(), Event()

    def waits(*_):
        inside.set()
        done.wait(0.3)

    handle = plain.model.norm.register_forward_hook(waits)
    try:
        with ThreadPoolExecutor(1) as pool:
            scored = pool.submit(processor.teacher_force_logprobs, sequences, params_override=others)
            assert inside.wait(10)
            found = tiny_llama_engine.generate([PROMPT], **options).completions
            done.set()
            scored.result()
    finally:
        handle.remove()
    assert found == expected


@pytest.mark.filterwarnings("ignore:A short comparison on this model found:UserWarning")
def test_a_familys_trial_waits_too(tmp_path):
    """Its passes would have met another thread's plan."""
    with sl.load(build_tiny_family(tmp_path / "bloom", "bloom"), device="cpu") as engine:
        plan = sl.Plan(sl.add(random_vector(engine, layer=0), coef=3.0, where=sl.where.all()))
        barrier = Barrier(THREADS)

        def work(_):
            barrier.wait()
            return engine.score([PROMPT], [[[6, 7, 8]]], plan=plan)[0].token_log_probs

        with ThreadPoolExecutor(THREADS) as pool:
            found = set(pool.map(work, range(THREADS)))
        assert found == {engine.score([PROMPT], [[[6, 7, 8]]], plan=plan)[0].token_log_probs}
        assert torch.isfinite(torch.tensor(list(found))).all()
