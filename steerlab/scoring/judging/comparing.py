"""Comparisons of pairs of texts, each in both orders: the preference, and what the order alone does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.results import Score
from steerlab.display import Facts, Fold, Piece, Shown, Table, figure, interval
from steerlab.measures.intervals import cluster_t_mean
from steerlab.scoring.judging.rating import label_probs
from steerlab.scoring.judging.rubric import JudgeCard

COLUMNS = ["pair_index", "rubric", "preference", "shown_first", "shown_second", "bias", "agrees", "mass"]


@dataclass(frozen=True, repr=False)
class PairJudgements(Shown):
    """Which of two texts a judge prefers, asked in both orders.

    The scale runs from "the text shown first is better" to "the text shown second is", at equal steps from 1 to 0.

    Attributes:
        rows: a row per pair and rubric: `pair_index`, `rubric`, `preference` for `a` (0 to 1, the mean of both orders),
            `shown_first` and `shown_second` (the preference for `a` where it stands there), `bias` (how far the text
            shown first is preferred whichever it is, −0.5 to 0.5), `agrees` (whether both orders prefer the same text),
            `mass` (the smaller probability of answering with a label at all).
        bias: a row per rubric: `rubric`, `bias` with `low` and `high` over pairs, `agrees` (share of pairs).
        judge: model, rubrics and scale.
    """

    rows: pd.DataFrame = field(repr=False)
    bias: pd.DataFrame = field(repr=False)
    judge: JudgeCard

    @property
    def position_bias(self) -> float:
        """Mean over pairs and rubrics of how far the text shown first is preferred, −0.5 to 0.5."""
        return float(self.rows.bias.mean())

    def _finding(self) -> str:
        n, preference = self.rows.pair_index.nunique(), figure(float(self.rows.preference.mean()))
        bias = figure(self.position_bias)
        return f"{n} pairs, mean preference for a {preference}, position bias {bias}, by {self.judge.model}"

    def _pieces(self) -> Sequence[Piece]:
        bias = [
            (rubric, f"{figure(mean)} {interval(low, high)}", agrees)
            for rubric, mean, low, high, agrees in self.bias.itertuples(index=False)
        ]
        return [
            Table(["rubric", "position bias", "orders agree"], bias),
            Fold("every pair", [Table.of_frame(self.rows, more=".rows")]),
            Facts(self.judge.facts()),
        ]


def pairs_of(card: JudgeCard, scores: Sequence[Sequence[Score]]) -> PairJudgements:
    """Judgements of pairs from the scores of every label: per pair, rubric and order (`a` first, then `b` first)."""
    names, rows = list(card.rubrics), []
    favour = np.linspace(1.0, 0.0, len(card.labels))  # of the text shown first
    for place in range(0, len(scores), 2):
        pair, rubric = divmod(place // 2, len(names))
        (first, first_mass), (second, second_mass) = (label_probs(card, scores[place + k]) for k in range(2))
        rows.append((pair, names[rubric], *_figures(float(first @ favour), float(second @ favour))))
        rows[-1] = (*rows[-1], min(first_mass, second_mass))
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return PairJudgements(frame, _bias(frame), card)


def _figures(a_first: float, b_first: float) -> tuple[float, float, float, float, bool]:
    """From the preference for the text shown first in each order."""
    shown_first, shown_second = a_first, 1 - b_first
    preference = (shown_first + shown_second) / 2
    bias = (a_first + b_first) / 2 - 0.5
    return preference, shown_first, shown_second, bias, (shown_first - 0.5) * (shown_second - 0.5) > 0


def _bias(frame: pd.DataFrame) -> pd.DataFrame:
    rows: list[Any] = []
    for rubric, part in frame.groupby("rubric", sort=False):
        values = part.bias.to_numpy(dtype=float)
        ends = cluster_t_mean(values, part.pair_index.astype(str).tolist())
        rows.append((rubric, float(values.mean()), ends.low, ends.high, float(part.agrees.mean())))
    return pd.DataFrame(rows, columns=["rubric", "bias", "low", "high", "agrees"])
