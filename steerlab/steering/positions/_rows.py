"""Which tokens a forward pass holds: their absolute positions in the rows they belong to."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Marks:
    """Positions found in the prompts of a batch, by the set that looked for them.

    Attributes:
        tables: per set, whether it holds each absolute position of each row; shape [batch, width]. Positions from
            `width` on are not in the set.
    """

    tables: Mapping[Hashable, Bool[Tensor, "batch width"]]

    def rows(self, kept: Int[Tensor, " rows"]) -> "Marks":
        return Marks({place: table[kept.to(table.device)] for place, table in self.tables.items()})


@dataclass(frozen=True)
class RowPositions:
    """Which tokens one forward pass holds. What it states never changes; copies on other devices are cached in it.

    Attributes:
        positions: absolute position of each token in its row, −1 for padding; shape [batch, pos].
        prompt_lens: prompt length of each row; shape [batch].
        lens_on: copies of `prompt_lens` by device; passes over the same rows share it.
        token_ids: the tokens, if known; padding may hold any id.
        marks: per row, the positions that `span` and `mask` found in its prompt, if the plan asks for them.
        fresh: False for tokens that an earlier pass has run, which are edited again and counted once; None if all are
            new.
        followed: by set, which of the tokens belong to it, if it looks back at earlier passes.
    """

    positions: Int[Tensor, "batch pos"]
    prompt_lens: Int[Tensor, " batch"]
    lens_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)
    token_ids: Int[Tensor, "batch pos"] | None = field(default=None, repr=False, compare=False)
    marks: Marks | None = field(default=None, repr=False, compare=False)
    fresh: Bool[Tensor, "batch pos"] | None = field(default=None, repr=False, compare=False)
    followed: Mapping[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _positions_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_token(self) -> Bool[Tensor, "batch pos"]:
        """False for padding."""
        return self.positions >= 0

    @property
    def generated_index(self) -> Int[Tensor, "batch pos"]:
        """0-based index among the row's generated tokens; negative in the prompt."""
        return self.positions - self.prompt_lens[:, None]

    def on(self, device: torch.device) -> "RowPositions":
        """The same on a device; each tensor is copied there at most once."""
        if device == self.positions.device:
            return self
        if device not in self.lens_on:
            self.lens_on[device] = self.prompt_lens.to(device)
        if device not in self._positions_on:
            self._positions_on[device] = self.positions.to(device)
        return RowPositions(
            self._positions_on[device],
            self.lens_on[device],
            token_ids=self.token_ids,
            marks=self.marks,
            fresh=self.fresh,
            followed=self.followed,
        )

    def among_fresh(self, mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """The selected tokens that no earlier pass has run."""
        return mask if self.fresh is None else mask & self.fresh.to(mask.device)

    def marked(self, by: Hashable) -> Bool[Tensor, "batch pos"]:
        """Which tokens belong to a set that was looked up in the prompts."""
        assert self.marks is not None
        table = self.marks.tables[by].to(self.positions.device)
        inside = (self.positions >= 0) & (self.positions < table.shape[1])
        return table.gather(1, self.positions.clamp(0, table.shape[1] - 1)) & inside

    def provide(self, device: torch.device, positions: Int[Tensor, "batch pos"]) -> None:
        """Stores a copy of the positions that is on a device already, for `on`."""
        self._positions_on[device] = positions

    @classmethod
    def of_rows(cls, lengths: list[int], prompt_lens: list[int], device: torch.device | str = "cpu") -> "RowPositions":
        """Whole rows of these lengths, left-padded to the longest, without token ids."""
        width = max(lengths)
        ends = torch.tensor(lengths, device=device)[:, None]
        positions = torch.arange(width, device=device)[None, :] - width + ends
        return cls(positions.clamp_min(-1), torch.tensor(prompt_lens, device=device))

    @classmethod
    def of_tokens(
        cls, token_ids: Sequence[Sequence[int] | np.ndarray], prompt_lens: Sequence[int], marks: Marks | None = None
    ) -> "RowPositions":
        """Whole rows of these tokens, left-padded to the longest, on the CPU."""
        rows = cls.of_rows([len(row) for row in token_ids], list(prompt_lens))
        ids = np.zeros(tuple(rows.positions.shape), dtype=np.int64)  # several times as fast as torch.tensor(list)
        for row, padded in zip(token_ids, ids, strict=True):
            padded[len(padded) - len(row) :] = row
        return replace(rows, token_ids=torch.from_numpy(ids), marks=marks)
