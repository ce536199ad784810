import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from steerlab.core._numbers import as_integer, as_list, as_number, check_integer, check_number, plain, shown
from steerlab.core.errors import InputError, PlanError

THREES = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int16)]
HALVES = [
    0.5,
    np.float32(0.5),
    np.float64(0.5),
    np.longdouble(0.5),
    np.array(0.5),
    torch.tensor(0.5),
    torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
    Decimal("0.5"),
    Fraction(1, 2),
]


@pytest.mark.parametrize("three", THREES)
def test_integers_of_every_library(three):
    assert (as_integer(three), type(as_integer(three))) == (3, int)


@pytest.mark.parametrize("half", HALVES)
def test_numbers_of_every_library(half):
    assert (as_number(half), type(as_number(half))) == (0.5, float)


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.True_,
        torch.tensor(True),
        np.array(True),
        "3",
        b"3",
        None,
        1j,
        np.array([3]),
        torch.tensor([3]),
        [3],
        {},
    ],
)
def test_what_is_no_number(value):
    assert as_integer(value) is None
    assert as_number(value) is None


@pytest.mark.parametrize("value", [3.0, np.float64(3.0), torch.tensor(3.0), math.nan, math.inf, Decimal(3)])
def test_what_is_no_integer(value):
    assert as_integer(value) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), Decimal("NaN"), Decimal("Infinity"), 10**400])
def test_what_is_no_finite_number(value):
    assert as_number(value) is None


def test_infinities_are_taken_where_they_are_asked_for():
    assert as_number(np.float32("-inf"), infinite=True) == -math.inf
    assert as_number(math.nan, infinite=True) is None


def test_there_is_one_zero():
    assert math.copysign(1, as_number(np.float32(-0.0))) == 1


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        np.array([1, 2]),
        torch.tensor([1, 2]),
        pd.Series([1, 2], index=[7, 5]),
        pd.Index([1, 2]),
        [np.int32(1), torch.tensor(2)],
        (i for i in (1, 2)),
    ],
)
def test_lists_of_every_library(values):
    found = as_list(values)
    assert found == [1, 2]
    assert {type(value) for value in found} == {int}


def test_a_polars_series_is_a_list():
    import polars

    assert as_list(polars.Series([1, 2])) == [1, 2]


@pytest.mark.parametrize("values", ["12", b"12", {1: 2}, 12, None, np.array(12), torch.tensor(12)])
def test_what_is_no_list(values):
    assert as_list(values) is None


def test_scalars_without_data_stay_what_they_are():
    empty = torch.zeros((), device="meta")
    assert plain(empty) is empty


def test_bounds_are_checked_and_the_value_is_shown():
    assert check_integer(np.int8(4), "n", least=4) == 4
    assert check_number(torch.tensor(0.5), "share", least=0) == 0.5
    with pytest.raises(PlanError, match=r"n is an integer ≥ 1, got array\(\[2\]\)"):
        check_integer(np.array([2]), "n", least=1, error=PlanError)
    with pytest.raises(InputError, match="n is an integer from 1 to 3, got 4"):
        check_integer(4, "n", least=1, most=3)
    with pytest.raises(InputError, match=r"share is a finite number ≥ 0, got -0\.5"):
        check_number(-0.5, "share", least=0)
    with pytest.raises(InputError, match="n is an integer from 0 to 9, got an integer of 16610 bits"):
        check_integer(10**5000, "n", least=0, most=9)


def test_long_values_are_cut():
    assert shown("a" * 500) == "'" + "a" * 79
