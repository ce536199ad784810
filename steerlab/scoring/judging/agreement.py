"""Whether a judge can be trusted: its ratings against what it would have written, and against people's."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from steerlab.core._numbers import as_list, as_number, shown
from steerlab.core.errors import InputError
from steerlab.display import Facts, Fold, Piece, Shown, Table, figure
from steerlab.scoring.judging.rubric import JudgeCard

FIGURES = ["rubric", "compared", "texts", "missing", "same", "kappa", "weighted_kappa", "spearman"]


@dataclass(frozen=True, repr=False)
class JudgeAgreement(Shown):
    """How far ratings agree with parsed replies and with human labels.

    Attributes:
        table: a row per rubric and comparison: `rubric`; `compared`: `ratings, greedy replies`, and with labels
            `ratings, people` and `greedy replies, people`; `texts` compared; `missing` (left out, as the reply has no
            label or nobody gave one); `same` (share of equal labels); `kappa` (Cohen's) and `weighted_kappa` (quadratic
            weights, for a scale); `spearman` (rank correlation; of ratings, the expected one). NaN where a side does
            not vary.
        rows: a row per text and rubric: `text_index`, `rubric`, `mode`, `expected`, `reply`, `parsed`, `label`.
        judge: model, rubrics and scale.
    """

    table: pd.DataFrame = field(repr=False)
    rows: pd.DataFrame = field(repr=False)
    judge: JudgeCard

    @property
    def unparseable(self) -> float:
        """Share of greedy replies in which no label of the scale is found."""
        return float(self.rows.parsed.isna().mean())

    def _finding(self) -> str:
        first: Any = self.table.iloc[0]
        same = f"same label as the greedy reply for {figure(first.same)} of {first.texts}, kappa {figure(first.kappa)}"
        return f"{self.unparseable:.0%} of replies unparseable, {same}, by {self.judge.model}"

    def _pieces(self) -> Sequence[Piece]:
        rows = Fold("every reply", [Table.of_frame(self.rows, more=".rows")])
        return [Table.of_frame(self.table), rows, Facts(self.judge.facts())]


def agreement_of(
    card: JudgeCard, rows: pd.DataFrame, replies: Sequence[str], labels: Mapping[str, Sequence[str | None]] | None
) -> JudgeAgreement:
    """Agreement of judged rows with the replies to the same rubrics, and with labels by rubric."""
    given = [None] * len(rows)
    if labels is not None:
        given = [labels[str(rubric)][int(text)] for text, rubric in zip(rows.text_index, rows.rubric, strict=True)]
    parsed = [parse_label(reply, card.labels) for reply in replies]
    columns = {"reply": list(replies), "parsed": parsed, "label": given}
    frame = rows[["text_index", "rubric", "mode", "expected"]].assign(
        **{name: pd.Series(values, dtype=object, index=rows.index) for name, values in columns.items()}
    )
    found = []
    for rubric, part in frame.groupby("rubric", sort=False):
        found.append((rubric, "ratings, greedy replies", *_figures(card, part, "mode", "parsed")))
        if labels is not None:
            found.append((rubric, "ratings, people", *_figures(card, part, "mode", "label")))
            found.append((rubric, "greedy replies, people", *_figures(card, part, "parsed", "label")))
    return JudgeAgreement(pd.DataFrame(found, columns=FIGURES), frame, card)


def parse_label(reply: str, labels: Sequence[str]) -> str | None:
    """The label that stands first in a reply as a word or number of its own; None if there is none.

    Examples:
        >>> parse_label("Rating: 2 of 2", ["0", "1", "2"]), parse_label("12.5", ["1", "2"]), parse_label("good", ["1"])
        ('2', None, None)
    """
    longest = sorted(labels, key=len, reverse=True)
    pattern = rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest))})(?!\w|\.\d)"
    found = re.search(pattern, reply)
    return None if found is None else found[0]


def human_labels(labels: Any, card: JudgeCard, n_texts: int) -> dict[str, list[str | None]] | None:
    """Human labels by rubric, each None or a label of the scale; numbers name the label that counts as much.

    Raises:
        InputError: for labels that are not of the scale, or another number of them than texts.
    """
    if labels is None:
        return None
    names = list(card.rubrics)
    named = labels if isinstance(labels, Mapping) else {names[0]: labels}
    if set(named) != set(names):
        raise InputError(
            f"labels are given by rubric, {{{', '.join(map(repr, names))}: […]}}; got {shown(list(named))}."
        )
    found = {}
    for name, given in named.items():
        values = as_list(given, ordered=True)
        if values is None or len(values) != n_texts:
            count = "no list" if values is None else f"{len(values)} labels"
            raise InputError(f"There are {n_texts} texts and {count} for the rubric {name!r}; pass one for each.")
        found[name] = [_label(value, card) for value in values]
    return found


def _label(value: Any, card: JudgeCard) -> str | None:
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str) and value in card.labels:
        return str(value)
    number = as_number(value)
    named = [label for label, counts in zip(card.labels, card.values, strict=True) if counts == number]
    if len(named) > 1:
        raise InputError(f"The labels {named} all count {shown(value)}, so it names none of them; give the label.")
    if named:
        return named[0]
    raise InputError(f"A label is one of {list(card.labels)}, or None where there is none; got {shown(value)}.")


def _figures(card: JudgeCard, part: pd.DataFrame, one: str, other: str) -> tuple[int, int, float, float, float, float]:
    known: Any = part[part[one].notna() & part[other].notna()]
    missing = len(part) - len(known)
    if known.empty:
        return 0, missing, math.nan, math.nan, math.nan, math.nan
    first, second = known[one].tolist(), known[other].tolist()
    value = dict(zip(card.labels, card.values, strict=True))
    ranked = known.expected.to_numpy() if one == "mode" else np.array([value[label] for label in first])
    same = float(np.mean([a == b for a, b in zip(first, second, strict=True)]))
    kappa, weighted = (_kappa(card, first, second, weights) for weights in (None, "quadratic"))
    return len(known), missing, same, kappa, weighted, _spearman(ranked, np.array([value[label] for label in second]))


def _kappa(card: JudgeCard, first: list[str], second: list[str], weights: str | None) -> float:
    if len({*first, *second}) < 2:  # chance alone agrees always
        return math.nan
    order = sorted(range(len(card.labels)), key=lambda k: card.values[k])
    return float(cohen_kappa_score(first, second, labels=[card.labels[k] for k in order], weights=weights))


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    if np.unique(first).size < 2 or np.unique(second).size < 2:
        return math.nan
    found: Any = stats.spearmanr(first, second)
    return float(found.statistic)
