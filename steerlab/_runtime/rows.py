"""A batch of rows on their way through the model: ids, masks, positions and the key-value cache, all explicit."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab._runtime.arguments import optional_arguments
from steerlab._runtime.step import Step, running
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._rows import RowPositions


class Rows:
    """Rows that grow by blocks of tokens, each pass attending to all that came before.

    A row's padding may stand before its tokens or after them: the mask hides it, and positions count the row's own
    tokens only, so that a row gives the same numbers alone and in any batch. Padding between a row's tokens is right
    only for models without sliding windows, which count cache slots.

    Args:
        model: the causal language model to call, of a backend.
        run: the plan at work on these rows.
        prompt_lens: prompt length of each row.
    """

    can_narrow = True

    def __init__(self, model: Any, run: PlanRun, prompt_lens: Sequence[int]) -> None:
        self.model = model
        self.run = run
        self.device = model.get_input_embeddings().weight.device
        self.prompt_lens: Int[Tensor, " batch"] = torch.tensor(list(prompt_lens), device=self.device)
        self.counts: Int[Tensor, " batch"] = torch.zeros_like(self.prompt_lens)
        self.cache: Any = None
        self._optional = optional_arguments(model, "position_ids", "logits_to_keep")
        self._mask: Bool[Tensor, "batch past"] | None = None
        self._length = 0
        self._passes = 0
        self._rows = torch.arange(len(prompt_lens), device=self.device)
        self._lens_on: dict[torch.device, Tensor] = {}

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest row so far, padding left out."""
        return int(self.counts.max())

    def extend(
        self, ids: Int[Tensor, "batch pos"], valid: Bool[Tensor, "batch pos"], *, keep: int = 0
    ) -> Float[Tensor, "batch kept d_vocab"]:
        """Runs one more block of tokens.

        Args:
            ids: token ids; padding may hold any id.
            valid: False for padding.
            keep: return the logits of this many last positions only; 0 returns all.
        """
        padded = not bool(valid.all())
        ids, valid = ids.to(self.device), valid.to(self.device)
        positions = self.counts[:, None] + valid.cumsum(dim=-1) - 1
        self._grow_mask(valid, padded)
        self.counts = self.counts + valid.sum(dim=-1)
        return self._pass(ids, positions, positions.masked_fill(~valid, -1), keep)

    def step(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch 1 d_vocab"]:
        """Runs one token per row; a negative id means that the row has ended, and nothing is edited there."""
        fed = tokens.to(self.device)[:, None]
        positions = self.counts[:, None]
        self._grow_mask(None, padded=False, width=1)
        self.counts = self.counts + 1
        return self._pass(fed.clamp_min(0), positions, positions.masked_fill(fed < 0, -1), 1)

    def _pass(self, ids: Tensor, positions: Tensor, own: Tensor, keep: int) -> Tensor:
        """One call of the model; `own` has −1 where there is no live token."""
        tokens = RowPositions(own, self.prompt_lens, self._lens_on, token_ids=ids)
        self.run.begin(tokens)
        known = {"position_ids": positions.clamp_min(0), "logits_to_keep": keep}
        with running(Step(tokens, self._passes, self._rows)):
            output = self.model(
                input_ids=ids,
                attention_mask=None if self._mask is None else self._mask.long(),
                past_key_values=self.cache,
                use_cache=True,
                **{name: known[name] for name in self._optional},
            )
        self._passes += 1
        self.cache = output.past_key_values
        return output.logits[:, -keep:]

    def _grow_mask(self, valid: Tensor | None, padded: bool, width: int = 0) -> None:
        """Without any padding there is no mask, which is faster."""
        width = width if valid is None else valid.shape[1]
        if self._mask is None and padded:
            self._mask = torch.ones(len(self.prompt_lens), self._length, dtype=torch.bool, device=self.device)
        if self._mask is not None:
            fresh = self._mask.new_ones(len(self.prompt_lens), width) if valid is None else valid
            self._mask = torch.cat([self._mask, fresh], dim=-1)
        self._length += width

    def selected(self, index: Sequence[int], prompt_lens: Sequence[int] | None = None) -> "Rows":
        """New rows that continue these: row k continues row `index[k]`; a row may be continued many times or never.

        Args:
            index: for each new row, the row of these it continues.
            prompt_lens: prompt length of each new row; by default that of the row it continues.
        """
        chosen = torch.tensor(list(index), device=self.device)
        lens = self.prompt_lens[chosen].tolist() if prompt_lens is None else prompt_lens
        rows = Rows(self.model, self.run.continued(index), lens)
        rows._take(self, chosen)
        rows._rows, rows._passes, rows._length = (
            torch.arange(len(chosen), device=self.device),
            self._passes,
            self._length,
        )
        return rows

    def under(self, run: PlanRun) -> "Rows":
        """The same rows, to be continued under a plan that has left alone what ran so far."""
        rows = copy.copy(self)
        rows.run = run
        return rows

    def narrow(self, kept: Int[Tensor, " rows"]) -> None:
        """Drops all rows but these."""
        chosen = kept.to(self.device)
        self.run.narrow(kept)
        self.prompt_lens, self._lens_on = self.prompt_lens[chosen], {}
        self._rows = self._rows[chosen]
        self._take(self, chosen)

    def _take(self, other: "Rows", chosen: Int[Tensor, " rows"]) -> None:
        """Counts, mask and cache of another's chosen rows."""
        self.counts = other.counts[chosen]
        self._mask = None if other._mask is None else other._mask[chosen]
        self.cache = None if other.cache is None else _select_cache(other.cache, chosen)


def left_padded(
    sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Ids and validity of sequences that end together.

    Padding repeats a row's first token, which is finite wherever the row is: a masked key still meets the softmax, and
    0 times NaN is NaN.
    """
    width = max(map(len, sequences))
    ids = [[*row[:1]] * (width - len(row)) + list(row) for row in sequences]
    valid = [[False] * (width - len(row)) + [True] * len(row) for row in sequences]
    return torch.tensor(ids, device=device), torch.tensor(valid, device=device)


def right_padded(
    sequences: Sequence[Sequence[int] | np.ndarray], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Ids and validity of sequences that start together."""
    ids, lens = right_padded_ids(sequences), torch.tensor([len(row) for row in sequences])
    return ids.to(device), (torch.arange(ids.shape[1]) < lens[:, None]).to(device)


def right_padded_ids(sequences: Sequence[Sequence[int] | np.ndarray]) -> Int[Tensor, "batch pos"]:
    """Ids of sequences that start together, on the CPU; padding holds 0."""
    ids = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)  # many times as fast as torch.tensor
    for row, padded in zip(sequences, ids, strict=True):
        padded[: len(row)] = row
    return torch.from_numpy(ids)


def _select_cache(cache: Any, index: Int[Tensor, " rows"]) -> Any:
    """A cache of the chosen rows; the original stays as it is."""
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in chosen.layers:
        layer.batch_select_indices(index.to(layer.keys.device))
    return chosen
