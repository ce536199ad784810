"""A worker's answer to `settle`: what happened to each request, as arrays with the entries of all rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PARTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ran": (np.int64, (2,)),
    "edits": (np.int64, ()),
    "tally": (np.float64, (3,)),
    "answers": (np.float32, (2,)),
    "read": (np.int64, ()),
    "at": (np.int64, ()),
    "measured": (np.float32, ()),
}
"""Kind and shape of one entry: a run of positions that went through the model; which edit; its tokens, summed ‖Δx‖/‖x‖,
and the tokens that came before its condition was answered; sum and count of what a condition read; a position that was
read; which prediction was measured; a measured value."""

RANKS_APART = 1e-5
"""By how much ranks may differ in what each computes from the same logits, in nats."""


def join_rows(rows: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Each of `PARTS`, given row by row, as one array, and under `n_` and its name how many entries each row has."""
    joined = {}
    for name, (dtype, shape) in PARTS.items():
        given = rows[name]
        parts = [np.asarray(row, dtype=dtype).reshape(-1, *shape) for row in given if len(row)]
        joined[name] = np.concatenate(parts) if parts else np.zeros((0, *shape), dtype=dtype)
        joined[f"n_{name}"] = np.fromiter(map(len, given), dtype=np.int64)
    return joined


class WorkerReply:
    """One worker's answer.

    Args:
        header: `rows` in order, `problems` by row, the worker's `points`, and its ranks `tp` and `pp`.
        arrays: what `join_rows` gives; under `streams.` and a row its activations, float32 [points, positions,
            d_model]; under `distribution.` and a row its log-distributions, float32 [predictions, d_vocab]; under
            `supports.` and a row the bytes of the sets that it drew from.
    """

    def __init__(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.header, self._arrays = header, arrays
        self._index = {row: index for index, row in enumerate(header["rows"])}
        self._ends = {name: np.cumsum(arrays[f"n_{name}"]).tolist() for name in PARTS}

    def of(self, name: str, row: str) -> np.ndarray:
        """A row's part of an array."""
        index, ends = self._index[row], self._ends[name]
        return self._arrays[name][ends[index - 1] if index else 0 : ends[index]]

    def array(self, name: str, row: str) -> np.ndarray | None:
        """A row's own array: `streams`, `distribution` or `supports`; None if this worker sent none."""
        return self._arrays.get(f"{name}.{row}")

    def edited(self, row: str) -> list[tuple[int, int]]:
        """Per edit the tokens edited; nothing if the worker has no record of the row."""
        if row not in self._index:
            return []
        return list(zip(self.of("edits", row).tolist(), self.of("tally", row)[:, 0].tolist(), strict=True))

    def measured_like(self, other: "WorkerReply", row: str) -> bool:
        """Whether two ranks measured the same."""
        if row not in self._index or row not in other._index:
            return (row in self._index) == (row in other._index)
        mine, theirs = self.of("measured", row), other.of("measured", row)
        same_shape = mine.shape == theirs.shape
        return same_shape and np.allclose(mine, theirs, rtol=RANKS_APART, atol=RANKS_APART, equal_nan=True)
