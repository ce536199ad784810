"""Sparse autoencoders from files: their decoder rows as vectors, and the whole, whose features plans set.

Row i of `W_dec` `[d_sae, d_in]` is what feature i adds to the autoencoder's reconstruction, so adding it to the stream
at the autoencoder's hook point is turning the feature up. Which files are read, see
`steerlab.steering.formats._sae_layouts`; only what is asked for is read of them, whatever their size. Which activation
an encoder has, see `steerlab.steering.sae`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Integer
from steerlab.core.errors import HookPointError, VectorFileError
from steerlab.steering._sae_arrays import SaeArrays
from steerlab.steering.formats._sae_layouts import find_sae
from steerlab.steering.sae import SparseAutoencoder
from steerlab.steering.vectors import SteeringVector


@overload
def import_sae(
    path: str | Path, features: Sequence[Integer], *, hook_point: str | None = None, model: str | None = None
) -> list[SteeringVector]: ...
@overload
def import_sae(path: str | Path, *, hook_point: str | None = None, model: str | None = None) -> SparseAutoencoder: ...
def import_sae(
    path: str | Path,
    features: Sequence[Integer] | None = None,
    *,
    hook_point: str | None = None,
    model: str | None = None,
) -> Any:
    """A sparse autoencoder at its hook point, or the decoder rows of some of its features.

    Args:
        path: a folder as SAELens, Gemma Scope, sparsify, dictionary_learning or Llama Scope publish it, or Gemma
            Scope's `params.npz` itself.
        features: indices of features, from 0, whose decoder rows are wanted; None for the autoencoder.
        hook_point: where the autoencoder writes; needed if the file does not say it, and then overrules it.
        model: name of its model; likewise.

    Returns:
        The `SparseAutoencoder`; or, with features, what its `vectors(features)` gives: one vector per feature, in the
        requested order, with the row's own length and a card that names feature, file and model.

    Raises:
        VectorFileError: if the files are missing, damaged or contradict each other, there is no such feature, or no
            hook point of ours is stated.

    Examples:
        >>> sae = import_sae("gpt2-res-jb/blocks.8.hook_resid_pre")  # doctest: +SKIP
        >>> plan = sl.Plan(sl.feature(sae, 1234, set_to=8.0))  # doctest: +SKIP
    """
    found = find_sae(Path(path))
    point = _point(path, hook_point or found.hook_point)
    shape = _decoder_shape(found.arrays, found.shape)
    made = SparseAutoencoder(Path(path), point, model or found.model, *shape, found.encoding, found.notes, found.arrays)
    return made if features is None else made.vectors(features)


def _point(path: str | Path, name: str | None) -> HookPoint:
    if name is None:
        raise VectorFileError(
            f"{path} does not say where its autoencoder sits; pass hook_point, e.g. 'blocks.20.hook_resid_post'."
        )
    try:
        return HookPoint.parse(name)
    except HookPointError as error:
        raise VectorFileError(f"The autoencoder of {path} sits at {name!r:.80}, no hook point here: {error}") from error


def _decoder_shape(arrays: SaeArrays, stated: tuple[int | None, int | None]) -> tuple[int, int]:
    shape = arrays.shape("W_dec")
    if len(shape) != 2 or min(shape) < 1:
        raise VectorFileError(f"{arrays.path} holds W_dec {list(shape)}; a decoder is [d_sae, d_in].")
    if any(told not in (None, found) for told, found in zip(stated, shape, strict=True)):
        raise VectorFileError(f"{arrays.path} holds W_dec {list(shape)}, its configuration states {list(stated)}.")
    return shape[0], shape[1]
