"""Vectors in `.pt` files: a dictionary, or one bare tensor, that `torch.save` wrote.

Keys are hook points (`blocks.14.hook_resid_post`), or layer numbers counted from 0 (`14` or `"14"`) that all mean one
site. Values are floating-point tensors `[d_model]`, or one such row as `[1, d_model]` or `[1, 1, d_model]`. Cards have
no place in such a file.

A `.pt` file is a pickle, and a pickle is a program. Ours are read by `torch.load(weights_only=True)` and by nothing
else, after a look at the pickle's instructions, without running them, that lets only tensors in dictionaries pass.
"""

import io
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from steerlab.core._files import write_atomic
from steerlab.core._hook_points import HookPoint, check_site
from steerlab.core._numbers import Integer, plain
from steerlab.core.errors import HookPointError, VectorFileError
from steerlab.steering._row_values import row_of
from steerlab.steering.files import as_vector_set, check_no_low_rank, checked_size, usable_vector
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet

BARE: Final = ""
"""The key of a tensor that a file holds in no dictionary."""
_STORAGES: Final = ("Float", "Double", "Half", "BFloat16", "Long", "Int")
_OWN_TENSOR: Final = "Vectors of any other file become ours one by one: sl.SteeringVector.from_tensor(tensor, layer=…)."
# All that a dictionary of tensors refers to. `torch.load(weights_only=True)` would take more, `bytearray(10**12)` too.
_HARMLESS: Final = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in _STORAGES),
}
_LAYER: Final = re.compile(r"-?\d{1,6}", re.ASCII)
# Instructions that name or call something in another way than GLOBAL and REDUCE.
_CALLS: Final = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"}


def import_torch(path: str | Path, *, site: str = "resid_post", layer: Integer | None = None) -> VectorSet:
    """The vectors of a `.pt` dictionary, or of a file with one bare tensor.

    Args:
        path: written by `torch.save` (since PyTorch 1.6) or `export_torch`.
        site: what layer numbers as keys, and `layer`, mean; keys that are hook points say it themselves.
        layer: the layer of a bare tensor; a dictionary states its layers itself.

    Raises:
        VectorFileError: if the file is missing, damaged, refers to anything but tensors, or is no dictionary of
            floating-point rows at hook points of one site.
    """
    check_site(site)
    found = _placed(path, load_tensors(path), layer)
    vectors = [_vector(path, key, value, site) for key, value in found.items()]
    return as_vector_set(path, vectors)


def _placed(path: str | Path, found: dict[str | int, Tensor], layer: Integer | None) -> dict[str | int, Tensor]:
    """The tensors by hook point or layer."""
    if BARE not in found:
        if layer is not None:
            raise VectorFileError(f"{path} states the layers of its vectors itself; leave layer= out.")
        return found
    if layer is None:
        raise VectorFileError(
            f"{path} holds one tensor {list(found[BARE].shape)} and does not say where it belongs; pass layer=. "
            f"{_OWN_TENSOR}"
        )
    return {HookPoint(plain(layer)).layer: found[BARE]}


def export_torch(path: str | Path, vectors: VectorSet | SteeringVector) -> Path:
    """Writes a dictionary from hook point to float32 tensor, atomically. Cards are left out: the format has none.

    Raises:
        VectorFileError: if it is neither a vector nor a vector set, such as a plan, or there is none.
    """
    held = [vectors] if isinstance(vectors, SteeringVector) else list(getattr(vectors, "by_layer", ()))
    if not held:
        raise VectorFileError(
            f"A .pt dictionary states vectors at hook points and no more; pass a vector or a vector set with at least "
            f"one vector, not {type(vectors).__name__}."
        )
    check_no_low_rank(held, "A .pt dictionary")
    buffer = io.BytesIO()
    torch.save({vector.hook_point.name: vector.values for vector in held}, buffer)
    return write_atomic(path, buffer.getvalue())


