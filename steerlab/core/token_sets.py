"""Sets of tokens, one per step, stored compactly: the supports that a sampler drew from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from typing_extensions import override

from steerlab.core.errors import InputError

KEPT, DROPPED, BITS = 0, 1, 2
"""How a step's set is written: the ids of its members, the ids of all other tokens, or a bit per token."""


@dataclass(frozen=True, eq=False)
class TokenSets(Sequence[np.ndarray]):
    """One set of tokens per step, each in the shortest of three forms; a set of all tokens takes no byte.

    A sequence of arrays: `sets[t]` is the sorted ids of step t, int64. Slices are TokenSets again.

    Attributes:
        d_vocab: tokens that a set may hold.
        kinds: the form of each, uint8 [steps]: `KEPT`, `DROPPED` or `BITS`.
        lengths: bytes of each, int64 [steps].
        data: the bytes of all, one after the other, uint8.

    Raises:
        InputError: if the parts contradict each other.

    Examples:
        >>> sets = TokenSets.of([[3, 1], [0, 1, 2, 3, 4]], d_vocab=5)
        >>> sets[0].tolist(), sets.sizes.tolist(), sets.nbytes
        ([1, 3], [2, 5], 1)
    """

    d_vocab: int
    kinds: np.ndarray
    lengths: np.ndarray
    data: np.ndarray

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.lengths) or int(self.lengths.sum()) != len(self.data):
            raise InputError(
                f"Token sets of {len(self.kinds)} steps have {len(self.lengths)} lengths, of {int(self.lengths.sum())} "
                f"bytes together, and {len(self.data)} bytes of data."
            )

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]], d_vocab: int) -> "TokenSets":
        """From the ids of each step.

        Raises:
            InputError: for an id outside the vocabulary.
        """
        rows = [np.unique(np.fromiter(ids, dtype=np.int64)) for ids in sets]
        for ids in rows:
            if len(ids) and not (ids[0] >= 0 and ids[-1] < d_vocab):
                raise InputError(f"A support holds token {ids[0 if ids[0] < 0 else -1]}, the vocabulary {d_vocab}.")
        mask = np.zeros((len(rows), d_vocab), dtype=bool)
        for step, ids in enumerate(rows):
            mask[step, ids] = True
        return cls.of_masks(mask)

    @classmethod
    def of_masks(cls, inside: np.ndarray) -> "TokenSets":
        """From which tokens are in each step's set, bool [steps, d_vocab]."""
        d_vocab, dtype = inside.shape[1], id_dtype(inside.shape[1])
        kinds = shortest_forms(inside.sum(axis=1), d_vocab)
        parts = {
            KEPT: np.nonzero(inside[kinds == KEPT])[1].astype(dtype).view(np.uint8),
            DROPPED: np.nonzero(~inside[kinds == DROPPED])[1].astype(dtype).view(np.uint8),
            BITS: np.packbits(inside[kinds == BITS], axis=1, bitorder="little").ravel(),
        }
        return cls.assembled(d_vocab, kinds, inside.sum(axis=1), parts)

    @classmethod
    def assembled(
        cls, d_vocab: int, kinds: np.ndarray, sizes: np.ndarray, parts: Mapping[int, np.ndarray]
    ) -> "TokenSets":
        """From the bytes of all sets of each form, in order of steps.

        Args:
            d_vocab: tokens that a set may hold.
            kinds: the form of each set.
            sizes: the members of each.
            parts: by form, the bytes of its sets.
        """
        width = id_dtype(d_vocab).itemsize
        lengths = np.select(
            [kinds == KEPT, kinds == DROPPED], [sizes * width, (d_vocab - sizes) * width], -(-d_vocab // 8)
        ).astype(np.int64)
        owners = np.repeat(kinds, lengths)
        data = np.empty(len(owners), dtype=np.uint8)
        for kind, values in parts.items():
            data[owners == kind] = values
        return cls(d_vocab, kinds.astype(np.uint8), lengths, data)

    @classmethod
    def everything(cls, n_steps: int, d_vocab: int) -> "TokenSets":
        """Sets of all tokens."""
        kinds = np.full(n_steps, DROPPED, dtype=np.uint8)
        return cls(d_vocab, kinds, np.zeros(n_steps, dtype=np.int64), np.zeros(0, dtype=np.uint8))

    @classmethod
    def singletons(cls, tokens: Sequence[int], d_vocab: int) -> "TokenSets":
        """Sets of one token each, such as a greedy policy's."""
        data = np.asarray(tokens, dtype=id_dtype(d_vocab)).view(np.uint8)
        lengths = np.full(len(tokens), id_dtype(d_vocab).itemsize, dtype=np.int64)
        return cls(d_vocab, np.full(len(tokens), KEPT, dtype=np.uint8), lengths, data)

    @classmethod
    def joined(cls, parts: Sequence["TokenSets"]) -> "TokenSets":
        """The steps of all parts, in order; at least one part.

        Raises:
            InputError: for parts of different vocabularies.
        """
        sizes = {part.d_vocab for part in parts if len(part)} or {part.d_vocab for part in parts}
        if len(sizes) != 1:
            raise InputError(f"Token sets of one vocabulary can be joined, got {sorted(sizes)}.")
        return cls(sizes.pop(), *(np.concatenate([getattr(p, name) for p in parts]) for name in _PARTS))

    def take(self, steps: Sequence[int] | np.ndarray) -> "TokenSets":
        """The sets of some steps, in the order given."""
        steps = np.asarray(steps, dtype=np.int64)
        lengths = self.lengths[steps]
        begins = (np.cumsum(self.lengths) - self.lengths)[steps]
        places = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        return TokenSets(self.d_vocab, self.kinds[steps], lengths, self.data[places])

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> "TokenSets": ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        return np.nonzero(self.take([range(len(self))[index]]).masks()[0])[0]

    @override
    def __len__(self) -> int:
        return len(self.kinds)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSets):
            return NotImplemented
        same = self.d_vocab == other.d_vocab and len(self) == len(other)
        return same and np.array_equal(self.masks(), other.masks())

    @override
    def __repr__(self) -> str:
        return f"TokenSets({len(self)} steps of {self.d_vocab} tokens, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the ids and bits."""
        return self.data.nbytes

    @property
    def sizes(self) -> np.ndarray:
        """How many tokens each set holds, int64 [steps]."""
        listed = self.lengths // id_dtype(self.d_vocab).itemsize
        found = np.where(self.kinds == KEPT, listed, self.d_vocab - listed)
        found[self.kinds == BITS] = self.bits().sum(axis=1)
        return found

    def listed(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids that sets of one form list.

        Returns:
            The step and the id of each, int64.
        """
        mine = self.kinds == kind
        ids = self.data[np.repeat(mine, self.lengths)].view(id_dtype(self.d_vocab)).astype(np.int64)
        counts = self.lengths[mine] // id_dtype(self.d_vocab).itemsize
        return np.repeat(np.nonzero(mine)[0], counts), ids

    def bits(self) -> np.ndarray:
        """The sets written in bits, bool [such steps, d_vocab]."""
        mine = self.kinds == BITS
        rows = self.data[np.repeat(mine, self.lengths)].reshape(int(mine.sum()), -(-self.d_vocab // 8))
        return np.unpackbits(rows, axis=1, count=self.d_vocab, bitorder="little").astype(bool)

    def masks(self) -> np.ndarray:
        """Which tokens are in each set, bool [steps, d_vocab]."""
        inside = np.repeat((self.kinds == DROPPED)[:, None], self.d_vocab, axis=1)
        inside[self.listed(KEPT)] = True
        inside[self.listed(DROPPED)] = False
        inside[self.kinds == BITS] = self.bits()
        return inside

    def to_bytes(self) -> bytes:
        """All of it; see `from_bytes`."""
        numbers = np.array([self.d_vocab, len(self)], dtype="<i8")
        lengths = self.lengths.astype("<i8")
        return numbers.tobytes() + self.kinds.tobytes() + lengths.tobytes() + self.data.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> "TokenSets":
        """What `to_bytes` wrote."""
        d_vocab, count = np.frombuffer(content, dtype="<i8", count=2).tolist()
        kinds = np.frombuffer(content, dtype=np.uint8, offset=16, count=count)
        lengths = np.frombuffer(content, dtype="<i8", offset=16 + count, count=count).astype(np.int64)
        return cls(d_vocab, kinds, lengths, np.frombuffer(content, dtype=np.uint8, offset=16 + 9 * count))


_PARTS = ("kinds", "lengths", "data")


def id_dtype(d_vocab: int) -> np.dtype[Any]:
    """The narrowest of the dtypes that ids are stored in; always the same order of bytes."""
    return np.dtype("<u2" if d_vocab <= 1 << 16 else "<u4")


def shortest_forms(sizes: np.ndarray, d_vocab: int) -> np.ndarray:
    """The form that takes the fewest bytes for sets of these sizes, uint8."""
    width = id_dtype(d_vocab).itemsize
    listed = np.where(sizes <= d_vocab - sizes, KEPT, DROPPED)
    shorter = np.minimum(sizes, d_vocab - sizes) * width
    return np.where(shorter > -(-d_vocab // 8), BITS, listed).astype(np.uint8)
