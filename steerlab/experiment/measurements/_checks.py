"""Checks of arguments that several measurements take."""

from collections.abc import Sequence
from typing import Any

from steerlab.core._numbers import as_list, as_number, shown
from steerlab.core.errors import InputError
from steerlab.core.targets import Targets


def check_doses(doses: Sequence[float], *, at_least: int = 2) -> list[float]:
    """Sorted doses, if there are enough of them and all are finite and distinct.

    Raises:
        InputError: otherwise.
    """
    few = {1: "one", 2: "two"}[at_least]
    wrong = f"doses are {few} or more distinct finite numbers, got {shown(doses)}."
    values = [as_number(dose) for dose in as_list(doses) or ()]
    numbers = [value for value in values if value is not None]
    if len(values) < at_least or len(set(numbers)) < len(values):
        raise InputError(wrong)
    return sorted(numbers)


def check_targets(targets: Any) -> None:
    """Checks that these are targets.

    Raises:
        InputError: if they are not.
    """
    if not isinstance(targets, Targets):
        raise InputError(f"targets is a Targets, e.g. sl.Targets.from_jsonl(…), got {targets!r:.60}.")
