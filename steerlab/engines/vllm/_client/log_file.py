"""Where vLLM's log goes: into a file, one per process, unless the user has set up vLLM's logging.

vLLM, the libraries below it and the processes that it starts write some eighty lines per start to the standard
streams. Children inherit the streams that are open when they start, so these point at the file for that long.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TextIO

from steerlab.core.errors import EngineError, InputError, SteerlabError
from steerlab.models._cache import cache_root

KEPT = 20
"""Log files that stay; the oldest go when a new one is begun."""

_VARIABLES = (
    "VLLM_CONFIGURE_LOGGING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_STREAM",
    "VLLM_LOGGING_CONFIG_PATH",
)
_ARGUMENTS = ("logging_config", "log_level", "log_config_file", "uvicorn_log_level")
_CAUSE = re.compile(r"^.*\bERROR\b.*?\] ((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b:? .*)$", re.MULTILINE)


def is_users(stated: Iterable[str]) -> bool:
    """Whether the user has said how vLLM is to log: by arguments of these names, or by environment variables."""
    return any(os.environ.get(name) for name in _VARIABLES) or not set(_ARGUMENTS).isdisjoint(stated)


@dataclass
class Log:
    """What vLLM and everything below it writes.

    Attributes:
        file: the open file; None if the log goes where the user said.
        screen: where the user reads.
    """

    file: TextIO | None = None
    screen: TextIO = field(default_factory=lambda: sys.stderr)

    def __str__(self) -> str:
        return "vLLM's log above has more" if self.file is None else f"vLLM's log has more: {self.file.name}"

    def say(self, line: str) -> None:
        """Shows the user a line."""
        print(line, file=self.screen, flush=True)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While vLLM starts here, what is written goes into the file.

        Raises:
            InputError: for arguments that vLLM refuses.
            EngineError: if it does not start; the log is named.
        """
        begin = self._size()
        if self.file is not None:
            self.say(f"vLLM starts; its log is in {self.file.name}")
        try:
            with self.collecting():
                yield
        except SteerlabError:
            raise
        except (ValueError, TypeError) as error:
            raise InputError(f"vLLM does not start with these arguments: {_line(error)} ({self})") from error
        except Exception as error:  # whatever vLLM and the libraries below it raise
            cause = self._cause(begin) or f"{type(error).__name__}: {_line(error)}"
            raise EngineError(f"vLLM did not start: {cause} ({self})") from error

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """What this process writes, and what those that it starts meanwhile will ever write, goes into the file."""
        if self.file is None:
            yield
            return
        usual = self.screen
        with contextlib.ExitStack() as stack:
            if usual is sys.__stderr__:  # its descriptor will not show anything for a while
                self.screen = stack.enter_context(os.fdopen(os.dup(2), "w", encoding="utf-8"))
            stack.callback(setattr, self, "screen", usual)
            for number in (1, 2):
                stack.enter_context(_redirected(number, self.file))
            stack.enter_context(contextlib.redirect_stdout(self.file))
            stack.enter_context(contextlib.redirect_stderr(self.file))
            yield

    def keep(self) -> None:
        """What libraries write while the process ends goes into the file too."""
        if self.file is not None:
            _flush()
            for number in (1, 2):
                os.dup2(self.file.fileno(), number)

    def _size(self) -> int:
        return 0 if self.file is None else os.fstat(self.file.fileno()).st_size

    def _cause(self, begin: int) -> str | None:
        """The first error that a process has logged since then."""
        if self.file is None:
            return None
        with open(self.file.name, encoding="utf-8", errors="replace") as written:
            written.seek(begin)
            found = _CAUSE.search(written.read())
        return None if found is None else found[1].strip()


def log_of(stated: Iterable[str]) -> Log:
    """The log of a vLLM that is about to start with arguments of these names."""
    return Log() if is_users(stated) else Log(_file(os.getpid()))


@lru_cache(maxsize=1)
def _file(pid: int) -> TextIO:
    """This process's log file; it stays open, because vLLM's handlers write to it from now on."""
    name = f"vllm-{datetime.now():%Y%m%d-%H%M%S}-{pid}.log"
    for folder in (cache_root() / "logs", Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / name).open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
            _prune(folder)
            return file
    raise EngineError(f"No folder for vLLM's log can be written: neither {cache_root()} nor {tempfile.gettempdir()}.")


def _prune(folder: Path) -> None:
    for old in sorted(folder.glob("vllm-*-*.log"))[:-KEPT]:
        old.unlink(missing_ok=True)


@contextlib.contextmanager
def _redirected(number: int, file: TextIO) -> Iterator[None]:
    """Points a descriptor at a file; does nothing if it is closed."""
    _flush()
    try:
        kept = os.dup(number)
    except OSError:
        yield
        return
    try:
        os.dup2(file.fileno(), number)
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _flush() -> None:
    """What was written so far goes where it was to go."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
