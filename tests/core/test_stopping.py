from types import SimpleNamespace

import pytest

from steerlab.core._stopping import before_stop, eos_ids_of, find_stop, stop_strings
from steerlab.core.errors import InputError


def test_the_earliest_stop_string_cuts():
    assert find_stop("a. b; c", [";", "."]) == 1
    assert before_stop("a. b; c", [";", "."]) == "a"
    assert before_stop("a b", ["x"]) == "a b"
    assert before_stop("a b", []) == "a b"


def test_eos_ids_of_every_source():
    sources = [SimpleNamespace(eos_token_id=e) for e in (2, [3, 4], None)]
    assert eos_ids_of(*sources, None) == {2, 3, 4}


def test_stop_strings_are_strings():
    assert stop_strings("a") == ("a",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    for wrong in (5, None, ["a", 1], "", ["a", ""]):
        with pytest.raises(InputError, match=r"stop"):
            stop_strings(wrong)
