"""How the tests are divided among the worker processes of pytest-xdist.

A unit runs in one worker from beginning to end: the tests of one file, which share its fixtures. A worker takes the
next unit when it is nearly done with the last one. The long ones go first, so that no worker is left with one of them
while the other has nothing to do.

Those that run vLLM in the test process go last: its import changes settings of the whole process.
"""

from collections.abc import Sequence

SECONDS = {
    "tests/experiment/test_sweep_ray.py": 180,
    "tests/lens/test_programs.py": 45,
    "tests/models/test_models.py": 25,
    "tests/lens/test_families.py": 38,
    "tests/cli/test_run_experiment.py": 31,
    "tests/kernels/test_kernels.py": 75,
    "tests/cli/test_commands.py": 25,
    "tests/experiment/test_sweep_running.py": 30,
    "tests/lens/test_family_table.py": 25,
    "tests/sequences/test_replacement.py": 23,
    "tests/lens/test_streaming.py": 24,
    "tests/lens/test_growth.py": 22,
    "tests/experiment/test_reference.py": 22,
    "tests/sequences/test_data_parallel.py": 22,
    "tests/steering/test_shipped_vector.py": 25,
    "tests/scoring/test_pieces.py": 14,
    "tests/steering/test_bipo.py": 16,
    "tests/sequences/test_smollm2.py": 14,
    "tests/scoring/test_smollm2.py": 9,
    "tests/experiment/test_report_benchmark.py": 18,
    "tests/steering/test_estimators.py": 10,
    "tests/steering/test_learned.py": 17,
    "tests/test_import.py": 17,
    "tests/cli/test_run_examples.py": 10,
    "tests/lens/test_capture_generated.py": 21,
    "tests/experiment/test_earlier_runs.py": 13,
    # those of `make test-peers`
    "tests/peers/test_vectors_against_peers.py": 45,
    "tests/peers/test_inspect.py": 40,
    "tests/peers/test_harness.py": 35,
    "tests/peers/test_scores_against_peers.py": 30,
    # those that run vLLM
    "tests/vllm/test_remote.py": 113,
    "tests/vllm/test_forms.py": 58,
    "tests/vllm/test_serving.py": 51,
    "tests/vllm/test_notebook.py": 36,
    "tests/vllm/test_parity.py": 39,
    "tests/vllm/test_families.py": 13,
    "tests/vllm/test_isolation.py": 13,
    "tests/vllm/test_non_finite.py": 15,
    "tests/vllm/test_engine.py": 16,
}
"""By file: about how long its unit takes; the others take a few seconds."""

FORKED = "tests/experiment/test_sweep_ray.py"
"""Whose unit holds the tests that fork processes from one that has imported all, so that it is started once."""

TOGETHER = {
    "tests/cli/test_run_sweep.py": FORKED,
    "tests/experiment/test_killed.py": FORKED,
    "tests/experiment/test_metrics.py": FORKED,
    "tests/experiment/test_operator_identity.py": FORKED,
    "tests/lens/test_devices.py": FORKED,
    "tests/scoring/test_journal.py": FORKED,
    "tests/scoring/test_resume.py": FORKED,
    "tests/sequences/test_devices.py": FORKED,
    "tests/kernels/test_decoding_kernels.py": "tests/kernels/test_kernels.py",
    "tests/lens/test_programs_by_kernels.py": "tests/kernels/test_kernels.py",
    "tests/lens/test_residual_sums.py": "tests/kernels/test_kernels.py",
    "tests/sequences/test_sharded.py": "tests/sequences/test_data_parallel.py",
    "tests/vllm/test_processes.py": "tests/vllm/test_remote.py",
}
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
        return unit in last_ones, -SECONDS.get(unit, 0), first[unit], place

    return sorted(range(len(test_ids)), key=rank)
