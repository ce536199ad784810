"""A batch of rows on their way through the model: ids, masks, positions and the key-value cache, all explicit."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab.steering.run import PlanRun
from steerlab.steering.where import RowPositions


class Rows:
    """Rows that grow by blocks of tokens, each pass attending to all that came before.

    A row's padding may stand before its tokens or after them, never between: the mask hides it, and positions count
    the row's own tokens only, so that a row gives the same numbers alone and in any batch.

    Args:
        model: the causal language model to call (`bridge.original_model`).
        run: the plan at work on these rows.
        prompt_lens: prompt length of each row.
    """

    def __init__(self, model: Any, run: PlanRun, prompt_lens: Sequence[int]) -> None:
        self.model = model
        self.run = run
        self.device = model.get_input_embeddings().weight.device
        self.prompt_lens: Int[Tensor, " batch"] = torch.tensor(list(prompt_lens), device=self.device)
        self.mask: Bool[Tensor, "batch past"] = torch.zeros(len(prompt_lens), 0, dtype=torch.bool, device=self.device)
        self.counts: Int[Tensor, " batch"] = torch.zeros_like(self.prompt_lens)
        self.cache: Any = None

    def extend(
        self, ids: Int[Tensor, "batch pos"], valid: Bool[Tensor, "batch pos"], *, keep: int = 0
    ) -> Float[Tensor, "batch kept d_vocab"]:
        """Runs one more block of tokens.

        Args:
            ids: token ids; padding may hold any id.
            valid: False for padding.
            keep: return the logits of this many last positions only; 0 returns all.
        """
        ids, valid = ids.to(self.device), valid.to(self.device)
        positions = self.counts[:, None] + valid.cumsum(dim=-1) - 1
        self.run.begin(RowPositions(positions.masked_fill(~valid, -1), self.prompt_lens))
        self.mask = torch.cat([self.mask, valid], dim=-1)
        self.counts = self.counts + valid.sum(dim=-1)
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask.long(),
            past_key_values=self.cache,
            use_cache=True,
            **_optional(self.model, position_ids=positions.clamp_min(0), logits_to_keep=keep),
        )
        self.cache = output.past_key_values
        return output.logits[:, -keep:]

    def selected(self, index: Sequence[int]) -> "Rows":
        """New rows that continue these: row k continues row `index[k]`; a row may be continued many times or never."""
        chosen = torch.tensor(list(index), device=self.device)
        rows = Rows(self.model, self.run.continued(index), self.prompt_lens[chosen].tolist())
        rows.mask, rows.counts = self.mask[chosen], self.counts[chosen]
        rows.cache = _select_cache(self.cache, chosen)
        return rows


def left_padded(
    sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Ids and validity of sequences that end together."""
    width = max(map(len, sequences))
    ids = [[0] * (width - len(row)) + list(row) for row in sequences]
    valid = [[False] * (width - len(row)) + [True] * len(row) for row in sequences]
    return torch.tensor(ids, device=device), torch.tensor(valid, device=device)


def right_padded(
    sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Ids and validity of sequences that start together."""
    width = max(map(len, sequences))
    ids = [list(row) + [0] * (width - len(row)) for row in sequences]
    valid = [[True] * len(row) + [False] * (width - len(row)) for row in sequences]
    return torch.tensor(ids, device=device), torch.tensor(valid, device=device)


def _select_cache(cache: Any, index: Int[Tensor, " rows"]) -> Any:
    """A cache of the chosen rows; the original stays as it is."""
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in chosen.layers:
        layer.batch_select_indices(index.to(layer.keys.device))
    return chosen


def _optional(model: Any, **arguments: Any) -> dict[str, Any]:
    """The arguments that this model's forward takes."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in arguments.items() if name in known}
