"""Control vectors in GGUF, as llama.cpp applies them and repeng writes them.

A file has `general.architecture = "controlvector"`, `controlvector.model_hint` (the model's architecture, e.g.
`llama`), `controlvector.layer_count` (the number of tensors) and float32 tensors `direction.N` of shape [d_model].

Layer base: **`direction.N` is added to the output of layer N counted from 0, so it is `blocks.N.hook_resid_post`.**
llama.cpp stores it N − 1 rows into a buffer whose first row belongs to layer 1, adds layer N's row at the end of that
layer's graph, and never has one for layer 0, which the format therefore cannot steer. repeng adds `directions[N]` to
the output of the same layer. The vector is added as it is, at every position; the format states no strength and no
positions.

Sources:
    llama.cpp: `common/common.cpp` (control vector utils) and `src/llama-adapter.cpp`; repeng 0.4.0: `control.py` and
    `extract.py`. llama.cpp's own generator `cvector-generator` names what it **read** after layer N `direction.{N+1}`:
    such a file is applied one layer later than it was read, and we read it as it is applied.
"""

import re
import tempfile
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steerlab.core._files import write_atomic
from steerlab.core._hook_points import HookPoint
from steerlab.core._warning import warn
from steerlab.core.errors import VectorFileError
from steerlab.steering.files import as_vector_set, read_bytes, usable_vector
from steerlab.steering.formats._gguf_bytes import GgufTensor, parse_gguf
from steerlab.steering.formats._plan_vectors import added_vectors
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet

_ARCHITECTURE = "controlvector"
_NAME = re.compile(r"direction\.(0|[1-9]\d{0,5})", re.ASCII)


def import_gguf(path: str | Path) -> VectorSet:
    """The vectors of a control-vector file, at `resid_post` of the layers that it names.

    Args:
        path: written by repeng, llama.cpp's tools or `export_gguf`. `direction.0`, which repeng can write and llama.cpp
            refuses, is the output of layer 0.

    Warns:
        UserWarning: for a file of such tensors that does not call itself a control vector.

    Raises:
        VectorFileError: if the file is missing, damaged, no control vector, or holds anything but float32 rows.
    """
    data = read_bytes(path)
    metadata, tensors = parse_gguf(data, path)
    architecture = metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        if not tensors or not all(_NAME.fullmatch(tensor.name) for tensor in tensors):
            raise VectorFileError(
                f"{path} is a GGUF file of architecture {architecture!r:.60}, not of {_ARCHITECTURE!r}, and "
                "holds other tensors than 'direction.N': no control vector."
            )
        stated = "no architecture" if architecture is None else f"the architecture {architecture!r:.60}"
        warn(
            f"{path} states {stated} where a control vector states {_ARCHITECTURE!r}; its tensors are named as one's, "
            "so it is read as one."
        )
    hint = metadata.get("controlvector.model_hint")
    notes = f"read from a GGUF control vector, model_hint {hint!r:.60}"
    return as_vector_set(path, [_vector(path, data, tensor, notes) for tensor in tensors])


def export_gguf(path: str | Path, vectors: VectorSet | SteeringVector | Plan, *, model_hint: str) -> Path:
    """Writes vectors, or a plan that only adds vectors everywhere, as a control-vector file.

    Args:
        path: the file to write, atomically.
        vectors: vectors at `resid_post` of layers from 1, written as they are; or a plan, whose additions are
            written with their strengths, several at one layer summed.
        model_hint: the model's architecture as llama.cpp names it, e.g. `llama`.

    Raises:
        VectorFileError: for what the format cannot state: another site, layer 0, vectors of two widths, an edit that is
            not a plain `add` at `where.all()`, a dose that is not resolved.

    Examples:
        >>> v = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     import_gguf(export_gguf(f"{folder}/v.gguf", v, model_hint="llama"))[1].norm
        5.0
    """
    if not isinstance(model_hint, str) or not model_hint:
        raise VectorFileError(f"model_hint names the model's architecture, e.g. 'llama'; got {model_hint!r:.60}.")
    values = added_vectors(vectors)
    for point in values:
        _check_expressible(point)
    if len({row.numel() for row in values.values()}) > 1:
        raise VectorFileError("A control-vector file is for one model, so its vectors have one width.")
    rows = {point.layer: row for point, row in sorted(values.items())}
    return write_atomic(path, _gguf_bytes(rows, model_hint))


def _vector(path: str | Path, data: bytes, tensor: GgufTensor, notes: str) -> SteeringVector:
    match = _NAME.fullmatch(tensor.name)
    if match is None:
        raise VectorFileError(f"{path} holds the tensor {tensor.name!r:.60}; control vectors hold 'direction.N' only.")
    if tensor.kind != "F32" or not tensor.shape or prod(tensor.shape[1:]) != 1:
        raise VectorFileError(
            f"{path} holds {tensor.name} as {tensor.kind} {list(tensor.shape)}; control vectors are float32 [d_model]."
        )
    values = np.frombuffer(data, dtype="<f4", count=tensor.shape[0], offset=tensor.start)
    point = HookPoint(int(match.group(1)), "resid_post")
    return usable_vector(path, torch.from_numpy(values.copy()), point, VectorCard(extracted_at=point.name, notes=notes))


def _check_expressible(point: HookPoint) -> None:
    if point.site != "resid_post":
        raise VectorFileError(
            f"A GGUF control vector acts on the output of a layer (resid_post); it cannot state {point.name}."
        )
    if point.layer == 0:
        raise VectorFileError(f"A GGUF control vector begins at layer 1; it cannot state {point.name}.")


def _gguf_bytes(rows: dict[int, Tensor], model_hint: str) -> bytes:
    from gguf import GGUFWriter  # its import takes a while

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vectors.gguf"
        writer = GGUFWriter(file, _ARCHITECTURE)
        writer.add_string(f"{_ARCHITECTURE}.model_hint", model_hint)
        writer.add_uint32(f"{_ARCHITECTURE}.layer_count", len(rows))
        for layer, row in rows.items():
            writer.add_tensor(f"direction.{layer}", row.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file.read_bytes()
