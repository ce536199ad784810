"""The Engine protocol under /steerlab/: generate, score, measure, capture, median_norm; and what a client has to know.

A body is plain JSON, or a message of `steerlab.engines._http`; the answer is of the same kind. Messages are answered
while the call runs: lines of progress, then the result. A connection that is closed ends its call, unless
another one waits for the same id.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from steerlab.core.errors import InputError, SteerlabError
from steerlab.engines._http.failures import TOO_LARGE, failure_json, status_of
from steerlab.engines._http.frames import CONTENT_TYPE, SIZE, Frame, read_frame
from steerlab.engines.vllm._server.answers import PREFIX, error_answer, send_json
from steerlab.engines.vllm._server.call_book import CallBook, Job
from steerlab.engines.vllm._server.calls import MAX_ROWS, OPTIONS, Call, CallCancelled, Desk
from steerlab.engines.vllm._server.strict_json import read_json
from steerlab.engines.vllm.engine import traits_of

BEAT = 1.0
"""Seconds between two lines of progress; a client that hears nothing for long takes the server for dead."""


_PATIENCE = 4
"""How many times as long as it may be a body is read before the connection is closed on it."""


class CallEndpoints:
    """ASGI: answers calls, to whom the server's API key allows it.

    Args:
        app: what comes after.
        desk: what calls work with; None in a server that was started without layers.
        book: the calls under way, and the last answers.
        allows: whether a request's headers hold the key.
        tokenizer: the files of the model's tokenizer.
    """

    def __init__(
        self, app: Any, desk: Desk | None, book: CallBook, allows: Callable[[Any], bool], tokenizer: dict[str, Any]
    ) -> None:
        self._app, self._desk, self._book, self._allows, self._tokenizer = app, desk, book, allows, tokenizer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        what = path.removeprefix(f"{PREFIX}/")
        known = {**dict.fromkeys(OPTIONS, "POST"), "describe": "GET", "tokenizer": "GET"}
        if scope["type"] != "http" or not path.startswith(f"{PREFIX}/") or what not in known:
            await self._app(scope, receive, send)
        elif not self._allows(scope):
            await send_json(send, 401, error_answer("This server asks for an API key.", 401, None))
        elif scope["method"] != known[what]:
            await _refuse(send, 400, InputError(f"{path} takes {known[what]}, not {scope['method']}."))
        elif self._desk is None:
            text = "This server was started without --layers, so it answers vLLM's own requests only."
            await _refuse(send, 400, InputError(text))
        elif what == "describe":
            await send_json(send, 200, self._described(self._desk))
        elif what == "tokenizer":
            await send_json(send, 200, self._tokenizer)
        else:
            await self._call(self._desk, what, scope, receive, send)

    async def _call(self, desk: Desk, what: str, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        plain = not headers.get(b"content-type", b"").lower().startswith(CONTENT_TYPE.encode())
        name = headers.get(b"x-request-id", b"").decode("latin-1") or uuid4().hex
        try:
            body = await _body(headers, receive, desk.limit)
        except SteerlabError as error:
            await _refuse(send, TOO_LARGE, error)
            return
        if body is None:
            return  # the client has gone
        try:
            kept = None if plain else self._book.kept(name, body)
            if kept is not None:
                await _send_message(send, [kept])
                return
            job = self._book.join(name, body, lambda: _read(desk, what, body, plain))
        except SteerlabError as error:
            await _refuse(send, status_of(error), error)
            return
        try:
            await (self._plain(job, receive, send) if plain else self._messages(job, receive, send))
        finally:
            self._book.leave(job)

    async def _plain(self, job: Job, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        await asyncio.wait({job.task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.task.done():
            return
        gone.cancel()
        error = job.task.exception()
        if error is None:
            found = json.loads(job.task.result())
            found.pop(SIZE)
            await send_json(send, 200, found)
        elif not isinstance(error, CallCancelled):
            await _refuse(send, _status(error), error)

    async def _messages(self, job: Job, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        await _begin_message(send)
        try:
            while not job.task.done():
                await asyncio.wait({job.task, gone}, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not job.task.done():
                    return
                if not job.task.done():
                    progress = job.call.progress
                    await _send_part(send, Frame({"done": progress.n_done, "of": progress.n_rows}).encoded())
            error = job.task.exception()
            if error is None:
                await _send_part(send, job.task.result(), last=True)
            elif not isinstance(error, CallCancelled):
                failure = {"error": failure_json(error), "status": _status(error)}
                await _send_part(send, Frame(failure).encoded(), last=True)
        finally:
            gone.cancel()

    def _described(self, desk: Desk) -> dict[str, Any]:
        model = desk.model
        traits = traits_of(model.config)
        config = model.config
        return {
            "model": asdict(model.info),
            "traits": {**asdict(traits), "layers": list(traits.layers)},
            "sites": list(config.sites),
            "max_directions": config.max_directions,
            "max_runs": config.max_runs,
            "max_conditions": config.max_conditions,
            "max_token_rules": config.max_token_rules,
            "scores": config.score_bytes > 0,
            "captures": config.capture_tokens > 0,
            "allows_vectors": desk.allows_vectors,
            "max_rows": MAX_ROWS,
            "max_bytes": desk.limit,
            "tokenizer": self._tokenizer["hash"],
            "calls": {name: sorted(options) for name, options in OPTIONS.items()},
        }


def _read(desk: Desk, what: str, body: bytes, plain: bool) -> Call:
    if plain:
        found = read_json(body, "The body")
        if not isinstance(found, dict):
            raise InputError("The body is a JSON object; its keys are the arguments of the call.")
        return Call(desk, what, Frame(found), plain=True)
    frame = read_frame(body)
    content = dict(frame.content)
    expected = content.pop("weights_hash", None)
    if expected is not None and expected != desk.model.info.weights_hash:
        raise InputError(
            f"This server runs {desk.model.info.name!r} with weights {desk.model.info.weights_hash}, and the call is "
            f"meant for weights {expected}: another model is served at this address now. Make a new RemoteEngine."
        )
    return Call(desk, what, Frame(content, frame.arrays))


def _status(error: BaseException) -> int:
    return status_of(error) if isinstance(error, SteerlabError) else 500


async def _refuse(send: Any, status: int, error: BaseException) -> None:
    """An error, readable as OpenAI's and as one of ours."""
    message = str(error) if isinstance(error, SteerlabError) else f"{type(error).__name__}: {error}"
    await send_json(send, status, {"error": {**error_answer(message, status, None)["error"], **failure_json(error)}})


async def _body(headers: dict[bytes, bytes], receive: Any, limit: int) -> bytes | None:
    """The whole body; None if the client leaves before it has sent it.

    Raises:
        InputError: if it is longer than the limit. What is beyond is not kept; some of it is read all the same, so that
            the client has sent it and hears why.
    """
    stated = headers.get(b"content-length", b"0")
    length = int(stated) if stated.isdigit() else 0
    parts: list[bytes] = []
    n_read, more = 0, length <= _PATIENCE * limit
    while more and n_read <= _PATIENCE * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        n_read += len(message.get("body", b""))
        if max(length, n_read) <= limit:
            parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    if max(length, n_read) > limit:
        raise InputError(
            f"The call is longer than the {limit:,} bytes that this server reads; send fewer prompts or vectors at a "
            "time, or start it with a larger --call-mib."
        )
    return b"".join(parts)


async def _gone(receive: Any) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin_message(send: Any) -> None:
    headers = [(b"content-type", CONTENT_TYPE.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Any, part: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": not last})


async def _send_message(send: Any, parts: list[bytes]) -> None:
    await _begin_message(send)
    await _send_part(send, b"".join(parts), last=True)
