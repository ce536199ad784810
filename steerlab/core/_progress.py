"""Progress bars: one per call, with rate and time left, gone when the call ends."""

import html
import io
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tqdm import tqdm
from typing_extensions import override

DELAY: Final = 2.0
"""Seconds of work before a bar appears."""

_open: Counter[int] = Counter()


@contextmanager
def progress(total: int | None, what: str, unit: str = "it", *, unit_scale: bool = False) -> Iterator[Any]:
    """A bar for the body of a `with`, on a terminal or in a notebook, once the work has taken two seconds.

    Work that runs inside another bar's body shows none of its own. Where standard error is neither a terminal nor a
    notebook's, nothing is shown.

    Args:
        total: steps; None if unknown.
        what: names the work; without a name nothing is shown.
        unit: what is counted.
        unit_scale: whether counts are written with k, M, G.

    Yields:
        A bar with `update(n)`.
    """
    thread = threading.get_ident()
    kind = _NotebookBar if _in_notebook() else tqdm
    hidden = True if _open[thread] or not what else None
    _open[thread] += 1
    try:
        with kind(
            total=total, desc=what, unit=unit, unit_scale=unit_scale, delay=DELAY, leave=False, disable=hidden
        ) as bar:
            yield bar
    finally:
        _open[thread] -= 1


class _NotebookBar(tqdm):
    """A bar in a cell's output that becomes empty when it closes: neither the page nor a saved notebook keeps it."""

    def __init__(self, *, disable: bool | None, **options: Any) -> None:
        self._shown: Any = None
        super().__init__(disable=bool(disable), file=io.StringIO(), **options)

    @override
    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if msg == "" and self._shown is None:
            return
        text = str(self) if msg is None else msg
        data = {"text/plain": text, "text/html": self._html(text) if text else ""}
        if self._shown is None:
            from IPython.display import DisplayHandle

            self._shown = DisplayHandle()
            self._shown.display(data, raw=True)
        else:
            self._shown.update(data, raw=True)

    def _html(self, text: str) -> str:
        place = f' value="{self.n}" max="{self.total}"' if self.total else ""
        counts = text.rpartition("|")[2] or text
        return f"<label>{html.escape(self.desc)} <progress{place}></progress> {html.escape(counts)}</label>"


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
