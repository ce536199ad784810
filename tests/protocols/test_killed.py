"""A protocol that was killed in the middle goes on where it stopped, and ends with the same table."""

import os
import signal
from collections.abc import Callable

import pytest

import steerlab as sl
from steerlab.experiment._store import batches
from steerlab.protocols import Concept, ProtocolResult, axbench, caa, cast, iti, refusal, steerability
from tests.protocols.data import BEGUN, ITEMS, THINGS, TRUTH

HARMFUL, HARMLESS = ([f"{word} the {thing}" for thing in THINGS[:4]] for word in ("Hurt", "Feed"))
CONCEPTS = [
    Concept("joy", *[tuple((w, f"{said} day") for w in ("Where?", "Who?", "Why?")) for said in ("happy", "sad")])
]
SHORT = {"max_new_tokens": 2, "training": {"steps": 2, "validation": 0.5}}
MANY = [[f"{word} the {thing}" for thing in THINGS] for word in ("Hurt", "Feed")]


class Fatal:
    """An engine whose process is killed at its n-th call of `score`."""

    def __init__(self, engine: sl.LensEngine, calls: int) -> None:
        self._engine, self._left = engine, calls

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def score(self, *args, **options):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._engine.score(*args, **options)


RUNS: dict[str, Callable[[sl.Experiment], ProtocolResult]] = {
    "steerability": lambda exp: steerability(exp, {"runs": ITEMS}, layers=1, multipliers=[-1, 0, 1, 2]),
    "caa": lambda exp: caa(exp, {"runs": ITEMS}, layers=[1, 2], multipliers=[0, 1]),
    "axbench": lambda exp: axbench(exp, CONCEPTS, ["Where?", "Who?"], layer=1, factors=[1.0], **SHORT),
    "cast": lambda exp: cast(exp, *MANY, BEGUN, layers=2, condition_layers=1),
    "iti": lambda exp: iti(exp, TRUTH, heads=[1, 2], alphas=[1.0], layers=[1], folds=2, texts=["the bread was stale"]),
    "refusal": lambda exp: refusal(
        exp, HARMFUL, HARMLESS, positions=1, layers=[0, 1], max_kl=50, least_induced=-50, late=0
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_goes_on(name, tiny_llama_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "PLANS_PER_CALL", 1)  # calls enough to be killed between them
    engine, run = tiny_llama_engine, RUNS[name]
    with sl.Experiment("whole", engine, root=tmp_path) as exp:
        whole = run(exp)
        in_all = exp._session.cells.measured
    child = os.fork()
    if child == 0:
        run(sl.Experiment("killed", Fatal(engine, 3), root=tmp_path))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    with sl.Experiment("killed", engine, root=tmp_path) as exp:
        assert not exp.results.protocols
        found = run(exp)
        assert 0 < exp._session.cells.measured < in_all
        assert exp._session.cells.resumed > 0
    assert found.table.equals(whole.table)
