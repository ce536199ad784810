"""Rows without a cache: every pass runs each row whole, from its first token, with padding behind it only.

What stands behind a token reaches no causal model, whether it uses a mask or not, and positions count from 0. So this
is right for every family, and for all that `Rows` cannot run: those without a cache that can be continued, and those
whose state runs on through padding. It costs a pass over the whole row for each token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab._runtime.arguments import optional_arguments
from steerlab._runtime.step import Step, running
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._rows import RowPositions


class WholeRows:
    """Rows that grow by blocks of tokens; the uncached counterpart of `Rows`.

    Tokens that ran before run again, edited as they were, and are counted once: `RowPositions.fresh` says which are
    new.

    Args:
        model: the causal language model to call, of a backend.
        run: the plan at work on these rows.
        prompt_lens: prompt length of each row.
    """

    can_narrow = True

    def __init__(self, model: Any, run: PlanRun, prompt_lens: Sequence[int]) -> None:
        self.model, self.run = model, run
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.prompt_lens: Int[Tensor, " batch"] = torch.tensor(list(prompt_lens), device=self.device)
        self.counts: Int[Tensor, " batch"] = torch.zeros_like(self.prompt_lens)
        self._ids: Int[Tensor, "batch width"] = self.prompt_lens.new_zeros(len(self.prompt_lens), 0)
        self._rows = torch.arange(len(self.prompt_lens), device=self.device)
        self._passes = 0
        self._optional = optional_arguments(model, "position_ids", "logits_to_keep", "use_cache")

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest row so far."""
        return int(self.counts.max())

    def extend(
        self, ids: Int[Tensor, "batch pos"], valid: Bool[Tensor, "batch pos"], *, keep: int = 0
    ) -> Float[Tensor, "batch kept d_vocab"]:
        """Runs one more block of tokens; see `Rows.extend`."""
        ids, valid = ids.to(self.device), valid.to(self.device)
        places = self.counts[:, None] + valid.cumsum(dim=-1) - 1
        before, self.counts = self.counts, self.counts + valid.sum(dim=-1)
        self._append(ids, places, valid)
        return self._pass(before, places[:, -keep:].clamp_min(0))

    def step(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch 1 d_vocab"]:
        """Runs one token per row; a negative id means that the row has ended: it stays as it is."""
        fed = tokens.to(self.device)[:, None]
        return self.extend(fed, fed >= 0, keep=1)

    def _append(self, ids: Tensor, places: Tensor, valid: Tensor) -> None:
        width = int(self.counts.max())
        grown = ids.new_zeros(len(ids), width + 1)  # the last column takes what is no token
        kept = self._ids[:, :width]
        grown[:, : kept.shape[1]] = kept
        self._ids = grown.scatter_(1, places.masked_fill(~valid, width), ids)[:, :width]

    def _pass(self, before: Tensor, wanted: Int[Tensor, "batch kept"]) -> Tensor:
        """One call of the model; the logits at the wanted places of each row."""
        width = self._ids.shape[1]
        columns = torch.arange(width, device=self.device).expand_as(self._ids)
        grew = (self.counts > before)[:, None]
        own = columns.masked_fill((columns >= self.counts[:, None]) | ~grew, -1)
        tokens = RowPositions(own, self.prompt_lens, token_ids=self._ids, fresh=own >= before[:, None])
        self.run.begin(tokens)
        first = int(wanted.masked_fill(~grew, width - 1).min())
        known = {"position_ids": columns, "logits_to_keep": width - first, "use_cache": False}
        with running(Step(tokens, self._passes, self._rows)):
            logits = self.model(input_ids=self._ids, **{name: known[name] for name in self._optional}).logits
        self._passes += 1
        index = (wanted - (width - logits.shape[1])).clamp_min(0)
        return logits.gather(1, index.to(logits.device)[..., None].expand(-1, -1, logits.shape[-1]))

    def selected(self, index: Sequence[int], prompt_lens: Sequence[int] | None = None) -> "WholeRows":
        """New rows that continue these; see `Rows.selected`."""
        chosen = torch.tensor(list(index), device=self.device)
        lens = self.prompt_lens[chosen].tolist() if prompt_lens is None else prompt_lens
        rows = WholeRows(self.model, self.run.continued(index), lens)
        rows.counts, rows._ids, rows._passes = self.counts[chosen], self._ids[chosen], self._passes
        return rows

    def narrow(self, kept: Int[Tensor, " rows"]) -> None:
        """Drops all rows but these."""
        chosen = kept.to(self.device)
        self.run.narrow(kept)
        self.prompt_lens, self._rows = self.prompt_lens[chosen], self._rows[chosen]
        self.counts, self._ids = self.counts[chosen], self._ids[chosen]
