"""On a host with two GPUs: the same results as on one, and few copies between them."""

from pathlib import Path

import pytest
import torch

import steerlab as sl

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]
STEPS = 16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


def plan_for(engine: sl.LensEngine, layers: list[int]) -> sl.Plan:
    generator = torch.Generator().manual_seed(0)
    edits = []
    for layer in layers:
        values = torch.randn(engine.info.d_model, generator=generator)
        vector = sl.SteeringVector.from_tensor(values, layer=layer)
        edits += [sl.add(vector, coef=2.0, where=sl.where.all()), sl.clamp(vector, lo=-1.0, hi=1.0)]
    return sl.Plan(*edits)


@pytest.fixture(scope="module")
def engines(tiny_llama_path: Path) -> tuple[sl.LensEngine, sl.LensEngine]:
    return sl.load(tiny_llama_path, device="cuda:0"), sl.load(tiny_llama_path, n_devices=2)


@pytest.mark.parametrize("engine", ["bridge", "fast", "graph"])
@pytest.mark.parametrize("layers", [[1], [3], [0, 1, 2, 3]])
def test_two_devices_equal_one(engines: tuple[sl.LensEngine, sl.LensEngine], engine: str, layers: list[int]) -> None:
    one, two = engines
    policy = sl.SamplingPolicy(temperature=0)
    found = [
        e.generate(PROMPTS, plan=plan_for(e, layers), policy=policy, max_new_tokens=STEPS, engine=engine)
        for e in engines
    ]
    assert [c.token_ids for c in found[0]] == [c.token_ids for c in found[1]]
    assert [r.edited for r in one.receipts] == [r.edited for r in two.receipts]


@pytest.mark.parametrize("layers", [[3], [0, 1, 2, 3]])
def test_copies_per_step(engines: tuple[sl.LensEngine, sl.LensEngine], layers: list[int]) -> None:
    _, two = engines
    plan, policy = plan_for(two, layers), sl.SamplingPolicy(temperature=0)

    def copies(steps: int) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            two.generate([[5, 6, 7]], plan=plan, policy=policy, max_new_tokens=steps, engine="fast")
        return sum("PtoP" in event.name for event in profile.events())

    copies(4)
    per_step = (copies(4 + STEPS) - copies(4)) / STEPS
    assert per_step <= 2 + 2, per_step
