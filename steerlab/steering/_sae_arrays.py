"""Rows, columns and vectors of the arrays of a sparse autoencoder's file, without the rest of it.

A decoder `W_dec` `[d_sae, d_in]` is read by rows, an encoder `W_enc` `[d_in, d_sae]` by columns, and what there is one
number of per feature (`b_enc`, `threshold`) or per coordinate (`b_dec`) whole.
"""

import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steerlab.core.errors import VectorFileError

_READ_AT_ONCE = 1 << 24  # bytes of an array that is read in parts


class SaeArrays(ABC):
    """The arrays of one file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> set[str]:
        """The arrays there are."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that an array's header states."""

    @abstractmethod
    def rows(self, name: str, wanted: Sequence[int]) -> list[Tensor]:
        """Rows of a matrix, floating-point, in the requested order."""

    @abstractmethod
    def columns(self, name: str, wanted: Sequence[int] | None) -> Float[Tensor, "n_rows n_wanted"]:
        """Columns of a matrix, float32, in the requested order; all of them for None."""

    @abstractmethod
    def vector(self, name: str) -> Float[Tensor, " n"]:
        """An array of one dimension, float32."""

    def _usable(self, name: str, shape: Sequence[int], ndim: int) -> None:
        if len(shape) != ndim or min(shape) < 1:
            kind = "a matrix" if ndim == 2 else "one number per feature or coordinate"
            raise VectorFileError(f"{self.path} holds {name} {list(shape)}; due is {kind}.")


class SafetensorsArrays(SaeArrays):
    """The arrays of a safetensors file."""

    def names(self) -> set[str]:
        """See `SaeArrays.names`."""
        with self._open() as file:
            return set(file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """See `SaeArrays.shape`."""
        with self._open() as file:
            return tuple(file.get_slice(name).get_shape())

    def rows(self, name: str, wanted: Sequence[int]) -> list[Tensor]:
        """See `SaeArrays.rows`."""
        with self._open() as file:
            part = file.get_slice(name)
            self._usable(name, part.get_shape(), 2)
            return [self._floating(name, part[i]) for i in wanted]

    def columns(self, name: str, wanted: Sequence[int] | None) -> Float[Tensor, "n_rows n_wanted"]:
        """See `SaeArrays.columns`."""
        with self._open() as file:
            part = file.get_slice(name)
            self._usable(name, part.get_shape(), 2)
            if wanted is None:
                return self._floating(name, part[:]).float()
            return torch.stack([self._floating(name, part[:, i]).float() for i in wanted], dim=1)

    def vector(self, name: str) -> Float[Tensor, " n"]:
        """See `SaeArrays.vector`."""
        with self._open() as file:
            part = file.get_slice(name)
            self._usable(name, part.get_shape(), 1)
            return self._floating(name, part[:]).float()

    def _floating(self, name: str, values: Tensor) -> Tensor:
        if not values.is_floating_point():
            raise VectorFileError(f"{self.path} holds {name} as {values.dtype}; its numbers are floating-point.")
        return values

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, "pt") as file:
                yield file
        except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError, OverflowError) as error:
            if isinstance(error, VectorFileError):
                raise
            raise VectorFileError(f"Cannot read the autoencoder's weights {self.path}: {error!s:.120}.") from error


class NpzArrays(SaeArrays):
    """The arrays of a NumPy archive, found by their place: `np.load` would make the whole array a header claims."""

    def names(self) -> set[str]:
        """See `SaeArrays.names`."""
        with self._archive("W_dec") as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}

    def shape(self, name: str) -> tuple[int, ...]:
        """See `SaeArrays.shape`."""
        with self._array(name) as (_, shape, _):
            return shape

    def rows(self, name: str, wanted: Sequence[int]) -> list[Tensor]:
        """See `SaeArrays.rows`."""
        with self._array(name, 2) as (stream, shape, dtype):
            if max(wanted) >= shape[0]:
                raise VectorFileError(f"{self.path} holds {name} {list(shape)}; there is no row {max(wanted)}.")
            start, width, rows = stream.tell(), shape[1] * dtype.itemsize, {}
            for i in sorted(set(wanted)):  # forwards only: the stream may be compressed
                stream.seek(start + i * width)
                rows[i] = _numbers(stream.read(width), dtype)
            return [torch.from_numpy(rows[i]) for i in wanted]

    def columns(self, name: str, wanted: Sequence[int] | None) -> Float[Tensor, "n_rows n_wanted"]:
        """See `SaeArrays.columns`."""
        with self._array(name, 2) as (stream, shape, dtype):
            if wanted is not None and max(wanted) >= shape[1]:
                raise VectorFileError(f"{self.path} holds {name} {list(shape)}; there is no column {max(wanted)}.")
            width = shape[1] * dtype.itemsize
            size = max(1, _READ_AT_ONCE // width)
            kept = []
            for start in range(0, shape[0], size):
                rows = _numbers(stream.read(min(size, shape[0] - start) * width), dtype).reshape(-1, shape[1])
                kept.append(rows if wanted is None else rows[:, list(wanted)])
            return torch.from_numpy(np.concatenate(kept))

    def vector(self, name: str) -> Float[Tensor, " n"]:
        """See `SaeArrays.vector`."""
        with self._array(name, 1) as (stream, shape, dtype):
            return torch.from_numpy(_numbers(stream.read(shape[0] * dtype.itemsize), dtype))

    @contextmanager
    def _array(
        self, name: str, ndim: int | None = None
    ) -> Iterator[tuple[zipfile.ZipExtFile | IO[bytes], tuple[int, ...], Any]]:
        with self._archive(name) as archive:
            member = archive.getinfo(f"{name}.npy")
            with archive.open(member) as stream:
                shape, dtype = self._header(name, stream)
                if ndim is not None:
                    self._usable(name, shape, ndim)
                    if member.file_size - stream.tell() != prod(shape) * dtype.itemsize:
                        raise VectorFileError(
                            f"{self.path} is damaged: {name} {list(shape)} does not fill its {member.file_size:,} "
                            "bytes."
                        )
                yield stream, shape, dtype

    def _header(self, name: str, stream: zipfile.ZipExtFile | IO[bytes]) -> tuple[tuple[int, ...], Any]:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise VectorFileError(
                f"{self.path} holds {name} in version {version} of the npy format; versions 1 and 2 are read."
            )
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, dtype = read(stream)
        if dtype.kind != "f" or (by_column and len(shape) > 1):
            order = "column by column" if by_column else "row by row"
            raise VectorFileError(
                f"{self.path} holds {name} as {dtype}, {order}; floating-point numbers row by row are read."
            )
        return tuple(shape), dtype

    @contextmanager
    def _archive(self, name: str) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, VectorFileError):
                raise
            raise VectorFileError(
                f"{self.path} is no archive with the array {name}, or it is damaged: {error!s:.120}."
            ) from error


def _numbers(data: bytes, dtype: Any) -> np.ndarray:
    return np.frombuffer(data, dtype=dtype).astype(np.float32)
