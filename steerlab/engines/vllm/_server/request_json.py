"""What a `steering` field may say: its keys, their types, and a sentence for whatever else is sent."""

import difflib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from steerlab.core.errors import InputError

MAX_EDITS = 256


class _Section(BaseModel):
    """Known keys only; numbers are finite; a key that is null is absent."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}


class EditJson(_Section):
    """One edit.

    Attributes:
        vector: registered name or content hash.
        layer: which of a name's vectors.
        operator: `add` and `set` take dose or coef; `clamp` takes lo, hi and unit; `ablate` takes no strength.
        dose: strength in median norms of the stream.
        coef: strength as a raw coefficient.
        lo: lower bound of the projection.
        hi: upper bound of the projection.
        unit: what lo and hi are measured in.
        where: a word, or what `Where.to_json` gives.
        scale: factor on the edit.
    """

    vector: str
    layer: int | None = None
    operator: Literal["add", "ablate", "clamp", "set"] = "add"
    dose: float | None = None
    coef: float | None = None
    lo: float | None = None
    hi: float | None = None
    unit: Literal["coef", "dose"] = "coef"
    where: str | dict[str, Any] = "default"
    scale: float = 1.0


class SteeringJson(_Section):
    """A `steering` field: the edits of a plan, in order."""

    edits: list[EditJson]


_STRENGTHS: dict[str, set[str]] = {
    "add": {"dose", "coef"},
    "set": {"dose", "coef"},
    "clamp": {"lo", "hi", "unit"},
    "ablate": set(),
}


def parse_steering(given: Any) -> SteeringJson:
    """A `steering` field, validated.

    Raises:
        InputError: one sentence, naming the key.
    """
    try:
        found = SteeringJson.model_validate(given)
    except ValidationError as error:
        raise InputError(_sentence(error.errors()[0])) from error
    if not 0 < len(found.edits) <= MAX_EDITS:
        raise InputError(
            f"steering.edits holds {len(found.edits)} edits; send 1 to {MAX_EDITS}, or leave `steering` out for an "
            "unsteered answer."
        )
    for index, edit in enumerate(found.edits):
        _check_strengths(edit, f"steering.edits[{index}]")
    return found


def _check_strengths(edit: EditJson, key: str) -> None:
    takes = _STRENGTHS[edit.operator]
    others = {"dose", "coef", "lo", "hi", "unit"} - takes
    extra = sorted(others & edit.model_fields_set)
    if extra:
        known = f"takes {', '.join(sorted(takes))}" if takes else "takes no strength"
        raise InputError(f"{key}.{extra[0]}: {edit.operator} {known}.")


def _sentence(problem: Any) -> str:
    kind, loc, value = problem["type"], problem["loc"], problem["input"]
    key = _key(loc)
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_suggestion(loc)}"
    if kind == "missing":
        return f"{key}: the key is missing."
    if loc and loc[-1] == "vector":
        return (
            f"{key}: a vector is the registered name or content hash of one that this server offers, as a string; "
            f"values cannot be sent, got {_short(value)}. GET /steerlab/vectors lists them."
        )
    if kind in ("model_type", "model_attributes_type"):
        return f"{key}: must be an object with the keys {', '.join(_known(loc))}, got {_short(value)}."
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}, got {_short(value)}."


def _suggestion(loc: Sequence[Any]) -> str:
    known = _known(loc[:-1])
    near = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(known)}."


def _known(loc: Sequence[Any]) -> list[str]:
    return list((EditJson if "edits" in loc else SteeringJson).model_fields)


def _key(loc: Sequence[Any]) -> str:
    """Where it stands, e.g. `steering.edits[0].dose`; alternatives, which pydantic adds to a location, are left out."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[:3]]
    return "steering" + "".join(parts)


def _short(value: Any) -> str:
    return f"{value!r:.60}"
