"""The head on an NVIDIA GPU: matrix products into one buffer of logits, which kernels measure and turn into gradients.

Logits keep the dtype in which the product gives them and are read once (a nucleus: some times) in forward. In backward
they are made again and overwritten by their gradient. Without a nucleus, backward takes many rows by few columns of the
vocabulary, so that the weight's gradient is one product per column block; a nucleus is read off logits that are equal
to those of forward only if their product has the same shape, so there backward takes forward's chunks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor

from steerlab._kernels.availability import runs_kernels
from steerlab._runtime.model_parts import LogitTransform
from steerlab.core.policy import SamplingPolicy
from steerlab.measures.nucleus import LEAST_TAIL, nucleus_edges, truncates

if TYPE_CHECKING:
    from steerlab._kernels.steps import RowMeasures

BUFFER_BYTES = 256 << 20
"""Bytes of the buffer of logits, twice as many with a nucleus."""

BACKWARD_ROWS = 16384
"""Rows that backward takes at once where it cuts the vocabulary."""

_HAS_OUT_DTYPE = Version(torch.__version__) >= Version("2.8")  # products of narrow matrices in float32

_TILE = 128  # rows and columns that a matrix product does at once

By = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class FusedHead:
    """The head's matrices and what is measured.

    Attributes:
        transform: what the model does to the head's output.
        policy: the sampling policy.
        weight: [d_vocab, d_model].
        bias: [d_vocab], or None.
        chunk_rows: rows at a time; None takes what fits the buffer.
    """

    transform: LogitTransform
    policy: SamplingPolicy
    weight: Tensor
    bias: Tensor | None
    chunk_rows: int | None

    @property
    def temperature(self) -> float:
        """What logits are divided by; a greedy policy leaves them as they are."""
        return 1.0 if self.policy.is_greedy else self.policy.temperature

    @property
    def cuts_rows_only(self) -> bool:
        """Whether backward takes forward's chunks."""
        return truncates(self.policy)

    def rows_at_once(self) -> int:
        """Rows of a chunk of whole logits."""
        if self.chunk_rows is not None:
            return self.chunk_rows
        budget = BUFFER_BYTES * (2 if truncates(self.policy) else 1)
        rows = budget // (self.weight.element_size() * self.weight.shape[0])
        return max(1, rows // _TILE * _TILE or rows)

    def measure(self, hidden: Tensor, tokens: Tensor) -> "RowMeasures":
        """Log p, log q and entropy of every row, and what their gradient needs."""
        from steerlab._kernels.steps import RowMeasures, measure_rows_on_gpu

        n_rows = len(hidden)
        edges = torch.empty(n_rows, dtype=torch.long, device=hidden.device) if truncates(self.policy) else None
        measured = RowMeasures.empty(n_rows, edges, hidden.device)
        size = self.rows_at_once()
        buffer = hidden.new_empty((min(size, n_rows), self.weight.shape[0]))
        for part in _slices(n_rows, size):
            logits = self._logits(hidden[part], self.weight, self.bias, buffer)
            if edges is not None:
                edges[part] = self._edges(logits)
            measure_rows_on_gpu(logits, tokens[part], self.temperature, measured[part])
        return measured

    def pull_back(self, hidden: Tensor, tokens: Tensor, measured: "RowMeasures", by: By, wants: "Wants") -> "Gradients":
        """Gradients by hidden states, weight and bias, from those by log p, log q and entropy."""
        by = (by[0], None, None) if self.policy.is_greedy else by  # a point mass does not move with the logits
        by = (_plain(by[0]), _plain(by[1]), _plain(by[2]))
        run = _ByChunks(self, hidden, tokens, measured, by, wants)
        return run.whole_rows() if self.cuts_rows_only else run.blocks()

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """The model's logits of some rows and columns, in the buffer if nothing but the product makes them."""
        into = buffer.view(-1)[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        if bias is None:
            torch.mm(hidden, weight.T, out=into)
        else:
            torch.addmm(bias, hidden, weight.T, out=into)
        return self.transform(into)

    def _edges(self, logits: Tensor) -> Tensor:
        policy = self.policy
        if not policy.is_greedy and policy.top_k == 0 and policy.min_p == 0 and 1 - policy.top_p > LEAST_TAIL:
            from steerlab._kernels.top_p import top_p_edges_on_gpu

            return top_p_edges_on_gpu(logits, policy.top_p, policy.temperature)
        edges = nucleus_edges(logits.float(), policy)
        assert edges is not None
        return edges


@dataclass(frozen=True)
class Wants:
    hidden: bool
    weight: bool
    bias: bool


@dataclass
class Gradients:
    """Those gradients; None for what was not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class _ByChunks:
    """One backward pass."""

    head: FusedHead
    hidden: Tensor
    tokens: Tensor
    measured: "RowMeasures"
    by: By
    wants: Wants

    def whole_rows(self) -> Gradients:
        """Over forward's chunks of rows; the weight's gradient is summed over them in float32."""
        head, size = self.head, self.head.rows_at_once()
        buffer = self._buffer(min(size, len(self.hidden)) * len(head.weight))
        total = self._room(torch.float32)
        for part in _slices(len(self.hidden), size):
            gradient = self._gradient(part, slice(0, len(head.weight)), buffer)
            if total.hidden is not None:
                torch.mm(gradient, head.weight, out=total.hidden[part])
            if total.weight is not None:
                _add_product(total.weight, gradient.T, self.hidden[part], is_first=part.start == 0)
            if total.bias is not None:
                total.bias += gradient.sum(dim=0, dtype=torch.float32)
        return self._narrowed(total)

    def blocks(self) -> Gradients:
        """Over blocks of rows and columns; few rows at most make the weight's gradient one product per column block."""
        head, dtype = self.head, self.head.weight.dtype
        rows = max(1, min(BACKWARD_ROWS, head.chunk_rows or BACKWARD_ROWS))
        is_one = len(self.hidden) <= rows
        columns = _even(len(head.weight), BUFFER_BYTES // head.weight.element_size() // min(rows, len(self.hidden)))
        buffer = self._buffer(min(rows, len(self.hidden)) * columns)
        total = self._room(dtype if is_one else torch.float32)
        for part in _slices(len(self.hidden), rows):
            summed = self.hidden.new_empty(self.hidden[part].shape, dtype=torch.float32) if self.wants.hidden else None
            for place in _slices(len(head.weight), columns):
                gradient = self._gradient(part, place, buffer)
                if summed is not None:
                    _add_product(summed, gradient, head.weight[place], is_first=place.start == 0)
                if total.weight is not None and is_one:
                    torch.mm(gradient.T, self.hidden, out=total.weight[place])
                elif total.weight is not None:
                    _add_product(total.weight[place], gradient.T, self.hidden[part], is_first=part.start == 0)
                if total.bias is not None:
                    total.bias[place] += gradient.sum(dim=0, dtype=torch.float32)
            if total.hidden is not None and summed is not None:
                total.hidden[part] = summed
        return self._narrowed(total)

    def _gradient(self, part: slice, place: slice, buffer: Tensor) -> Tensor:
        """By the head's output of some rows and columns."""
        from steerlab._kernels.steps import gradient_in_place_on_gpu

        head, transform = self.head, self.head.transform
        bias = None if head.bias is None else head.bias[place]
        logits = head._logits(self.hidden[part], head.weight[place], bias, buffer)
        gradient_in_place_on_gpu(
            logits,
            self.tokens[part],
            head.temperature,
            self.measured[part],
            _part(self.by, part),
            first_id=place.start,
            factor=transform.multiplier / transform.divisor,
            softcap=transform.softcap,
        )
        return logits

    def _buffer(self, size: int) -> Tensor:
        return self.hidden.new_empty(size)

    def _room(self, weight_dtype: torch.dtype) -> Gradients:
        weight, bias = self.head.weight, self.head.bias
        return Gradients(
            torch.empty_like(self.hidden) if self.wants.hidden else None,
            torch.empty_like(weight, dtype=weight_dtype) if self.wants.weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if self.wants.bias and bias is not None else None,
        )

    def _narrowed(self, total: Gradients) -> Gradients:
        dtype = self.head.weight.dtype
        weight = None if total.weight is None else total.weight.to(dtype)
        return Gradients(total.hidden, weight, None if total.bias is None else total.bias.to(dtype))


def is_fused(weight: Tensor, measure_dtype: torch.dtype | None, with_shape: bool) -> bool:
    """Whether kernels can measure what a head of this dtype and place gives."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return not with_shape and weight.dtype in dtypes and measure_dtype in (None, torch.float32) and runs_kernels(weight)


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Adds a @ b to a float32 total without rounding it in between; the first product replaces what is there."""
    options: dict[str, Any] = {} if total.dtype == a.dtype else {"out_dtype": total.dtype}
    if options and not _HAS_OUT_DTYPE:
        product = a @ b
        total.copy_(product) if is_first else total.add_(product)
    elif is_first:
        torch.mm(a, b, **options, out=total)
    else:
        torch.addmm(total, a, b, **options, out=total)


def _plain(g: Tensor | None) -> Tensor | None:
    return None if g is None else g.float().contiguous()


def _part(by: By, part: slice) -> By:
    log_p, log_q, entropy = (None if g is None else g[part] for g in by)
    return log_p, log_q, entropy


def _even(total: int, most: int) -> int:
    """The size of blocks that are all about alike, a multiple of a product's tile where that fits."""
    blocks = -(-total // max(1, most))
    size = -(-total // blocks)
    return min(total, -(-size // _TILE) * _TILE)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
