"""How the tests are divided among the worker processes of pytest-xdist.

A unit runs in one worker from beginning to end: the tests of one file, which share its fixtures; files that share an
engine; or, in files whose tests are long and share nothing, each test by itself. A worker takes the next unit whenever
it is done with one, so the long ones go first, and none of them waits until the other worker has nothing left.

Those that run vLLM in the test process go last: its import changes settings of the whole process.
"""

from collections.abc import Sequence

TOGETHER: dict[str, str] = {}
"""By file: the unit that it shares with other files, which use the same engine."""

APART = ("tests/notebooks/test_notebooks.py",)
"""Files whose tests are units of their own."""

SECONDS: dict[str, int] = {}
"""By unit, or by file if its tests are apart: about how long it takes; those that are not listed take a few seconds."""


def unit_of(test_id: str) -> str:
    """The unit that a test belongs to."""
    file = test_id.partition("::")[0]
    return test_id if file in APART else TOGETHER.get(file, file)


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
        seconds = SECONDS.get(unit, SECONDS.get(unit.partition("::")[0], 0))
        return unit in last_ones, -seconds, first[unit], place

    return sorted(range(len(test_ids)), key=rank)
