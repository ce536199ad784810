"""Detects that threads of this process waited for cores that other programs used: then fewer threads are faster.

Threads of one operation wait for the slowest of them, so on a busy machine one thread that cannot run holds up all.
"""

import os
import sys
import time
from pathlib import Path

SHORTEST = 20.0
"""Shortest step, in seconds, that is reported."""

SHARE = 0.5
"""Seconds that threads waited for a core, per second of the step, from which on it is reported."""


class Waiting:
    """Reports on standard error, once a process, that a step was slow because its threads waited for cores.

    Linux counts that time for every thread; where it does not, nothing is reported. No setting is changed.

    Args:
        what: the step's name.
    """

    _told = False

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun, self._waited = time.monotonic(), seconds_waited()

    def end(self) -> None:
        """Says so if it was."""
        seconds, waited = time.monotonic() - self._begun, seconds_waited() - self._waited
        threads = _torch_threads()
        if Waiting._told or threads < 2 or seconds < SHORTEST or waited < SHARE * seconds:
            return
        Waiting._told = True
        sys.stderr.write(
            f"info: {self._what}: the threads of this process waited {waited:.0f} s for a core in {seconds:.0f} s, "
            f"because other programs use them too. torch runs {threads} threads; on a busy machine fewer are much "
            "faster: set OMP_NUM_THREADS=1 before the start, or call torch.set_num_threads(1)\n"
        )


def seconds_waited(folder: Path = Path("/proc/self/task")) -> float:
    """Seconds that the living threads of this process have been ready to run without a core; 0 if unknown."""
    total = 0
    try:
        for thread in os.listdir(folder):
            try:
                total += int((folder / thread / "schedstat").read_text().split()[1])
            except (OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not count
                continue
    except OSError:
        return 0.0
    return total / 1e9


def _torch_threads() -> int:
    torch = sys.modules.get("torch")
    return 1 if torch is None else torch.get_num_threads()
