"""Checks of the numbers that strengths are made of."""

import math
from numbers import Real
from typing import Any

from steerlab.core.errors import PlanError


def check_unit(unit: str) -> None:
    """Nothing, if the unit is `dose` or `coef`.

    Raises:
        PlanError: otherwise.
    """
    if unit not in ("dose", "coef"):
        raise PlanError(f"unit is 'dose' or 'coef', got {unit!r}.")


def finite(value: Any, name: str) -> float:
    """The value as a float, if it is a finite number.

    Raises:
        PlanError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise PlanError(f"{name} must be a finite number, got {value!r}.")
    return float(value)
