"""Engines whose workers are processes of their own: tensor parallelism, a clean end, and a worker that dies."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch

import steerlab as sl
from steerlab.engines.vllm._client.processes import descendants, end
from steerlab.measures.quantities import LogDistribution, PolicyEntropy, PolicyLogQ
from tests.vllm import forked

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


def measured(engine, plans):
    rows = engine.generate(PROMPTS, plan=plans, policy=GREEDY, max_new_tokens=12)
    read = engine.capture(PROMPTS, layers=[1, 2], plan=plans[0])
    return rows, list(engine.receipts), read


def scored(engine, plans):
    """Log-probs, quantities that need the whole vocabulary, and log q of what is drawn."""
    targets = [[" on the table", " four"], [" was quiet"], [" equals four", " seven", " and ten"]]
    scores = engine.score(PROMPTS, targets, plan=plans)
    measures = {"h": PolicyEntropy(COLD), "q": PolicyLogQ(COLD), "all": LogDistribution()}
    found = engine.measure(PROMPTS, targets, measures, plan=plans)
    drawn = engine.generate(PROMPTS, plan=plans, policy=COLD, max_new_tokens=8, seed=1)
    again = engine.measure(PROMPTS, [[row.token_ids] for row in drawn], {"q": PolicyLogQ(COLD)}, plan=plans)
    for row, measured in zip(drawn, again, strict=True):
        assert row.token_log_qs == pytest.approx(measured["q"], abs=1e-5)
    return scores, found


@pytest.fixture(scope="module")
def alone(start, tiny_path, plans):
    """What one rank says."""
    with start(tiny_path, layers=[1, 2], sites=SITES) as engine:
        return *measured(engine, plans), *scored(engine, plans)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # vLLM leaves a socket of a dead engine
def test_two_ranks_say_what_one_says_and_a_dead_worker_is_reported(start, tiny_path, plans, alone, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    before = set(descendants())
    with start(tiny_path, in_process=False, layers=[1, 2], sites=SITES, tensor_parallel_size=2) as engine:
        mine = [process for process in descendants() if process not in before]
        rows, receipts, read = measured(engine, plans)
        scores, found = scored(engine, plans)
        for a, b in zip(scores.token_log_probs, alone[3].token_log_probs, strict=True):
            assert a == pytest.approx(b, abs=5e-5)
        for a, b in zip(found, alone[4], strict=True):
            for name in a:
                np.testing.assert_allclose(a[name], b[name], atol=5e-5)
        for a, b in zip(rows, alone[0], strict=True):
            assert a.token_ids == b.token_ids
            assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=5e-5)
        assert [r.edited for r in receipts] == [r.edited for r in alone[1]]
        torch.testing.assert_close(read[2], alone[2][2], atol=1e-3, rtol=1e-4)
        _interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            _generate_for_ever(engine, plans)
        for a, b in zip(engine.generate(PROMPTS, plan=plans, policy=GREEDY, max_new_tokens=12), rows, strict=True):
            assert a.token_ids == b.token_ids  # nothing of the interrupted call is found here
        worker = next(process for process in mine if "Worker" in process.name())
        threading.Thread(target=_kill_soon, args=(worker,)).start()
        with pytest.raises(sl.SteerlabError, match="worker processes failed or was killed"):
            _generate_for_ever(engine, plans)
    assert not [process for process in mine if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_two_pipeline_stages_say_what_one_says(start, tiny_path, plans, alone, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    stages = {"pipeline_parallel_size": 2, "enforce_eager": False}
    with start(tiny_path, in_process=False, layers=[1, 2], sites=SITES, **stages) as engine:
        workers = engine._running.workers
        rows, receipts, read = measured(engine, plans)
        scores, found = scored(engine, plans)
    assert [(worker["pp"], worker["points"], worker["head"] is None) for worker in workers] == [
        (0, [0, 1], True),
        (1, [2, 3], False),
    ]
    for a, b in zip(scores.token_log_probs, alone[3].token_log_probs, strict=True):
        assert a == pytest.approx(b, abs=2e-5)
    for a, b in zip(found, alone[4], strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], atol=5e-5)
    assert [row.token_ids for row in rows] == [row.token_ids for row in alone[0]]
    assert [r.edited for r in receipts] == [r.edited for r in alone[1]]
    for layer in (1, 2):
        torch.testing.assert_close(read[layer], alone[2][layer], atol=1e-3, rtol=1e-4)


_CALLER = """
import sys, time
import steerlab as sl

if __name__ == "__main__":
    options = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 8}
    with sl.VLLMEngine(sys.argv[1], layers=[1], **options) as engine:
        wanted = [row.token_ids for row in engine.generate(["Two plus two"], max_new_tokens=8)]
        print("ready", flush=True)
        try:
            while True:
                engine.generate(["Where did you put the keys?"] * 8, max_new_tokens=200)
        except KeyboardInterrupt:
            found = [row.token_ids for row in engine.generate(["Two plus two"], max_new_tokens=8)]
            print("the same" if found == wanted else f"{found} for {wanted}", flush=True)
        time.sleep(600)
"""


def test_an_interrupt_of_the_group_costs_the_call_only_and_no_engine_outlives_its_caller(tiny_path, tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(_CALLER)
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HF_HUB_OFFLINE": "1",
        **forked.environment(tmp_path),
    }
    arguments = {"env": environment, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, str(script), str(tiny_path)], **arguments) as caller:
        try:
            _read_until(caller.stdout, "ready")
            engines = psutil.Process(caller.pid).children(recursive=True)
            assert len(engines) >= 2
            time.sleep(1)
            os.killpg(caller.pid, signal.SIGINT)  # as a terminal does, and Jupyter
            assert _read_until(caller.stdout, "the same", "for") == "the same"
        finally:
            caller.kill()
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert not alive


def _read_until(stream, *wanted):
    """The first line that holds one of these, which must come."""
    for line in stream:
        if any(words in line for words in wanted):
            return line.strip()
    pytest.fail(f"The caller ended without a word of {wanted}.")


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
