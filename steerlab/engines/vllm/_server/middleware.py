"""The ASGI layer that takes `steering` out of a request, and puts what came of it into the answer."""

from typing import Any
from urllib.parse import quote

from steerlab.core.errors import InputError, SteerlabError
from steerlab.engines.vllm._server.answers import error_answer, send_json
from steerlab.engines.vllm._server.fields import ENDPOINTS, Asked, asked_of
from steerlab.engines.vllm._server.gateway import FIELD, Gateway
from steerlab.engines.vllm._server.strict_json import BodyError
from steerlab.engines.vllm._server.tickets import Ticket

REFUSED = 1008
"""A websocket's code for a message that a server's rules do not allow."""

_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


class SteeringMiddleware:
    """Pure ASGI: a request without steering passes as it came.

    Args:
        app: what comes after.
        gateway: what steered requests go through.
    """

    def __init__(self, app: Any, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        if scope["type"] == "websocket":
            await self._app(scope, _refusing(receive, send), send)
            return
        if scope["type"] != "http" or (scope["method"] in _WITHOUT_BODY and not scope["query_string"]):
            await self._app(scope, receive, send)
            return
        messages = await _read(receive)
        body = b"".join(message.get("body", b"") for message in messages)
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        try:
            kind = headers.get(b"content-type", b"").decode("latin-1").lower()
            asked = asked_of(path, scope["query_string"], kind, body)
            ticket = None if asked is None or asked.steering is None else self._ticket(asked, headers)
        except SteerlabError as error:
            field = None if isinstance(error, BodyError) else FIELD
            await send_json(send, 400, error_answer(str(error), 400, field))
            return
        if asked is None:
            await self._app(scope, _replay(messages, receive), send)
        elif ticket is None:
            await self._app(*_with_body(scope, asked.without_steering(), receive), send)
        else:
            await self._steered(*_with_body(scope, asked.with_ticket(ticket.id), receive), send, ticket)

    def _ticket(self, asked: Asked, headers: dict[bytes, bytes]) -> Ticket:
        maker = self._gateway.maker
        if maker is None:
            raise InputError(
                f"This server was started without --layers and cannot steer; leave `{FIELD}` out, or start it with "
                "--layers and --vectors."
            )
        header = headers.get(b"x-request-id", b"").decode("latin-1")
        name = header or asked.rest.get("request_id")
        return self._gateway.issue(maker.make(asked.steering), name if isinstance(name, str) and name else None)

    async def _steered(self, scope: Any, receive: Any, send: Any, ticket: Ticket) -> None:
        try:
            await self._app(scope, receive, _Answer(send, ticket).send)
        finally:
            self._gateway.retire(ticket)


class _Answer:
    """Holds an answer back until it is known that its steering has reached the engine."""

    def __init__(self, send: Any, ticket: Ticket) -> None:
        self._send, self._ticket = send, ticket
        self._held: list[dict[str, Any]] = []
        self._is_open = self._is_replaced = False

    async def send(self, message: dict[str, Any]) -> None:
        if self._is_replaced:
            return
        if self._is_open:
            await self._send(message)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            return
        is_last = not message.get("more_body", False)
        if self._ticket.problem is not None:
            await self._replace(400, str(self._ticket.problem))
        elif self._ticket.reached or self._held[0]["status"] >= 400:
            await self._open()
        elif is_last:
            await self._replace(500, "The answer was made without the steering that was asked for, and is withheld.")

    async def _open(self) -> None:
        self._is_open = True
        start = self._held[0]
        start["headers"] = [*start.get("headers", []), *_headers(self._ticket)]
        for message in self._held:
            await self._send(message)

    async def _replace(self, status: int, text: str) -> None:
        self._is_replaced = True
        await send_json(self._send, status, error_answer(text, status))


def _headers(ticket: Ticket) -> list[tuple[bytes, bytes]]:
    found = {
        "x-steerlab-plan": str(ticket.ready.assigned.given_hash),
        "x-steerlab-receipt": f"/steerlab/receipts/{quote(ticket.name, safe='')}",
    }
    return [(name.encode(), value.encode("latin-1")) for name, value in found.items()]


async def _read(receive: Any) -> list[dict[str, Any]]:
    """Every message of a request's body."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _with_body(scope: Any, body: bytes, receive: Any) -> tuple[Any, Any]:
    """The connection with another body."""
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
    message = {"type": "http.request", "body": body, "more_body": False}
    length = (b"content-length", str(len(body)).encode())
    return {**scope, "headers": [*headers, length]}, _replay([message], receive)


def _replay(messages: list[dict[str, Any]], receive: Any) -> Any:
    """Gives the messages again, and then what comes after them."""
    waiting = iter(messages)

    async def again() -> dict[str, Any]:
        return next(waiting, None) or await receive()

    return again


def _refusing(receive: Any, send: Any) -> Any:
    """Closes a session over a websocket as soon as it asks for steering."""

    async def guarded() -> dict[str, Any]:
        message = await receive()
        if f'"{FIELD}"' not in (message.get("text") or ""):
            return message
        reason = f"Sessions cannot steer; send `{FIELD}` to {' or '.join(ENDPOINTS)}."
        await send({"type": "websocket.close", "code": REFUSED, "reason": reason})
        return {"type": "websocket.disconnect", "code": REFUSED}

    return guarded
