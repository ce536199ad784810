"""Activations of features of a sparse autoencoder, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from steerlab.core._spelling import token_text
from steerlab.display import Piece, Shown, Table, count, figure, visible

_ROWS_SHOWN = 20


@dataclass(frozen=True, repr=False)
class FeatureActivations(Shown):
    """How active features are at the tokens of prompts.

    Attributes:
        features: the features' indices.
        values: float32 [positions, features], all prompts one after the other; 0 where a feature is not active.
        positions: per prompt, the absolute positions that were read.
        prompt_token_ids: the ids that were run for each prompt.
        tokenizer: the model's own, which spells tokens in the frame; None without one.
    """

    features: tuple[int, ...]
    values: Float[Tensor, "positions features"] = field(repr=False)
    positions: tuple[tuple[int, ...], ...] = field(repr=False)
    prompt_token_ids: tuple[tuple[int, ...], ...] = field(repr=False)
    tokenizer: Any = field(default=None, repr=False, compare=False)

    def of(self, prompt_index: int) -> Float[Tensor, "positions features"]:
        """One prompt's activations."""
        stops = [0, *accumulate(map(len, self.positions))]
        start, stop = list(pairwise(stops))[prompt_index]
        return self.values[start:stop]

    def to_frame(self) -> pd.DataFrame:
        """A row per token read: `prompt_index`, `position`, `token_id`, `token`, and a column per feature's index."""
        places = [(prompt, place) for prompt, row in enumerate(self.positions) for place in row]
        ids = [self.prompt_token_ids[prompt][place] for prompt, place in places]
        spelled = {token: str(token) if self.tokenizer is None else token_text(self.tokenizer, token) for token in ids}
        columns = {
            "prompt_index": [prompt for prompt, _ in places],
            "position": [place for _, place in places],
            "token_id": ids,
            "token": [spelled[token] for token in ids],
        }
        return pd.DataFrame(columns | {i: self.values[:, k].tolist() for k, i in enumerate(self.features)})

    def _finding(self) -> str:
        active = int((self.values > 0).sum())
        read = f"{count(len(self.features), 'feature')} at {count(len(self.values), 'token')}"
        return f"{read}, active {count(active, 'time')}, at most {figure(float(self.values.max()))}"

    def _pieces(self) -> Sequence[Piece]:
        frame = self.to_frame()
        order = self.values.amax(dim=1).argsort(descending=True).tolist()
        top = frame.iloc[order].assign(token=[visible(frame.token[row]) for row in order])
        columns = ["prompt", "position", "token", *(f"feature {i}" for i in self.features)]
        rows = [tuple(row) for row in top.drop(columns="token_id")[:_ROWS_SHOWN].itertuples(index=False, name=None)]
        return [Table(columns, rows, _ROWS_SHOWN, more=".to_frame()", caption="most active tokens", total=len(frame))]
