"""Ratings of texts: the distribution over the labels, and what follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.errors import InputError
from steerlab.core.results import Score
from steerlab.display import Facts, Fold, Piece, Shown, Table, figure
from steerlab.measures.ratings import AGGREGATES, expected_aggregate, rating_entropy, rating_probs
from steerlab.scoring.judging.rubric import JudgeCard

KEYS = ["text_index", "rubric"]


@dataclass(frozen=True, repr=False)
class Judgements(Shown):
    """What a judge says of texts.

    Attributes:
        rows: a row per text and rubric: `text_index`, `rubric`, `p_<label>` for each label of the scale (they sum to
            1), `expected` (the expected rating), `entropy` of the rating (nats), `mass` (the probability that the model
            goes on with a rating at all), `mode` (the most probable label).
        texts: a row per text: `text_index`, `rating`: the expected rating, or with several rubrics the expected
            aggregate of ratings drawn independently.
        judge: model, rubrics and scale.
    """

    rows: pd.DataFrame = field(repr=False)
    texts: pd.DataFrame = field(repr=False)
    judge: JudgeCard

    @property
    def ratings(self) -> np.ndarray:
        """The rating of each text, shape [texts]."""
        return self.texts.rating.to_numpy()

    def probs(self, rubric: str | None = None) -> np.ndarray:
        """The distribution of each text over the labels under one rubric, shape [texts, labels].

        Raises:
            InputError: for an unknown rubric, or none where there are several.
        """
        return self.of(rubric)[label_columns(self.judge)].to_numpy()

    def of(self, rubric: str | None = None) -> pd.DataFrame:
        """The rows of one rubric; of the only one by default.

        Raises:
            InputError: for an unknown rubric, or none where there are several.
        """
        names = list(self.judge.rubrics)
        if rubric is None and len(names) == 1:
            rubric = names[0]
        if rubric not in names:
            raise InputError(f"rubric is one of {', '.join(map(repr, names))}, got {rubric!r}.")
        return _of(self.rows, rubric).reset_index(drop=True)

    def by_rubric(self) -> pd.DataFrame:
        """Means over texts: `rubric`, `expected`, `entropy` (nats), `mass`, `least_mass`."""
        grouped = self.rows.groupby("rubric", sort=False)
        return grouped.agg(
            expected=("expected", "mean"),
            entropy=("entropy", "mean"),
            mass=("mass", "mean"),
            least_mass=("mass", "min"),
        ).reset_index()

    def _finding(self) -> str:
        n, mean = len(self.texts), figure(float(self.ratings.mean()))
        what = self.judge.aggregate.replace("_", " ") if len(self.judge.rubrics) > 1 else "rating"
        return f"{n} texts, mean {what} {mean}, by {self.judge.model}, rubric {self.judge.rubric_hash}"

    def _pieces(self) -> Sequence[Piece]:
        return [
            Table.of_frame(self.by_rubric(), caption="mean over texts"),
            Fold("every text", [Table.of_frame(self.rows, more=".rows")]),
            Facts(self.judge.facts()),
        ]


def _of(rows: Any, rubric: str) -> Any:
    return rows[rows.rubric == rubric]


def label_columns(card: JudgeCard) -> list[str]:
    """The columns of a distribution over the labels."""
    return [f"p_{label}" for label in card.labels]


def judgements_of(card: JudgeCard, scores: Sequence[Sequence[Score]]) -> Judgements:
    """Judgements from the scores of every label, per text and, within it, per rubric.

    Raises:
        InputError: if the tokenizer joins rubric and label, or two labels have the same tokens.
    """
    names, rows = list(card.rubrics), []
    for place, of_labels in enumerate(scores):
        text, rubric = divmod(place, len(names))
        probs, mass = label_probs(card, of_labels)
        rows.append((text, names[rubric], *probs, mass))
    frame = pd.DataFrame(rows, columns=[*KEYS, *label_columns(card), "mass"])
    return judgements_from(card, with_figures(card, frame))


def judgements_from(card: JudgeCard, rows: pd.DataFrame) -> Judgements:
    """Judgements from rows that are whole; ratings of texts follow from them."""
    names, frame = list(card.rubrics), rows.drop_duplicates("text_index")[["text_index"]]
    values = np.array(card.values)
    probs = np.stack([_of(rows, name)[label_columns(card)].to_numpy() for name in names], axis=1)
    if len(names) == 1:
        rating = probs[:, 0] @ values
    else:
        try:
            rating = expected_aggregate(probs, values, AGGREGATES[card.aggregate])
        except ValueError as error:
            raise InputError(str(error)) from error
    return Judgements(rows, frame.reset_index(drop=True).assign(rating=rating), card)


def with_figures(card: JudgeCard, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of probabilities with the figures that follow from them."""
    distributions: Any = frame[label_columns(card)]
    probs = distributions.to_numpy()
    return frame.assign(
        expected=probs @ np.array(card.values),
        entropy=rating_entropy(probs),
        mode=[card.labels[k] for k in probs.argmax(axis=1)],
    )


def label_probs(card: JudgeCard, scores: Sequence[Score]) -> tuple[Any, float]:
    """The distribution over the labels after one filled rubric, and the probability of all of them together.

    Raises:
        InputError: if the tokenizer joins rubric and label, or two labels have the same tokens.
    """
    merged = [label for label, score in zip(card.labels, scores, strict=True) if score.boundary == "merged"]
    if merged:
        raise InputError(
            f"The tokenizer joins the end of the rubric with the label {merged[0]!r} into one token, so their "
            "probabilities cannot be compared; end the rubric otherwise, or choose lead= (e.g. ' ', '' or '\\n')."
        )
    try:
        return rating_probs(np.array([score.log_prob for score in scores]), [score.token_ids for score in scores])
    except ValueError as error:
        raise InputError(f"The labels {list(card.labels)} cannot be told apart by this tokenizer: {error}") from error
