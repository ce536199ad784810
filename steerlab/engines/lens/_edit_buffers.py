"""Edits as data: the terms and positions of a plan's edits in tensors at fixed places, for a program made once."""

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from steerlab._kernels.availability import runs_kernels
from steerlab.steering.operators._edit import Edit, norm_kept


class EditBuffers:
    """Terms, positions and counts of the edits at one hook point.

    Args:
        n_terms: how many each edit has.
        n_rows: rows of the batch.
        capacity: tokens that may be generated.
        d_model: width of the stream.
        index: which of its generated tokens each row is at, shape [rows, 1], on the layer's device; negative for a row
            that has ended. The buffers read it only.
    """

    def __init__(self, n_terms: Sequence[int], n_rows: int, capacity: int, d_model: int, index: Tensor) -> None:
        n_edits, self.n_terms, self.index, device = len(n_terms), n_terms, index, index.device
        numbers = {"dtype": torch.float32, "device": device}
        self.reads = torch.zeros(sum(n_terms), d_model, **numbers)
        self.writes = torch.zeros(sum(n_terms), d_model, **numbers)
        self.gates = torch.zeros(sum(n_terms), 7, **numbers)
        self.keeps = torch.zeros(n_edits, dtype=torch.bool, device=device)
        self.selected = torch.zeros(n_edits, n_rows, capacity, dtype=torch.bool, device=device)
        self.factors = torch.zeros(n_edits, n_rows, capacity, **numbers)
        self.edited = torch.zeros(n_edits, n_rows, dtype=torch.long, device=device)
        self.changes = torch.zeros(n_edits, n_rows, **numbers)

    def fill(self, edits: Sequence[Edit]) -> None:
        """Writes a plan's edits at this hook point into the buffers, and begins to count anew."""
        terms = [term for edit in edits for term in edit.terms()]
        for k, term in enumerate(terms):
            self.reads[k] = 0.0 if term.read is None else term.read
            self.writes[k] = term.write
            self.gates[k] = torch.tensor([*astuple(term.gate), term.bias], dtype=torch.float32)
        self.keeps.copy_(torch.tensor([edit.norm is not None for edit in edits]))
        self.edited.zero_()
        self.changes.zero_()

    def place(self, k: int, first: int, selected: Tensor, factors: Tensor | float) -> None:
        """States which generated tokens, from the row's `first` one on, an edit reaches and how strongly.

        Args:
            k: the edit.
            first: index of the generated token that the first column stands for.
            selected: shape [rows, tokens].
            factors: shape [rows, tokens], or one number.
        """
        stretch = slice(first, first + selected.shape[1])
        self.selected[k, :, stretch] = selected
        self.factors[k, :, stretch] = factors

    def __call__(self, h: Tensor) -> Tensor:
        """The stream [rows, 1, d_model] after these edits, each seeing the one before; counts what it did."""
        apply = self._formula
        if runs_kernels(h):
            from steerlab._kernels.editing import can_edit

            apply = self._kernel if can_edit(h) else self._formula
        first = 0
        for k, count in enumerate(self.n_terms):
            h = apply(k, range(first, first + count), h)
            first += count
        return h

    def _kernel(self, k: int, terms: range, h: Tensor) -> Tensor:
        """What `_formula` computes."""
        from steerlab._kernels.editing import edit

        own = slice(terms.start, terms.stop)
        vectors = self.reads[own], self.writes[own], self.gates[own], self.keeps[k]
        return edit(h, *vectors, self.index, self.selected[k], self.factors[k], self.edited[k], self.changes[k])

    def _formula(self, k: int, terms: range, h: Tensor) -> Tensor:
        """The stream after the k-th edit."""
        column = self.index.clamp_min(0)
        wide, mask = h.to(torch.float32), self.selected[k].gather(1, column) & (self.index >= 0)
        delta = torch.zeros_like(wide)
        for term in terms:
            delta = delta + self._gated(term, wide)[..., None] * self.writes[term]
        delta = self.factors[k].gather(1, column)[..., None] * delta
        delta = torch.where(self.keeps[k], norm_kept(wide, delta), delta)
        delta = torch.where(mask[..., None], delta, 0.0)
        self.edited[k].add_(mask[:, 0])
        change = delta.norm(dim=-1) / wide.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.changes[k].add_(torch.where(mask, change, 0.0)[:, 0])  # a row that has ended may hold NaN
        return torch.where(mask[..., None], h + delta.to(h.dtype), h)

    def _gated(self, term: int, wide: Tensor) -> Tensor:
        amount, gain, low, high, slope, threshold, bias = self.gates[term].unbind()
        z = wide @ self.reads[term] + bias
        value = amount + slope * z + gain * torch.minimum(torch.maximum(z, low), high)
        return torch.where(z > threshold, value, 0.0)