def load_tensors(path: str | Path, **limit: int) -> dict[str | int, Tensor]:
    """The tensors of a dictionary that `torch.save` wrote, on the CPU; nothing in the file is run.

    A tensor in no dictionary has the key `BARE`.

    Args:
        path: the file.
        **limit: `most`, how many bytes it may have, if more than a file of vectors.

    Raises:
        VectorFileError: if the file is missing, damaged, or anything but such a dictionary or tensor.
    """
    size = checked_size(path, **limit)
    pickled, record_sizes = _contents(path)
    _check_instructions(path, pickled)
    try:
        # Mapped, a storage that claims more bytes than its record has ends at the end of the file, not in memory that
        # holds something else.
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a hostile pickle can make it fail in any way
        raise VectorFileError(f"{path} is damaged: torch cannot load it ({type(error).__name__}).") from error
    if isinstance(loaded, Tensor):
        loaded = {BARE: loaded}
    if not isinstance(loaded, dict) or not loaded:
        raise VectorFileError(f"{path} holds no dictionary of tensors, or an empty one. {_OWN_TENSOR}")
    for key, value in loaded.items():
        _check_entry(path, key, value, size)
    storages = {s.data_ptr(): s.nbytes() for s in (value.untyped_storage() for value in loaded.values())}
    if sorted(storages.values()) != record_sizes:
        raise VectorFileError(f"{path} is damaged: its tensors and its records differ in size.")
    return loaded


def _vector(path: str | Path, key: str | int, values: Tensor, site: str) -> SteeringVector:
    try:
        is_layer = isinstance(key, int) or _LAYER.fullmatch(key)
        point = HookPoint(int(key), site) if is_layer else HookPoint.parse(str(key))
    except HookPointError as error:
        raise VectorFileError(f"{path} has a key that is no hook point and no layer: {error} {_OWN_TENSOR}") from error
    if not values.is_floating_point():
        raise VectorFileError(f"{path} holds {values.dtype} at {key!r:.60}; vectors are floating-point tensors.")
    row = row_of(values, squeeze=True)
    if row is None:
        raise VectorFileError(f"{path} holds {list(values.shape)} at {key!r:.60}, which is no [d_model]. {_OWN_TENSOR}")
    card = VectorCard(extracted_at=point.name, notes="read from a .pt file")
    return usable_vector(path, row, point, card)


def _contents(path: str | Path) -> tuple[bytes, list[int]]:
    """The pickle inside the archive, and the sizes of the records that hold tensors, sorted; all checksums agree."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise VectorFileError(f"{path} is compressed, which torch.save never does; it is not read.")
            pickles = [member for member in members if member.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or len({member.filename for member in members}) < len(members):
                raise VectorFileError(f"{path} is not a file that torch.save wrote.")
            if sum(member.file_size for member in members) > Path(path).stat().st_size:
                raise VectorFileError(f"{path} is damaged: its members claim more bytes than it has.")
            if archive.testzip() is not None:
                raise VectorFileError(f"{path} is damaged: a checksum does not agree.")
            folder = pickles[0].filename.removesuffix("data.pkl") + "data/"
            return archive.read(pickles[0]), sorted(m.file_size for m in members if m.filename.startswith(folder))
    except (OSError, ValueError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, VectorFileError):
            raise
        raise VectorFileError(
            f"{path} is not a .pt file of PyTorch 1.6 or newer, or it is damaged; older ones are not read: load it "
            "where you trust it and save it again."
        ) from error


def _check_instructions(path: str | Path, pickled: bytes) -> None:
    """Looks through the pickle's instructions without running them."""
    try:
        for instruction, argument, _ in pickletools.genops(pickled):
            named = argument if instruction.name == "GLOBAL" else None
            if instruction.name in _CALLS or (named is not None and named not in _HARMLESS):
                raise VectorFileError(
                    f"{path} refers to {named or instruction.name!r}; a file of vectors refers to tensors and nothing "
                    f"else, so this one is not loaded. {_OWN_TENSOR}"
                )
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        if isinstance(error, VectorFileError):
            raise
        raise VectorFileError(f"{path} is damaged: its pickle cannot be read.") from error


def _check_entry(path: str | Path, key: Any, value: Any, size: int) -> None:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise VectorFileError(f"{path} has a key of type {type(key).__name__}; keys are hook points or layer numbers.")
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.dtype in (torch.int64, torch.int32)):
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        inside = f" Save what is under {key!r:.60} as a file of its own." if isinstance(value, dict) else ""
        raise VectorFileError(f"{path} holds {kind} at {key!r:.60}; vectors are floating-point tensors.{inside}")
    # A stride of 0 makes a tensor of any size out of one number.
    if value.numel() * value.element_size() > size:
        raise VectorFileError(
            f"{path} holds {list(value.shape)} at {key!r:.60}, more than the file's own {size:,} bytes."
        )
