"""Chromium without a window, driven over a pipe: pages at a size, in a colour scheme, on paper."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    """Where Chromium is; None if it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Tab:
    """One page, and every address that it has asked for."""

    browser: "Browser"
    session: str
    requested: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol; its answer."""
        return self.browser.call(method, params, self)

    def show(self, url: str, *, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Opens a page at a size in CSS pixels and waits until it has loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._go("about:blank")  # the page that is left must neither see the new colours nor store its own
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Storage.clearDataForOrigin", origin="/".join(url.split("/")[:3]), storageTypes="local_storage")
        self.requested.clear()
        self._go(url)
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 150)))")

    def _go(self, url: str) -> None:
        self.browser.forget()
        self.call("Page.navigate", url=url)
        self.browser.wait("Page.loadEventFired", self)

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def pdf(self) -> bytes:
        """The page on A4."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def picture(self, path: Path) -> None:
        """A picture of the whole page, to look at."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


class Browser:
    """A running Chromium. It resolves no name, so that nothing outside this machine can be reached."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._pending = b""
        self._tabs: dict[str, Tab] = {}
        self._seen: list[tuple[str, str]] = []

    def tab(self) -> Tab:
        """A new page."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._tabs[session] = tab = Tab(self, session)
        for domain in ("Page", "Network", "Runtime"):
            tab.call(f"{domain}.enable")
        return tab

    def call(self, method: str, params: dict[str, Any], tab: Tab | None = None) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": tab.session} if tab else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def wait(self, event: str, tab: Tab) -> None:
        """Waits for an event, or returns at once if it has come since `forget`."""
        while (event, tab.session) not in self._seen:
            self._next()

    def forget(self) -> None:
        """Events that came before this count no longer."""
        self._seen.clear()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._pending += data
        text, _, self._pending = self._pending.partition(b"\0")
        message = json.loads(text)
        session = message.get("sessionId", "")
        if message.get("method") == "Network.requestWillBeSent" and session in self._tabs:
            self._tabs[session].requested.append(message["params"]["request"]["url"])
        elif message.get("method") == "Page.loadEventFired":
            self._seen.append((message["method"], session))
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A running Chromium with a profile folder of its own."""
    path = executable()
    assert path is not None
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    options += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    # Chromium reads commands from descriptor 3 and answers on 4.
    command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", command, path, *options, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
        pass_fds=(to_read, to_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()
