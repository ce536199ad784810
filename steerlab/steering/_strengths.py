"""Checks of the numbers that strengths are made of."""

from typing import Any, Literal

from steerlab.core._numbers import Number, check_number
from steerlab.core.errors import PlanError


def check_unit(unit: str) -> None:
    """Checks that the unit is `dose` or `coef`.

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


def strength(operator: str, dose: Number | None, coef: Number | None) -> tuple[float, Literal["dose", "coef"]]:
    """The amount and unit of an operator's strength.

    Raises:
        PlanError: unless exactly one of dose and coef is given, as a finite number.
    """
    if (dose is None) == (coef is None):
        raise PlanError(
            f"{operator} takes exactly one strength: dose= (in median residual norms) or coef= (raw), got "
            f"dose={dose!r} and coef={coef!r}."
        )
    return (finite(dose, "dose"), "dose") if coef is None else (finite(coef, "coef"), "coef")
