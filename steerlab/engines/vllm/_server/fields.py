"""Does a request ask for steering? Wherever it does so, it is either taken up or refused, never passed over."""

import difflib
import json
from dataclasses import dataclass
from typing import Any

from steerlab.core.errors import InputError
from steerlab.engines.vllm._server.gateway import FIELD
from steerlab.engines.vllm._server.strict_json import read_json
from steerlab.engines.vllm._wire.config import KEY

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
_HOLDERS = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")
"""Objects inside a request in which a client may have put the field."""


@dataclass(frozen=True)
class Asked:
    """A request that asks for steering.

    Attributes:
        steering: the field's value; None if it is null, which asks for nothing.
        rest: the request without it.
    """

    steering: Any
    rest: dict[str, Any]

    def without_steering(self) -> bytes:
        """The request as vLLM gets it if the field is null."""
        return json.dumps(self.rest).encode()

    def with_ticket(self, ticket: str) -> bytes:
        """The request as vLLM gets it, with what stands in for its plan."""
        arguments = {**(self.rest.get("vllm_xargs") or {}), KEY: ticket}
        body = {"request_id": ticket, **self.rest, "vllm_xargs": arguments}
        return json.dumps(body).encode()


def asked_of(path: str, query: bytes, content_type: str, body: bytes) -> Asked | None:
    """What a request asks for; None if it does not mention steering.

    Raises:
        InputError: if it does so in a place or a way that cannot be taken up.
        BodyError: if it is not JSON although it says so.
    """
    if FIELD.encode() in query.lower():
        raise InputError(f"`{FIELD}` is a field of the request's body, not of its address.")
    if content_type.startswith("multipart/"):
        if any(f'name="{name}"'.encode() in body for name in (FIELD, KEY)):
            raise InputError(_elsewhere(path))
        return None
    data = _read(content_type, body)
    asked = _asked(data) if isinstance(data, dict) else None
    if asked is None or asked.steering is None:
        return asked
    if path not in ENDPOINTS:
        raise InputError(_elsewhere(path))
    if data.get("use_beam_search"):
        raise InputError("steering does not work with use_beam_search; leave one of them out.")
    return asked


def _read(content_type: str, body: bytes) -> Any:
    """The body; None if there is none, or if its type says that it is not JSON and it is not."""
    if "json" in content_type and body.strip():
        return read_json(body, "The request's body")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM reads it with the same reader, and refuses it


def _asked(data: dict[str, Any]) -> Asked | None:
    _check_names(data)
    _check_holders(data)
    arguments = data.get("vllm_xargs")
    flat: dict[str, Any] = arguments if isinstance(arguments, dict) and FIELD in arguments else {}
    if data.get(FIELD) is not None and flat.get(FIELD) is not None:
        raise InputError(f"The request has both `{FIELD}` and `vllm_xargs.{FIELD}`; send one.")
    if flat:
        given = data.get(FIELD) if flat[FIELD] is None else _from_text(flat[FIELD])
        return Asked(given, {**_without_field(data), "vllm_xargs": _without_field(flat)})
    if FIELD not in data:
        return None
    if data[FIELD] is None:
        return Asked(None, _without_field(data))
    if not isinstance(arguments, dict | None):
        raise InputError(f"vllm_xargs is an object, got {arguments!r:.60}.")
    return Asked(data[FIELD], _without_field(data))


def _without_field(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != FIELD}


def _check_names(data: dict[str, Any]) -> None:
    """A misspelt field would be ignored by vLLM."""
    for key in data:
        low = key.lower()
        if key != FIELD and ("steer" in low or difflib.get_close_matches(low, [FIELD], cutoff=0.8)):
            raise InputError(f"{key[:80]!r} is no field of a request; did you mean `{FIELD}`?")


def _check_holders(data: dict[str, Any]) -> None:
    for name in _HOLDERS:
        held = data.get(name)
        if not isinstance(held, dict):
            continue
        if KEY in held:
            raise InputError(f"`{name}.{KEY}` is not for clients; send `{FIELD}`.")
        if held.get(FIELD) is not None and name != "vllm_xargs":
            raise InputError(
                f"`{FIELD}` is a field of the request itself, not of `{name}`; the openai client puts there what it is "
                "given as extra_body."
            )
        _check_holders(held)


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise InputError(f"vllm_xargs.{FIELD} is JSON as a string, got {value!r:.60}.")
    return read_json(value, f"vllm_xargs.{FIELD}")


def _elsewhere(path: str) -> str:
    return f"{path} cannot steer; send `{FIELD}` to {' or '.join(ENDPOINTS)}."
