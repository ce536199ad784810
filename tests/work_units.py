"""How the tests are divided among the worker processes of pytest-xdist.

A unit runs in one worker from beginning to end: the tests of one file, which share its fixtures. A worker takes the
next unit when it is nearly done with the last one. The long ones go first, so that no worker is left with one of them
while the other has nothing to do.

Those that run vLLM in the test process go last: its import changes settings of the whole process.
"""

from collections.abc import Sequence

SECONDS = {
    "tests/docs/test_docs_code.py": 100,
    "tests/experiment/test_sweep_ray.py": 90,
    "tests/models/test_models.py": 60,
    "tests/experiment/test_reference.py": 45,
    "tests/lens/test_families.py": 40,
    "tests/steering/test_bipo.py": 40,
    "tests/cli/test_commands.py": 25,
    "tests/lens/test_programs.py": 30,
    "tests/lens/test_growth.py": 32,
    "tests/cli/test_run_experiment.py": 25,
    "tests/cli/test_run_sweep.py": 25,
    "tests/cli/test_run_protocol.py": 20,
    "tests/cli/test_run_examples.py": 20,
    "tests/lens/test_capture_generated.py": 25,
    "tests/lens/test_devices.py": 23,
    "tests/lens/test_edits_on_a_model.py": 22,
    "tests/lens/test_engine.py": 20,
    "tests/experiment/test_experiment.py": 15,
    "tests/lens/test_not_finite.py": 19,
    "tests/steering/test_shipped_vector.py": 19,
    "tests/experiment/test_killed.py": 15,
    "tests/lens/test_streaming.py": 15,
    "tests/sequences/test_data_parallel.py": 15,
    "tests/sequences/test_smollm2.py": 14,
    "tests/sequences/test_devices.py": 13,
    "tests/kernels/test_kernels.py": 75,
    "tests/sequences/test_replacement.py": 50,
    "tests/runtime/test_model_state.py": 50,
    "tests/scoring/test_smollm2.py": 45,
    "tests/lens/test_family_table.py": 40,
    "tests/sequences/test_supports.py": 35,
    "tests/experiment/test_report_benchmark.py": 35,
    "tests/sequences/test_sharded.py": 30,
    # those that run vLLM
    "tests/vllm/test_remote.py": 60,
    "tests/vllm/test_isolation.py": 30,
    "tests/vllm/test_processes.py": 90,
    "tests/vllm/test_serving.py": 60,
    "tests/vllm/test_families.py": 50,
    "tests/vllm/test_notebook.py": 25,
    "tests/vllm/test_protocols.py": 25,
    "tests/vllm/test_engine.py": 25,
    "tests/vllm/test_parity.py": 25,
    "tests/vllm/test_non_finite.py": 20,
    "tests/vllm/test_scoring.py": 20,
    "tests/experiment/test_vllm_effect.py": 15,
}
"""By file: about how long it takes; the others take a few seconds."""


TOGETHER = {"tests/sequences/test_sharded.py": "tests/sequences/test_data_parallel.py"}
"""Files whose tests belong to another file's unit, with which they share what takes long to set up."""


def unit_of(test_id: str) -> str:
    file = test_id.partition("::")[0]
    return TOGETHER.get(file, file)


def in_order_of_length(test_ids: Sequence[str], runs_vllm: Sequence[bool]) -> list[int]:
    """The places of the tests in the order in which they should be handed out.

    Args:
        test_ids: the tests as collected.
        runs_vllm: of each test, whether it runs vLLM.
    """
    units = [unit_of(test_id) for test_id in test_ids]
    first = {unit: place for place, unit in reversed(list(enumerate(units)))}
    last_ones = {unit for unit, late in zip(units, runs_vllm, strict=True) if late}

    def rank(place: int) -> tuple[bool, int, int, int]:
        unit = units[place]
        seconds = SECONDS.get(test_ids[place].partition("::")[0], 0)
        return unit in last_ones, -seconds, first[unit], place

    return sorted(range(len(test_ids)), key=rank)
