"""Low-rank interventions of the LoReFT family, read as directions and the values they are set to.

LoReFT replaces what the stream h holds in the subspace of R, whose rows are orthonormal:

    h ← h + Rᵀ(W h + b − R h)

Without W this sets the projection on row i of R to b_i, once per row: `sl.set(direction, value)`. With W the target
follows the stream: `sl.loreft(intervention.vector())` applies it.

Files are safetensors or `.pt` dictionaries with `R` `[r, d_model]`, `b` `[r]` and optionally `W` `[r, d_model]`, or
with pyreft's own names: `rotate_layer` `[d_model, r]` (Rᵀ), `bias` or `learned_source` `[r]`, `weight` `[r, d_model]`.

Other interventions of pyreft keep Rᵀ as torch's orthogonal parametrisation does, and some of them share their names:

| kind | formula | names beside `rotate_layer.parametrizations.weight.*` |
| --- | --- | --- |
| `consreft` (constant LoReFT) | h + Rᵀ(b − R h) | `learned_source` |
| `lobireft` | h + Rᵀ b | `learned_source` |
| `loreft`, by torch's own `state_dict` | h + Rᵀ(W h + b − R h) | `learned_source.weight`, `learned_source.bias` |
| `direft` | h + Rᵀ(W h + b) | `learned_source.weight`, `learned_source.bias` |

What the names leave open, `kind` says, or the `config.json` that pyreft writes beside its files. `direft` and the kinds
without orthonormal rows (NoReFT, NodiReFT) are neither directions that are set nor a vector that is added: not read.

Source:
    Wu et al. 2024, ReFT: Representation Finetuning for Language Models (arXiv:2404.03592), equation 2; pyreft,
    `pyreft/interventions.py`, for the other kinds and the names.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Integer, plain
from steerlab.core.errors import PlanError, VectorFileError
from steerlab.steering.files import read_bytes, usable_vector
from steerlab.steering.formats.torch_files import load_tensors
from steerlab.steering.low_rank import TOLERANCE, LowRank, orthonormality_error
from steerlab.steering.vectors import SteeringVector, VectorCard

_MAX_CONFIG: Final = 1 << 20
KINDS: Final = ("loreft", "consreft", "lobireft")
"""Kinds that are read."""
_ROTATION: Final = "rotate_layer.parametrizations.weight.original"
_BASE: Final = "rotate_layer.parametrizations.weight.0.base"
# Sizes that every intervention of pyvene keeps beside its weights.
_SIZES: Final = ("embed_dim", "interchange_dim")
_NAMES: Final = {"R": "R", "rotate_layer": "Rᵀ", "b": "b", "bias": "b", "learned_source": "b", "W": "W", "weight": "W"}
_OPEN: Final = {"b": ("consreft", "lobireft"), "W": ("loreft", "direft")}  # what the shared names may be


@dataclass(frozen=True)
class LowRankIntervention:
    """A LoReFT-like intervention at one hook point.

    Attributes:
        directions: the r rows of R, unit vectors up to rounding.
        values: b, the projection on each direction that it is set to.
        weight: W, float32 [r, d_model], if the targets also follow the stream; else None.
        kind: `loreft`, `consreft` or `lobireft`; the last adds Rᵀ b and sets nothing.
    """

    directions: tuple[SteeringVector, ...]
    values: tuple[float, ...]
    weight: Tensor | None = None
    kind: str = "loreft"

    def vector(self) -> SteeringVector:
        """A vector with the whole intervention beside it, for `sl.loreft` and for `save`.

        Its values are Rᵀ b, what a stream of zeros would get; the first row of R where b is zero.

        Raises:
            PlanError: for a `lobireft`, which sets nothing; take addition().
        """
        if self.kind == "lobireft":
            raise PlanError("A lobireft intervention adds Rᵀ b whatever the stream holds; take addition().")
        rotation = torch.stack([direction.values for direction in self.directions])
        bias = torch.tensor(self.values)
        weight = torch.zeros_like(rotation) if self.weight is None else self.weight
        first = self.directions[0]
        values = bias @ rotation if bool(bias.any()) else rotation[0]
        return SteeringVector(values, first.hook_point, first.card, LowRank(rotation, weight, bias))

    def addition(self) -> SteeringVector:
        """Rᵀ b, which a `lobireft` adds: `sl.Plan(sl.add(x.addition(), coef=1.0))` is equivalent.

        Raises:
            PlanError: for another kind, which sets projections.
        """
        if self.kind != "lobireft":
            raise PlanError(f"A {self.kind} intervention sets projections; take settings().")
        rows = torch.stack([direction.values for direction in self.directions])
        return self.directions[0].with_values(torch.tensor(self.values) @ rows, method=self.kind)

    def settings(self) -> list[tuple[SteeringVector, float]]:
        """Each direction with its value; `sl.Plan(*(sl.set(v, value) for v, value in x.settings()))` is equivalent.

        Raises:
            PlanError: if the targets follow the stream, which no `set` states, or the vector is added.
        """
        if self.kind == "lobireft":
            raise PlanError("A lobireft intervention adds Rᵀ b whatever the stream holds; take addition().")
        if self.weight is not None:
            raise PlanError(
                "The targets of this intervention are W h + b and follow the stream, while set takes constants; "
                "sl.loreft(intervention.vector()) applies it."
            )
        return list(zip(self.directions, self.values, strict=True))


def import_loreft(
    path: str | Path,
    *,
    layer: Integer,
    site: str = "resid_post",
    model: str | None = None,
    kind: Literal["loreft", "consreft", "lobireft"] | None = None,
) -> LowRankIntervention:
    """The intervention of a file, at a hook point that the file does not state.

    Args:
        path: safetensors, or a dictionary that `torch.save` wrote.
        layer: the layer it acts on, from 0.
        site: the site within the layer; LoReFT acts on layer outputs.
        model: name of the model it was trained on.
        kind: which intervention it is, where its names are shared by several; by default as the `config.json` beside
            the file says.

    Raises:
        VectorFileError: if the file is missing, damaged, lacks R or b, has other shapes, its rows are not orthonormal,
            or it may be of several kinds and nothing says which.
    """
    point = HookPoint(plain(layer), site)
    if kind is not None and kind not in KINDS:
        raise VectorFileError(f"kind is one of {', '.join(KINDS)}, got {kind!r:.60}.")
    tensors, found = _told_apart(path, _tensors(path), kind)
    rotation, bias, weight = _parts(path, tensors)
    error = orthonormality_error(rotation)
    if not error <= TOLERANCE:
        raise VectorFileError(
            f"The rows of R in {path} are not orthonormal: R Rᵀ is up to {error:.3g} from the identity (allowed: "
            f"{TOLERANCE}), so the edit is no projection. Was another matrix saved, or R before its parametrisation?"
        )
    if not torch.isfinite(bias).all() or (weight is not None and not torch.isfinite(weight).all()):
        raise VectorFileError(f"{path} holds NaN or infinite values.")
    card = VectorCard(method=found, model=model, extracted_at=point.name, notes=f"rows of R in {Path(path).name}")
    directions = tuple(usable_vector(path, row, point, card) for row in rotation)
    return LowRankIntervention(directions, tuple(bias.tolist()), weight, found)


def _told_apart(path: str | Path, tensors: dict[str, Tensor], kind: str | None) -> tuple[dict[str, Tensor], str]:
    """The tensors with Rᵀ computed from its parametrisation, and which intervention they are."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in _SIZES}
    if any(name.startswith("proj_layer.") for name in kept):
        raise VectorFileError(f"{path} holds a NoReFT or NodiReFT intervention, whose rows are not orthonormal.")
    if _ROTATION not in kept:
        if kind not in (None, "loreft", "consreft"):
            raise VectorFileError(f"{path} holds a loreft intervention, not {kind}: its names say so.")
        return kept, kind or "loreft"
    follows = "learned_source.weight" in kept
    possible = _OPEN["W" if follows else "b"]
    found = kind or _stated_kind(path)
    if found is None or found == "direft":
        raise VectorFileError(
            f"{path} holds a {' or a '.join(possible) if found is None else found} intervention"
            + (f"; the names of its tensors do not tell. Pass kind={possible[0]!r}" if found is None else "")
            + (f" or kind={possible[1]!r}." if found is None and not follows else ".")
            + (" A direft adds Rᵀ(W h + b), which no plan states, and is not read." if follows else "")
        )
    if found not in possible:
        raise VectorFileError(f"{path} holds a {' or a '.join(possible)} intervention, by its names; not a {found}.")
    rotation = _orthogonal(path, kept.pop(_ROTATION), kept.pop(_BASE, None))
    renamed = {name.replace("learned_source.", ""): tensor for name, tensor in kept.items()}
    return renamed | {"rotate_layer": rotation}, found


