"""Token by token: which words of a text became likelier, and which less likely."""

import html
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, to_hex
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle

from steerlab.core._spelling import token_text
from steerlab.core.errors import DataError
from steerlab.core.results import Score
from steerlab.experiment._wording import number
from steerlab.experiment.plots._frames import need_columns
from steerlab.experiment.plots._palette import INK, PALE
from steerlab.experiment.plots.style import COLUMN, new_axes, styled

_SIZE: Final = 7.0
_ADVANCE, _LEADING = 0.602 * _SIZE, 1.75 * _SIZE
"""Width of a character and height of a line of the monospaced font, in points."""


_STRIP: Final = 15
"""Columns of the strip of colours."""


@dataclass(frozen=True)
class PlacedPiece:
    """A token, or the part of one that fits a line.

    Attributes:
        text: what is written.
        token: index of the token.
        line: line, counted from the top.
        start: first column, in characters.
        width: columns taken; a wide (East Asian) character takes two.
    """

    text: str
    token: int
    line: int
    start: int
    width: int


def token_frame(base: Score, steered: Score, tokenizer: Any) -> pd.DataFrame:
    """Both arms' log-probs of one target, token by token.

    Args:
        base: the unsteered score of a target.
        steered: the steered score of the same target.
        tokenizer: the engine's tokenizer.

    Returns:
        A row per token: `token` (its text), `base`, `steered`, `difference` (nats).

    Raises:
        DataError: if the two scores are not of the same tokens.
    """
    if base.token_ids != steered.token_ids:
        raise DataError(
            f"The two scores are of different tokens, {len(base.token_ids)} and {len(steered.token_ids)} of them; "
            "score the same prompt and target in both arms."
        )
    frame = pd.DataFrame(
        {
            "token": [token_text(tokenizer, token) for token in base.token_ids],
            "base": base.token_log_probs,
            "steered": steered.token_log_probs,
        }
    )
    return frame.assign(difference=frame.steered - frame.base)


@styled
def plot_token_differences(frame: pd.DataFrame, ax: Axes | None = None, *, limit: float | None = None) -> Axes:
    """The text itself, each token on a ground that says how much likelier (blue) or less likely (orange) it became.

    Tokens that became less likely are underlined too, which shows the sign in grey print. The whole text is drawn; a
    new figure is as tall as it needs. Characters that the font lacks are drawn as �; `token_differences_html` has them.

    Args:
        frame: a row per token: `token` (text), `base`, `steered` (log p in nats).
        ax: axes to draw on; a new figure by default.
        limit: the difference in nats at which the colour is full; the largest in size by default.

    Raises:
        DataError: if a column is missing.
    """
    differences = _differences(frame, "plot_token_differences")
    width = int((COLUMN if ax is None else _width_in(ax)) * 72 * 0.97 / _ADVANCE)
    pieces = place_tokens(frame.token.tolist(), width)
    lines = 1 + max(piece.line for piece in pieces)
    ax = new_axes(ax, height=(lines + 2) * _LEADING / 72 + 0.35)
    norm = CenteredNorm(0.0, halfrange=_limit(differences, limit))
    for piece in pieces:
        _draw(ax, piece, differences[piece.token], norm)
    ax.set_xlim(0, width)
    ax.set_ylim(lines + 2, 0)
    ax.set_axis_off()
    _draw_scale(ax, lines + 0.9, norm)
    ax.set_title(f"log p of the text changes by {number(np.nansum(differences), '+.2f')} nats")
    return ax


def token_differences_html(frame: pd.DataFrame, *, limit: float | None = None) -> str:
    """The same as an HTML fragment: coloured text with both log-probs in a tooltip, without any script.

    Args:
        frame: a row per token: `token` (text), `base`, `steered` (log p in nats).
        limit: the difference in nats at which the colour is full; the largest in size by default.

    Returns:
        One `<p>`; everything from the text is escaped.

    Raises:
        DataError: if a column is missing.

    Examples:
        >>> frame = pd.DataFrame({"token": [" fine"], "base": [-2.0], "steered": [-1.0]})
        >>> "log p −2.00 → −1.00 (+1.00 nats)" in token_differences_html(frame)
        True
    """
    differences = _differences(frame, "token_differences_html")
    norm = CenteredNorm(0.0, halfrange=_limit(differences, limit))
    spans = [
        _span(str(token), base, steered, norm)
        for token, base, steered in zip(frame.token, frame.base, frame.steered, strict=True)
    ]
    return f'<p class="tokens" style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(spans)}</p>'


def describe_token_differences(frame: pd.DataFrame) -> str:
    """The tokens that moved most, in a sentence."""
    differences = _differences(frame, "describe_token_differences")
    if np.isnan(differences).all():
        return "No token has a log-prob in both arms."
    up, down = int(np.nanargmax(differences)), int(np.nanargmin(differences))
    return (
        f"Over {len(frame)} tokens log p changes by {number(np.nansum(differences), '+.2f')} nats; most upwards for "
        f"“{frame.token.iloc[up].strip()}” ({number(differences[up], '+.2f')}), most downwards for "
        f"“{frame.token.iloc[down].strip()}” ({number(differences[down], '+.2f')})."
    )


