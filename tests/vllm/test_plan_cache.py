from types import SimpleNamespace

import numpy as np

from steerlab.engines.vllm._client.plan_cache import PlanCache


def plans(*names):
    tables = SimpleNamespace(vectors=np.zeros((1, 25), dtype=np.float32))
    return {name: SimpleNamespace(tables=tables) for name in names}


def test_plans_travel_once():
    held = PlanCache(budget=1000)
    missing, dropped = held.take(plans("a", "b"))
    assert (list(missing), dropped) == (["a", "b"], [])
    missing, dropped = held.take(plans("b", "c"))
    assert (list(missing), dropped) == (["c"], [])


def test_the_longest_unused_go_first_and_those_in_use_stay():
    held = PlanCache(budget=250)
    held.take(plans("a"))
    held.take(plans("b"))
    held.take(plans("a"))
    assert held.take(plans("c"))[1] == ["b"]
    missing, dropped = held.take(plans("a", "b", "c", "d"))
    assert (sorted(missing), dropped) == (["b", "d"], [])
    assert held.take(plans("d"))[1] == ["a", "b"]
