"""Where a warning points."""

import warnings

import pytest
import torch

import steerlab as sl
from steerlab.core._warning import warn


def shown_at(call) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (one,) = caught
    assert issubclass(one.category, UserWarning)
    return one.filename, one.lineno


def line_of(call) -> tuple[str, int]:
    return __file__, call.__code__.co_firstlineno


def test_a_warning_points_at_the_line_outside_the_package():
    few = lambda: sl.Controls(random=5)  # noqa: E731
    assert shown_at(few) == line_of(few)


def test_it_does_so_however_deep_it_is_noticed(tiny_llama_engine):
    vector = sl.SteeringVector.from_tensor(torch.ones(tiny_llama_engine.info.d_model), layer=1)
    plan = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.generated(after=3)))
    generate = lambda: tiny_llama_engine.generate("The soup was", plan=plan, max_new_tokens=1)  # noqa: E731
    assert shown_at(generate) == line_of(generate)


def test_it_does_so_where_it_comes_back_into_the_package_through_a_callers_function(tiny_llama_engine):
    few = lambda logits, tokens: (sl.Controls(random=5), logits[..., 0])[1]  # noqa: E731
    measure = lambda: tiny_llama_engine.measure("The soup", [" was"], {"few": few})  # noqa: E731
    file, line = shown_at(measure)
    assert (file, line) == line_of(measure)


def test_code_without_a_file_counts_by_its_module():
    namespace = {"warn": warn, "__name__": "steerlab.made_up"}
    exec("def inside():\n    warn('so')\n", namespace)
    called = lambda: namespace["inside"]()  # noqa: E731
    assert shown_at(called) == line_of(called)


def test_nothing_is_lost_where_warnings_are_errors():
    with pytest.raises(UserWarning, match="cannot rank below"):
        sl.Controls(random=5)
