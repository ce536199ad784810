"""What the commands print: text and tables on stdout, complaints on stderr."""

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from steerlab.core._json import json_text
from steerlab.core._warning import SteerlabWarning

if TYPE_CHECKING:
    from rich.console import Console


def console() -> "Console":
    """A console that prints text as it is, brackets included."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def say(text: str = "", style: str | None = None) -> None:
    """Prints a line, unwrapped, so that paths can be copied."""
    console().print(text, style=style, soft_wrap=True)


def complain(kind: str, message: str) -> None:
    """Prints `kind: message` on stderr as one line."""
    typer.echo(f"{kind}: {' '.join(message.splitlines())}", err=True)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> None:
    """Prints a table; its first `text_columns` columns are text, the others are figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        is_text = index < text_columns
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def show_json(data: Any) -> None:
    """Prints JSON; a number that is not finite is null."""
    typer.echo(json_text(data), nl=False)


def quoted(text: str) -> str:
    """The text in double quotes, so that leading spaces and line ends show."""
    return json.dumps(text, ensure_ascii=False)


@contextmanager
def own_warnings_only() -> Iterator[None]:
    """Shows steerlab's own warnings as one line each and no library's, unless Python was started with `-W`."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", SteerlabWarning)
            warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    complain("warning", str(message))