def place_tokens(tokens: list[str], width: int) -> list[PlacedPiece]:
    """Lays tokens out in a monospaced font: a token moves to the next line if it does not fit, and is split if it must.

    A line break inside a token is written as ↵ and ends the line.

    Examples:
        >>> [(p.text, p.line, p.start) for p in place_tokens(["ab", " cd", "efg"], 5)]
        [('ab', 0, 0), (' cd', 0, 2), ('efg', 1, 0)]
    """
    placed, line, column = [], 0, 0
    for index, token in enumerate(tokens):
        for part, ends in _parts(token):
            size = _cells(part)
            if column and column + size > width:
                line, column = line + 1, 0
            for piece in _split(part, width):
                taken = _cells(piece)
                if column + taken > width:
                    line, column = line + 1, 0
                placed.append(PlacedPiece(piece, index, line, column, taken))
                column += taken
            if ends:
                line, column = line + 1, 0
    return placed


def _parts(token: str) -> list[tuple[str, bool]]:
    """A token cut after its line breaks, and whether a break ends the part; an empty token is one empty part."""
    parts = token.replace("\t", "→").split("\n")
    return [(part + "↵", True) for part in parts[:-1]] + ([(parts[-1], False)] if parts[-1] or len(parts) == 1 else [])


def _split(text: str, width: int) -> list[str]:
    """Parts of a text no wider than `width`."""
    if _cells(text) <= width:
        return [text]
    parts = [""]
    for character in text:
        if parts[-1] and _cells(parts[-1] + character) > width:
            parts.append("")
        parts[-1] += character
    return parts


def _cells(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def _differences(frame: pd.DataFrame, name: str) -> np.ndarray:
    need_columns(frame, ["token", "base", "steered"], name)
    return frame.steered.to_numpy(dtype=float) - frame.base.to_numpy(dtype=float)


def _limit(differences: np.ndarray, limit: float | None) -> float:
    """Half the range of the colours: as given, or the largest finite difference; 1 if nothing moved."""
    sizes = np.abs(differences[np.isfinite(differences)])
    return limit or (float(sizes.max()) if sizes.size else 0.0) or 1.0


def _width_in(ax: Axes) -> float:
    box = ax.get_window_extent()
    return float(box.width / ax.figure.dpi)


def _ground(difference: float, norm: CenteredNorm) -> str:
    """The colour behind a token; grey where a log-prob is missing."""
    return "#e4e4e4" if np.isnan(difference) else to_hex(PALE(float(norm(difference))))  # pyright: ignore[reportArgumentType]


def drawable(text: str) -> str:
    """The text with � for each character that the monospaced font has no picture of."""
    known = _known_characters()
    return "".join(character if ord(character) in known else "\ufffd" for character in text)


@cache
def _known_characters() -> frozenset[int]:
    return frozenset(get_font(findfont("monospace")).get_charmap())


def _draw(ax: Axes, piece: PlacedPiece, difference: float, norm: CenteredNorm) -> None:
    box = Rectangle((piece.start, piece.line + 0.06), piece.width, 0.88, color=_ground(difference, norm), linewidth=0)
    box.set_gid(f"token-{piece.token}")
    ax.add_patch(box)
    text = drawable(piece.text).replace("$", r"\$")
    middle = piece.line + 0.5
    ax.text(piece.start, middle, text, family="monospace", fontsize=_SIZE, va="center_baseline", color=INK)
    if difference < 0:
        low = piece.line + 0.9
        ax.plot([piece.start, piece.start + piece.width], [low, low], color="#B24A00", linewidth=0.7)


def _draw_scale(ax: Axes, line: float, norm: CenteredNorm) -> None:
    """What the colours mean: a strip from the largest loss to the largest gain."""
    steps = np.linspace(-norm.halfrange, norm.halfrange, _STRIP)
    ends = number(steps[0], ".2g"), f"{number(steps[-1], '+.2g')} nats: change of log p"
    start = len(ends[0]) + 1
    for place, step in enumerate(steps):
        ax.add_patch(Rectangle((start + place, line + 0.15), 1.02, 0.7, color=_ground(step, norm), linewidth=0))
    style = {"family": "monospace", "fontsize": _SIZE, "va": "center_baseline", "color": INK}
    ax.text(0, line + 0.5, ends[0], **style)
    ax.text(start + _STRIP + 1, line + 0.5, ends[1], **style)


def _span(token: str, base: float, steered: float, norm: CenteredNorm) -> str:
    difference = steered - base
    tip = (
        f"log p {number(base, '.2f')} → {number(steered, '.2f')} ({number(difference, '+.2f')} nats)"
        if np.isfinite(difference)
        else f"log p {number(base, '.2f')} → {number(steered, '.2f')}"
    )
    line = ";text-decoration:underline" if difference < 0 else ""
    shown = html.escape(token).replace("\n", "↵\n")
    ground = _ground(difference, norm)
    return f'<span style="background:{ground}{line}" title="{html.escape(tip)}">{shown}</span>'
