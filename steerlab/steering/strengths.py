"""Checks of the numbers that strengths are made of."""

from typing import Any

from steerlab.core.errors import PlanError
from steerlab.core.numbers import check_number


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
    return check_number(value, name, error=PlanError)
