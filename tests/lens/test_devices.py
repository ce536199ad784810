"""A model spread over several devices gives what it gives on one, with one copy per device boundary and step.

The devices are simulated, in a process of its own (see `tests/simulated_devices.py`); `test_two_gpus.py` has real ones.
"""

from typing import Any

import pytest

from tests.forked import run_forked
from tests.lens.device_scenarios import run_scenarios
from tests.simulated_devices import AVAILABLE

SAME = [
    "two_devices_llama",
    "two_devices_gpt2",
    "head_tied_to_the_first_device",
    "masks_of_two_kinds",
    "more_devices_than_layers",
    "four_devices_for_six_layers",
    "with_accelerate",
    "rows_that_end",
    "vector_elsewhere",
]
CLOSE = ["scores", "activations"]
COUNTED = [
    "transfers_per_step",
    "transfers_of_capture",
    "transfers_of_prefill",
    "kept_between_steps",
    "state_of_a_program",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AVAILABLE, reason="needs a torch in which a device type can be defined in Python (2.10)"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every scenario found."""
    names = [*SAME, *CLOSE, *COUNTED]
    return run_forked(run_scenarios, tmp_path_factory.mktemp("devices"), names)


@pytest.fixture
def found(results: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """What the scenario of the test's parameter found."""
    value = results[request.param]
    assert not (isinstance(value, dict) and "error" in value), value["error"]
    return value


def scenario(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("found", names, indirect=True)


# --- equal to one device ------------------------------------------------------------------------------------------


@scenario(*SAME)
def test_tokens_and_receipts_are_those_of_one_device(found: Any) -> None:
    for on_cpu, spread in found:
        assert spread == on_cpu


@scenario("rows_that_end")
def test_rows_are_dropped_from_the_batch_before_the_last_ends(found: Any) -> None:
    lengths = [sorted(len(tokens) for tokens in on_cpu["tokens"]) for on_cpu, _ in found]
    assert any(shorter <= 8 < longest for *_, shorter, longest in lengths)


@scenario("with_accelerate")
def test_each_engine_runs_as_asked(found: Any) -> None:
    assert [spread["engine"] for _, spread in found] == ["fast", "bridge"]


@scenario(*CLOSE)
def test_scores_and_activations_are_those_of_one_device(found: Any) -> None:
    for on_cpu, spread in found:
        assert len(spread) == len(on_cpu)
        for expected, got in zip(flat(on_cpu), flat(spread), strict=True):
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)


def flat(value: Any) -> list[float]:
    return [x for item in value for x in flat(item)] if isinstance(value, list | tuple) else [value]


# --- copies -------------------------------------------------------------------------------------------------------


@scenario("transfers_per_step", "transfers_of_capture")
def test_a_step_copies_once_per_boundary_and_its_tokens_back(found: Any) -> None:
    for run in found:
        kinds = 2 if run.get("model") == "gemma3" else 1  # the second kind of mask starts on the first device, later
        assert run["between_devices"] == run["n_devices"] - 1 + kinds, run
        assert run["between_devices"] <= run["n_devices"] + 2


@scenario("transfers_per_step", "transfers_of_capture")
def test_an_unpadded_step_on_the_fast_engine_neither_reads_nor_sends_to_the_host(found: Any) -> None:
    counts = [run["with_host"] for run in found if run.get("engine") != "bridge" and not run.get("padded")]
    assert counts
    assert set(counts) == {0.0}


@scenario("transfers_of_prefill")
def test_only_the_last_position_comes_back_from_the_prompts(found: Any) -> None:
    rows = found["n_rows"]
    back = {(run["model"], run["engine"]): run["to_first_device"] for run in found["runs"]}
    assert back == {
        ("llama", "fast"): [],  # tokens are drawn where the logits are
        ("llama", "bridge"): [rows * found["d_vocab"]],  # accelerate returns the output to the first device
        ("llama_tied", "fast"): [rows * found["d_model"]],
        ("llama_tied", "bridge"): [rows * found["d_model"]],
    }


@scenario("transfers_of_prefill")
def test_the_host_gets_no_logits(found: Any) -> None:
    for run in found["runs"]:
        assert max(run["to_host"]) <= found["n_rows"], run


@scenario("kept_between_steps")
def test_copies_of_earlier_steps_are_let_go(found: Any) -> None:
    assert set(found["alive"]) == {0}


@scenario("state_of_a_program")
def test_a_programs_state_comes_along_with_the_stream(found: Any) -> None:
    """From each device to the next, in the same copy, and not back."""
    assert found == {"states": [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]], "copies": 3, "sum": 6.0}
