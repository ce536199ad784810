"""Low-rank interventions of the LoReFT family, read as directions and the values they are set to.

LoReFT replaces what the stream h holds in the subspace of R, whose rows are orthonormal:

    h ← h + Rᵀ(W h + b − R h)

Without W this sets the projection on row i of R to b_i, once per row: `sl.set(direction, value)`. With W the target
follows the stream, which no plan states; the file is still read, and says so.

Files are safetensors or `.pt` dictionaries with `R` `[r, d_model]`, `b` `[r]` and optionally `W` `[r, d_model]`, or
with pyreft's own names: `rotate_layer` `[d_model, r]` (Rᵀ), `bias` or `learned_source` `[r]`, `weight` `[r, d_model]`.

Source:
    Wu et al. 2024, ReFT: Representation Finetuning for Language Models (arXiv:2404.03592), equation 2.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from steerlab.core.errors import PlanError, VectorFileError
from steerlab.core.hook_points import HookPoint
from steerlab.steering.files import read_bytes, usable_vector
from steerlab.steering.formats.torch_files import load_tensors
from steerlab.steering.vectors import SteeringVector, VectorCard

# How far R Rᵀ may be from the identity: rows kept in bfloat16 are off by a few thousandths.
TOLERANCE: Final = 0.02
_NAMES: Final = {"R": "R", "rotate_layer": "Rᵀ", "b": "b", "bias": "b", "learned_source": "b", "W": "W", "weight": "W"}


@dataclass(frozen=True)
class LowRankIntervention:
    """A LoReFT-like intervention at one hook point.

    Attributes:
        directions: the r rows of R, unit vectors up to rounding.
        values: b, the projection on each direction that it is set to.
        weight: W, float32 [r, d_model], if the targets also follow the stream; else None.
    """

    directions: tuple[SteeringVector, ...]
    values: tuple[float, ...]
    weight: Tensor | None = None

    def settings(self) -> list[tuple[SteeringVector, float]]:
        """Each direction with its value; `sl.Plan(*(sl.set(v, value) for v, value in x.settings()))` is all it does.

        Raises:
            PlanError: if the targets follow the stream, which no `set` states.
        """
        if self.weight is not None:
            raise PlanError(
                "The targets of this intervention are W h + b and follow the stream; a plan sets projections to "
                "constants. Its directions and values are there for what you make of them."
            )
        return list(zip(self.directions, self.values, strict=True))


def import_loreft(
    path: str | Path, *, layer: int, site: str = "resid_post", model: str | None = None
) -> LowRankIntervention:
    """The intervention of a file, at a hook point that the file does not state.

    Args:
        path: safetensors, or a dictionary that `torch.save` wrote.
        layer: the layer it acts on, from 0.
        site: the site within the layer; LoReFT acts on layer outputs.
        model: name of the model it was trained on.

    Raises:
        VectorFileError: if the file is missing, damaged, lacks R or b, has other shapes, or its rows are not
            orthonormal.
    """
    point = HookPoint(layer, site)
    rotation, bias, weight = _parts(path, _tensors(path))
    error = _orthonormality_error(rotation)
    if not error <= TOLERANCE:
        raise VectorFileError(
            f"The rows of R in {path} are not orthonormal: R Rᵀ is up to {error:.3g} from the identity (allowed: "
            f"{TOLERANCE}), so the edit is no projection. Was another matrix saved, or R before its parametrisation?"
        )
    if not torch.isfinite(bias).all() or (weight is not None and not torch.isfinite(weight).all()):
        raise VectorFileError(f"{path} holds NaN or infinite values.")
    card = VectorCard(method="loreft", model=model, extracted_at=point.name, notes=f"rows of R in {Path(path).name}")
    directions = tuple(usable_vector(path, row, point, card) for row in rotation)
    return LowRankIntervention(directions, tuple(bias.tolist()), weight)


def _tensors(path: str | Path) -> dict[str, Tensor]:
    data = read_bytes(path)
    if data[:2] == b"PK":
        return {str(key): value for key, value in load_tensors(path).items()}
    try:
        return load_safetensors(data)
    except (SafetensorError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise VectorFileError(f"{path} is neither safetensors nor a .pt file, or it is damaged: {error}.") from error


def _parts(path: str | Path, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """R [r, d_model], b [r] and W [r, d_model] or None, float32."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = _NAMES.get(name)
        if part is None or part.removesuffix("ᵀ") in found:
            raise VectorFileError(f"{path} holds {name!r:.60}; an intervention has one each of R, b and perhaps W.")
        if not tensor.is_floating_point():
            raise VectorFileError(f"{path} holds {name} as {tensor.dtype}; an intervention is floating-point.")
        found[part.removesuffix("ᵀ")] = (tensor.T if part == "Rᵀ" else tensor).float().clone()
    rotation, bias, weight = found.get("R"), found.get("b"), found.get("W")
    if rotation is None or bias is None:
        raise VectorFileError(f"{path} lacks R or b; it holds {', '.join(tensors) or 'nothing'}.")
    if rotation.ndim != 2 or not 1 <= rotation.shape[0] <= rotation.shape[1] or bias.shape != rotation.shape[:1]:
        raise VectorFileError(
            f"{path} holds R {list(rotation.shape)} and b {list(bias.shape)}; due are [r, d] and [r]."
        )
    if weight is not None and weight.shape != rotation.shape:
        raise VectorFileError(f"{path} holds W {list(weight.shape)}; due is {list(rotation.shape)}, as R.")
    return rotation, bias, weight


def _orthonormality_error(rotation: Float[Tensor, "r d_model"]) -> float:
    """Largest entry of |R Rᵀ − I|."""
    gram = rotation.double() @ rotation.double().T
    return float((gram - torch.eye(len(rotation), dtype=torch.float64)).abs().max())