def _stated_kind(path: str | Path) -> str | None:
    """The intervention that pyreft's configuration beside the file names, if it names one for all files."""
    config = Path(path).parent / "config.json"
    try:
        if config.stat().st_size > _MAX_CONFIG:
            return None
        stated = json.loads(config.read_bytes())["intervention_types"]
        named = {re.sub(r".*\.|Intervention.*", "", str(entry)).lower() for entry in stated}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    (only,) = named if len(named) == 1 else (None,)
    return only if only in (*KINDS, "direft") else None


def _orthogonal(path: str | Path, original: Tensor, base: Tensor | None) -> Float[Tensor, "d_model r"]:
    """Rᵀ from the stored tensors, as `torch.nn.utils.parametrizations.orthogonal` does: reflections of a base."""
    width, rank = original.shape if original.ndim == 2 else (0, 0)
    if not 1 <= rank < width or base is None or base.shape != (width, width):
        shapes = [list(original.shape), None if base is None else list(base.shape)]
        raise VectorFileError(f"{path} keeps R as {shapes[0]} and its base as {shapes[1]}; due are [d, r] and [d, d].")
    wide = original.double()
    below = wide.tril(-1)
    reflected = torch.linalg.householder_product(below, 2 / (1 + below.square().sum(dim=0)))
    return (base.double() @ (reflected * wide.diagonal().int())).float()


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
