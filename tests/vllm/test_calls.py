"""A call from its message to its answer, carried out by a toy engine: whose vectors it may use, and what it may ask."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import steerlab as sl
from steerlab.engines._http.frames import Frame, read_frame
from steerlab.engines._http.plans import plans_message
from steerlab.engines._http.results import scores_in
from steerlab.engines.toy import ToyEngine
from steerlab.engines.vllm._client.capturing import MEDIAN_NORM
from steerlab.engines.vllm._client.requests import Request
from steerlab.engines.vllm._client.served_model import ServedModel
from steerlab.engines.vllm._server.calls import Call, CallCancelled, Desk
from steerlab.engines.vllm._server.plans import PlanMaker
from steerlab.engines.vllm._server.registry import VectorRegistry
from steerlab.engines.vllm._wire.config import SteeringConfig

WIDTH = 32
PAIRS = {"prompts": ["one two", "three"], "targets": [["four", "five"], ["six"]]}


def vector(seed):
    values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=1, name=f"v{seed}")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offered")
    vector(1).save(folder / "north.safetensors")
    engine, config = ToyEngine(), SteeringConfig((0, 1, 2))
    model = ServedModel(engine.info, config, engine.tokenizer, frozenset(), 512)
    maker = PlanMaker(VectorRegistry.read([folder]), config, engine.info)
    loop = asyncio.new_event_loop()
    yield Desk(model, maker, lambda call: engine, None, loop, allows_vectors=False, limit=10_000)
    loop.close()


def asked(desk, what, content, arrays=None, **options):
    """The answer to a call."""
    return read_frame(Call(desk, what, Frame(content, arrays or {}), **options).answer())


def test_a_server_takes_its_own_vectors_and_others_only_if_it_was_told_to(desk):
    offered, other = sl.Plan(sl.add(vector(1), coef=2.0)), sl.Plan(sl.add(vector(2), coef=2.0))
    probed = sl.Plan(sl.add(vector(1), coef=2.0, when=sl.when(vector(3), above=0.0)))
    engine = desk.engine_of(None)
    for plan in (None, offered, [offered, None]):
        content, arrays = plans_message(plan, WIDTH)
        found = scores_in(asked(desk, "score", {**PAIRS, **content}, arrays))
        assert found == engine.score(PAIRS["prompts"], PAIRS["targets"], plan=plan)
    for plan in (other, [None, other], probed, sl.Plan(sl.rotate(vector(1), toward=vector(2), angle=0.2))):
        content, arrays = plans_message(plan, WIDTH)
        with pytest.raises(sl.InputError, match="--allow-vectors"):
            asked(desk, "score", {**PAIRS, **content}, arrays)
        found = scores_in(asked(replace(desk, allows_vectors=True), "score", {**PAIRS, **content}, arrays))
        assert found == engine.score(PAIRS["prompts"], PAIRS["targets"], plan=plan)


def test_a_steering_field_names_offered_vectors(desk):
    steering = {"edits": [{"vector": "north", "coef": 2.0}]}
    found = scores_in(asked(desk, "score", {**PAIRS, "steering": [steering, None]}))
    plan = sl.Plan(sl.add(vector(1), coef=2.0))
    assert [r.plan_hash for r in found.receipts] == [plan.hash, plan.hash, None]
    with pytest.raises(sl.InputError, match="send one"):
        asked(desk, "score", {**PAIRS, "steering": steering, **plans_message(plan, WIDTH)[0]})
    with pytest.raises(sl.InputError, match=r"steering.edits\[0\]"):
        asked(desk, "score", {**PAIRS, "steering": {"edits": [{"vector": "/etc/passwd", "coef": 1.0}]}})


@pytest.mark.parametrize(
    ("what", "content", "fragment"),
    [
        ("score", {**PAIRS, "tragets": 1}, "did you mean 'targets'"),
        ("score", {"prompts": ["a"]}, "targets: the key is missing"),
        ("score", {**PAIRS, "targets": None}, "targets: the key is missing"),
        ("generate", {"prompts": ["a"] * 1000, "n": 66}, "at most 65,536 rows, got 66,000"),
        ("score", {"prompts": ["a"], "targets": [["b"] * 40_000], "variants": ["", " "]}, "got 80,000"),
        ("generate", {"prompts": ["a"], "policy": [1]}, "policy is an object"),
        ("measure", {**PAIRS, "measures": ["h"]}, "measures is an object"),
        ("capture", {"prompts": ["a"], "layers": [1], "where": {"kind": "mask", "rows": [[10**15]]}}, "beyond the"),
        ("median_norm", {"site": "resid_post"}, "layer: the key is missing"),
        ("capture", {"prompts": ["a" * 100], "layers": [0, 1]}, "at most 10,000"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(desk, what, content, fragment):
    with pytest.raises(sl.InputError, match=fragment):
        asked(desk, what, content)


class Recording:
    """Takes rows as the server's runner does, and runs nothing."""

    async def run(self, requests, note):
        return list(requests)


@pytest.mark.parametrize(
    ("what", "content", "run", "fits"),
    [
        ("capture", {"layers": [1]}, "capture", True),
        ("capture", {"layers": [1, 2]}, "capture", False),
        ("capture", {"layers": "all", "pool": "mean"}, "capture", True),
        ("capture", {"layers": [0, 1, 2]}, MEDIAN_NORM, True),
        ("score", {}, MEDIAN_NORM, True),
        ("median_norm", {"layer": 1}, MEDIAN_NORM, True),
    ],
)
def test_the_size_of_a_call_is_that_of_its_answer(desk, what, content, run, fits):
    """And not of all that is wired, nor of what the server reads to know the unit of a dose."""
    request = Request(0, 0, tuple(range(5, 65)), {}, None, read=((0, 60),))  # 60 · 32 · 4 bytes a layer, of 10,000
    call = Call(replace(desk, runner=Recording()), what, Frame(content))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(desk.loop.run_forever)
        try:
            if fits:
                assert call.run([request], run) == [request]
            else:
                with pytest.raises(sl.InputError, match=r"takes 15,360 bytes.*10,000.*fewer prompts, positions or"):
                    call.run([request], run)
        finally:
            desk.loop.call_soon_threadsafe(desk.loop.stop)
            running.result()


def test_a_cancelled_call_does_nothing(desk):
    call = Call(desk, "score", Frame(PAIRS))
    call.cancel()
    with pytest.raises(CallCancelled):
        call.answer()
