"""Arrays of a sparse autoencoder by our names, whatever their file calls them and whichever way they lie."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core.errors import VectorFileError
from steerlab.steering._sae_arrays import SaeArrays


class NamedArrays(SaeArrays):
    """Another file's arrays by our names.

    Args:
        arrays: the arrays.
        names: per name of ours, theirs, and whether a matrix lies the other way round; the others have one name.
    """

    def __init__(self, arrays: SaeArrays, names: Mapping[str, tuple[str, bool]]) -> None:
        super().__init__(arrays.path)
        self._arrays, self._names = arrays, names

    def names(self) -> set[str]:
        """See `SaeArrays.names`."""
        there = self._arrays.names()
        return there | {ours for ours, (theirs, _) in self._names.items() if theirs in there}

    def shape(self, name: str) -> tuple[int, ...]:
        """See `SaeArrays.shape`."""
        theirs, is_turned = self._names.get(name, (name, False))
        shape = self._arrays.shape(theirs)
        return shape[::-1] if is_turned else shape

    def rows(self, name: str, wanted: Sequence[int]) -> list[Tensor]:
        """See `SaeArrays.rows`."""
        theirs, is_turned = self._names.get(name, (name, False))
        return list(self._arrays.columns(theirs, wanted).T) if is_turned else self._arrays.rows(theirs, wanted)

    def columns(self, name: str, wanted: Sequence[int] | None) -> Float[Tensor, "n_rows n_wanted"]:
        """See `SaeArrays.columns`."""
        theirs, is_turned = self._names.get(name, (name, False))
        if not is_turned:
            return self._arrays.columns(theirs, wanted)
        if wanted is None:
            return self._arrays.columns(theirs, None).T
        return torch.stack([row.float() for row in self._arrays.rows(theirs, wanted)], dim=1)

    def vector(self, name: str) -> Float[Tensor, " n"]:
        """See `SaeArrays.vector`."""
        return self._arrays.vector(self._names.get(name, (name, False))[0])


class TensorArrays(SaeArrays):
    """The arrays of a file that was read as tensors.

    Args:
        path: the file.
        tensors: what it holds.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(path)
        self._tensors = tensors

    def names(self) -> set[str]:
        """See `SaeArrays.names`."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `SaeArrays.shape`."""
        return tuple(self._tensor(name).shape)

    def rows(self, name: str, wanted: Sequence[int]) -> list[Tensor]:
        """See `SaeArrays.rows`."""
        matrix = self._tensor(name, 2)
        return [matrix[self._there(name, 0, i)] for i in wanted]

    def columns(self, name: str, wanted: Sequence[int] | None) -> Float[Tensor, "n_rows n_wanted"]:
        """See `SaeArrays.columns`."""
        matrix = self._tensor(name, 2)
        return matrix.float() if wanted is None else matrix[:, [self._there(name, 1, i) for i in wanted]].float()

    def vector(self, name: str) -> Float[Tensor, " n"]:
        """See `SaeArrays.vector`."""
        return self._tensor(name, 1).float()

    def _tensor(self, name: str, ndim: int | None = None) -> Tensor:
        if name not in self._tensors:
            raise VectorFileError(f"{self.path} holds no {name}; it holds {', '.join(sorted(self._tensors))}.")
        found = self._tensors[name]
        if not found.is_floating_point():
            raise VectorFileError(f"{self.path} holds {name} as {found.dtype}; its numbers are floating-point.")
        if ndim is not None:
            self._usable(name, found.shape, ndim)
        return found

    def _there(self, name: str, axis: int, index: int) -> int:
        shape = self._tensors[name].shape
        if index >= shape[axis]:
            raise VectorFileError(
                f"{self.path} holds {name} {list(shape)}; there is no {('row', 'column')[axis]} {index}."
            )
        return index
