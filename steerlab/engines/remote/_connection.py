"""Calls over HTTP: sent again until they are answered, under an id by which the server knows one that it has seen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import httpx

from steerlab.core._progress import progress
from steerlab.core.errors import EngineError, InputError, SteerlabError
from steerlab.engines._http.failures import GONE, failure_of
from steerlab.engines._http.frames import CONTENT_TYPE, CutOffError, Frame, frames_in

LONGEST_ANSWER = 1 << 32
"""Bytes of an answer that is read; servers send far less."""

_CONNECT, _SILENCE = 10.0, 60.0
"""Seconds until a connection stands, and between two signs of life of an answer; a server gives one each second."""

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_LATER = (429, 502, GONE, 504)
"""HTTP's codes for what may go well later."""


class _NotAnsweredError(Exception):
    """A call had no answer, and may have one if it is sent again."""


class RemoteConnection:
    """A server's address, and the key to it.

    Args:
        url: the server's address, with or without `/v1`.
        api_key: what it was started with, if it asks for one.
        patience: seconds for which a call without an answer is sent again.

    Attributes:
        url: the address, without `/v1`.
        most_bytes: that the server reads of a call.
    """

    def __init__(self, url: str, api_key: str | None, patience: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000.")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        times = httpx.Timeout(_SILENCE, connect=_CONNECT, pool=None)
        self._patience, self.most_bytes = patience, LONGEST_ANSWER
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=times)
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise InputError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000: {error}.") from error

    def close(self) -> None:
        self._client.close()

    def read(self, what: str) -> Any:
        """What is at a path under /steerlab/.

        Raises:
            EngineError: if nothing answers.
            InputError: if what answers is no `steerlab serve`, or asks for another key.
        """
        try:
            response = self._client.get(f"/steerlab/{what}")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise EngineError(
                f"Nothing answers at {self.url} ({_told(error)}). Is `steerlab serve` running there, and within reach?"
            ) from error
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            return response.json()
        except ValueError as error:
            raise InputError(f"What answers at {self.url} is no `steerlab serve`.") from error

    def call(self, what: str, frame: Frame, n_rows: int) -> Frame:
        """The answer to a call, however often it has to be sent.

        Closing the connection, as an interrupt does, ends the call on the server too.

        Args:
            what: which call.
            frame: its message.
            n_rows: rows that it asks for, as far as they are known, for the bar.

        Raises:
            SteerlabError: what the server says is wrong with the call.
            EngineError: if there was no answer for too long.
        """
        body, name = frame.encoded(), uuid4().hex
        if len(body) > self.most_bytes:
            raise InputError(
                f"The call takes {len(body):,} bytes, and the server at {self.url} reads {self.most_bytes:,}; send "
                "fewer prompts or vectors at a time, or start it with a larger --call-mib."
            )
        started, wait = time.monotonic(), _FIRST_WAIT
        with progress(n_rows, what) as bar:
            while True:
                try:
                    return self._attempt(what, body, name, bar)
                except _NotAnsweredError as error:
                    lost = time.monotonic() - started
                    if lost + wait > self._patience:
                        raise EngineError(
                            f"The server at {self.url} has not answered a call to {what} for {lost:.0f} seconds: "
                            f"{error}. The call can be repeated once the server is there again; patience= says how "
                            "long an engine keeps trying."
                        ) from error
                    time.sleep(wait)
                    wait = min(2 * wait, _LONGEST_WAIT)

    def _attempt(self, what: str, body: bytes, name: str, bar: Any) -> Frame:
        with self._answer(what, body, name) as response:
            if response.status_code != 200:
                response.read()
                if response.status_code in _LATER:
                    raise _NotAnsweredError(f"status {response.status_code}")
                raise self._refusal(response)
            for frame in frames_in(response.iter_bytes(), LONGEST_ANSWER):
                if "error" in frame.content:
                    error = failure_of(frame.content["error"])
                    if frame.content.get("status") in _LATER:
                        raise _NotAnsweredError(str(error))
                    raise error
                if "done" not in frame.content:
                    return frame
                bar.total = max(frame.content["of"], bar.total or 0)
                bar.update(frame.content["done"] - bar.n)
        raise _NotAnsweredError("the answer ended before the result")

    @contextmanager
    def _answer(self, what: str, body: bytes, name: str) -> Iterator[httpx.Response]:
        headers = {"content-type": CONTENT_TYPE, "x-request-id": name}
        try:
            with self._client.stream("POST", f"/steerlab/{what}", content=body, headers=headers) as response:
                yield response
        except (httpx.TransportError, CutOffError) as error:
            raise _NotAnsweredError(_told(error)) from error

    def _refusal(self, response: httpx.Response) -> SteerlabError:
        """What a status other than 200 means."""
        if response.status_code in (401, 403):
            return InputError(f"The server at {self.url} asks for another API key; pass api_key=.")
        try:
            found = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            found = None
        if isinstance(found, dict) and "kind" in found:
            return failure_of(found)
        if response.status_code == 404:
            return InputError(f"What answers at {self.url} is no `steerlab serve` of this version.")
        return EngineError(f"The server at {self.url} answered with status {response.status_code}.")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
