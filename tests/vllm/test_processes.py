"""Engines whose workers are processes of their own: tensor parallelism, a clean end, and a worker that dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

import steerlab as sl
from steerlab.engines.vllm._client.processes import descendants, end
from steerlab.measures.quantities import LogDistribution, PolicyEntropy, PolicyLogQ
from tests.vllm import forked
from tests.vllm.conftest import OPTIONS, started
from tests.vllm.ready import start_ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = sl.SamplingPolicy.greedy()
COLD = sl.SamplingPolicy(temperature=0.7, top_p=0.9)
PROMPTS = ["Where did you put the keys?", "She opened the window, because the room was warm", "Two plus two"]


SITES = ["attn_out", "resid_post"]


@pytest.fixture(scope="module")
def plans(vector):
    return [
        sl.Plan(
            sl.add(vector(1), coef=2.0),
            sl.ablate(vector(2), where=sl.where.all()),
            sl.add(vector(2, 3), coef=1.0, where=sl.where.between({*range(0, 384, 12)}, {*range(6, 384, 12)})),
        ),
        None,
        sl.Plan(
            sl.clamp(vector(1), -0.5, 0.5, where=sl.where.all()),
            sl.add(
                vector(2, site="attn_out"),
                coef=1.0,
                norm="keep",
                when=sl.when(vector(2, 5, site="attn_out"), above=-1e9),
            ),
            sl.rotate(vector(2, 1), vector(2, 2), angle=1.0, schedule=sl.schedule.decay(4.0)),
        ),
    ]


@dataclass(frozen=True)
class Said:
    """What an engine says of the prompts.

    Attributes:
        rows: token ids and log-probs of each row that is generated.
        edited: of its receipts.
        read: the stream at layers 1 and 2.
        log_probs: of the tokens of each target.
        measured: of each target, quantities that need the whole vocabulary.
    """

    rows: list[tuple[list[int], list[float]]]
    edited: list[int]
    read: dict[int, np.ndarray]
    log_probs: list[list[float]]
    measured: list[dict[str, np.ndarray]]


def said(engine, plans):
    """What an engine says; log q of what is drawn is what it is scored with."""
    rows = engine.generate(PROMPTS, plan=plans, policy=GREEDY, max_new_tokens=12)
    edited = [receipt.edited for receipt in engine.receipts]
    read = engine.capture(PROMPTS, layers=[1, 2], plan=plans[0])
    targets = [[" on the table", " four"], [" was quiet"], [" equals four", " seven", " and ten"]]
    scores = engine.score(PROMPTS, targets, plan=plans)
    measures = {"h": PolicyEntropy(COLD), "q": PolicyLogQ(COLD), "all": LogDistribution()}
    found = engine.measure(PROMPTS, targets, measures, plan=plans)
    drawn = engine.generate(PROMPTS, plan=plans, policy=COLD, max_new_tokens=8, seed=1)
    again = engine.measure(PROMPTS, [[row.token_ids] for row in drawn], {"q": PolicyLogQ(COLD)}, plan=plans)
    for row, measured in zip(drawn, again, strict=True):
        assert row.token_log_qs == pytest.approx(measured["q"], abs=1e-5)
    return Said(
        [(list(row.token_ids), list(row.token_log_probs)) for row in rows],
        edited,
        {layer: read[layer].numpy() for layer in (1, 2)},
        [list(one) for one in scores.token_log_probs],
        [{name: np.asarray(value) for name, value in one.items()} for one in found],
    )


def assert_alike(ours, theirs, *, atol):
    for a, b in zip(ours.log_probs, theirs.log_probs, strict=True):
        assert a == pytest.approx(b, abs=atol)
    for a, b in zip(ours.measured, theirs.measured, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], atol=5e-5)
    assert [ids for ids, _ in ours.rows] == [ids for ids, _ in theirs.rows]
    for (_, a), (_, b) in zip(ours.rows, theirs.rows, strict=True):
        assert a == pytest.approx(b, abs=5e-5)
    assert ours.edited == theirs.edited
    for layer in (1, 2):
        np.testing.assert_allclose(ours.read[layer], theirs.read[layer], atol=1e-3, rtol=1e-4)


@pytest.fixture(scope="module")
def alone(start, tiny_path, plans):
    """What one rank says."""
    with start(tiny_path, layers=[1, 2], sites=SITES) as engine:
        return said(engine, plans)


@pytest.fixture
def apart(tiny_path, plans, tmp_path):
    """What a function of the model's path and the plans returns, in a process that starts an engine in two more."""

    def run(function):
        log, environment = tmp_path / "log.txt", {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        program = start_ready(function, tiny_path, plans, environment=environment, log=log)
        try:
            assert program.wait(300) == 0, log.read_text()
        finally:
            program.kill()
        return program.value

    return run


def two_ranks(path, plans):
    """What two ranks say; then a call is interrupted, and a worker killed."""
    with started(path, in_process=False, layers=[1, 2], sites=SITES, tensor_parallel_size=2) as engine:
        mine = descendants()
        found = said(engine, plans)
        _interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            _generate_for_ever(engine, plans)
        again = engine.generate(PROMPTS, plan=plans, policy=GREEDY, max_new_tokens=12)
        assert [list(row.token_ids) for row in again] == [ids for ids, _ in found.rows]  # nothing of the call's is left
        worker = next(process for process in mine if "Worker" in process.name())
        threading.Thread(target=_kill_soon, args=(worker,)).start()
        with pytest.raises(sl.SteerlabError, match="worker processes failed or was killed"):
            _generate_for_ever(engine, plans)
    assert not [process for process in mine if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return found


def test_two_ranks_say_what_one_says_and_a_dead_worker_is_reported(apart, alone):
    assert_alike(apart(two_ranks), alone, atol=5e-5)


def two_stages(path, plans):
    """Of each worker, its stage and what is there; and what both say. They are traced, and run without compiled C++."""
    stages = {"pipeline_parallel_size": 2, "enforce_eager": False}
    stages["compilation_config"] = {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}
    with started(path, in_process=False, layers=[1, 2], sites=SITES, **stages) as engine:
        workers = [(worker["pp"], worker["points"], worker["head"] is None) for worker in engine._running.workers]
        return workers, said(engine, plans)


def test_two_pipeline_stages_say_what_one_says(apart, alone):
    workers, found = apart(two_stages)
    assert workers == [(0, [0, 1], True), (1, [2, 3], False)]
    assert_alike(found, alone, atol=2e-5)


def call_for_ever(path, said):
    """Writes down what becomes of a call that is interrupted, and waits."""
    with sl.VLLMEngine(path, layers=[1], **OPTIONS) as engine:
        wanted = [row.token_ids for row in engine.generate(["Two plus two"], max_new_tokens=8)]
        said.write_text("ready\n")
        try:
            while True:
                engine.generate(["Where did you put the keys?"] * 8, max_new_tokens=200)
        except KeyboardInterrupt:
            found = [row.token_ids for row in engine.generate(["Two plus two"], max_new_tokens=8)]
            said.write_text("the same\n" if found == wanted else f"{found} for {wanted}\n")
        time.sleep(600)


def test_an_interrupt_of_the_group_costs_the_call_only_and_no_engine_outlives_its_caller(tiny_path, tmp_path):
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        **forked.environment(tmp_path),
    }
    said, log = tmp_path / "said.txt", tmp_path / "log.txt"
    said.touch()
    caller = start_ready(call_for_ever, str(tiny_path), said, environment=environment, log=log)

    def next_word(last):
        while (word := said.read_text()) == last or not word.endswith("\n"):
            assert caller.poll() is None, log.read_text()
            time.sleep(0.05)
        return word

    try:
        assert next_word("") == "ready\n"
        engines = psutil.Process(caller.pid).children(recursive=True)
        assert len(engines) >= 2
        time.sleep(1)
        os.killpg(caller.pid, signal.SIGINT)  # as a terminal does, and Jupyter
        assert next_word("ready\n") == "the same\n"
    finally:
        caller.kill()
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert not alive


def _generate_for_ever(engine, plans):
    while True:
        engine.generate(PROMPTS * 4, plan=plans * 4, max_new_tokens=64)


def _interrupt_soon():
    threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()


def _kill_soon(process):
    time.sleep(1.0)
    process.send_signal(signal.SIGKILL)


def test_processes_that_hang_are_ended():
    """Two of our own: one that ends when told to, one that must be made to."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for code in ("import time; print(flush=True); time.sleep(60)", deaf)
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    end([psutil.Process(process.pid) for process in started], grace=0.5)
    assert not any(psutil.pid_exists(process.pid) for process in started)
    for process in started:
        process.wait(timeout=5)
