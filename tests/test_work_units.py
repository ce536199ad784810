from pathlib import Path

import pytest

from tests.work_units import SECONDS, TOGETHER, in_order_of_length, unit_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", SECONDS)
def test_files_with_a_time_are_there(file: str) -> None:
    assert (ROOT / file).is_file()


def test_units_stay_together_with_the_long_ones_first_and_vllm_last() -> None:
    short, long, late = "tests/core/test_text.py", "tests/lens/test_programs.py", "tests/vllm/test_processes.py"
    collected = [f"{file}::{name}" for file in (short, long, late) for name in ("a", "b")]
    order = in_order_of_length(collected, [file.startswith(late) and file.endswith("b") for file in collected])
    assert [collected[place] for place in order] == [f"{file}::{name}" for file in (long, short, late) for name in "ab"]


@pytest.mark.parametrize(("file", "other"), TOGETHER.items())
def test_files_of_one_unit_follow_each_other(file: str, other: str) -> None:
    between = "tests/core/test_text.py"
    assert (ROOT / file).is_file()
    assert unit_of(f"{file}::a") == unit_of(f"{other}::a") == other
    collected = [f"{one}::a" for one in (other, between, file)]
    order = in_order_of_length(collected, [False] * 3)
    assert sorted(order[:2]) == [0, 2]
