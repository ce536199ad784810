"""A model spread over several devices scores and samples as on one.

The devices are simulated, in a process of its own; backward passes are not, so graphs are made there but not run:
`test_two_gpus.py` runs them.
"""

import math

import pytest

from tests.forked import run_forked
from tests.sequences.device_scenarios import run_scenarios
from tests.simulated_devices import AVAILABLE

SCORED = ["plain", "graph", "plan", "graph_and_plan", "override", "graph_and_override"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AVAILABLE, reason="needs a torch in which a device type can be defined in Python (2.10)"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What was found, by model, number of devices and kind."""
    return run_forked(run_scenarios, tmp_path_factory.mktemp("devices"))


@pytest.fixture(params=["llama", "tied"])
def found(results, request):
    return results[request.param]


@pytest.mark.parametrize("kind", SCORED)
def test_scores(found, kind):
    on_one = found["1"][kind]
    assert len(on_one) > 100
    on_two = found["2"][kind]
    assert [math.isinf(x) for x in on_two] == [math.isinf(x) for x in on_one]
    assert on_two == pytest.approx(on_one, rel=1e-4, abs=1e-4)


def test_what_was_compared_differs_from_kind_to_kind(found):
    plain, plan, override = (found["1"][kind] for kind in ("plain", "plan", "override"))
    for other in (plan, override):
        assert max(abs(a - b) for a, b in zip(plain[:11], other[:11], strict=True)) > 1e-2


def test_samples_and_receipts(found):
    assert found["2"]["samples"] == found["1"]["samples"]
    assert found["2"]["edited"] == found["1"]["edited"]
    assert all(found["1"]["edited"])
