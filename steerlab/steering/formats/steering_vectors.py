"""Imports and exports `SteeringVector` objects of the `steering-vectors` package.

Such an object has `layer_activations`, a dictionary from layer number to tensor `[d_model]`, and `layer_type`. The
package is not imported: anything with these two attributes is read.

Layer base: **layer N of type `decoder_block` is the output of block N counted from 0, `blocks.N.hook_resid_post`**;
`self_attn` and `mlp` are the outputs of those modules, `hook_attn_out` and `hook_mlp_out`. The outputs of the norms
(`input_layernorm`, `post_attention_layernorm`) are no part of the stream, and have no hook point here.

Source:
    steering-vectors 0.12.2, `steering_vector.py` and `record_activations.py`.
"""

from typing import Any, Final

from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import as_integer, shown
from steerlab.core.errors import VectorFileError
from steerlab.steering._row_values import row_of, shape_of
from steerlab.steering.files import as_vector_set, check_no_low_rank, usable_vector
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet

_SITES: Final = {"decoder_block": "resid_post", "self_attn": "attn_out", "mlp": "mlp_out"}
_SOURCE: Final = "The steering_vectors object"


def import_steering_vectors(steering_vector: Any) -> VectorSet:
    """The vectors of a `steering_vectors.SteeringVector`.

    Raises:
        VectorFileError: if it is no such object, its layer type has no hook point here, or a value is no row.
    """
    activations = getattr(steering_vector, "layer_activations", None)
    kind = getattr(steering_vector, "layer_type", None)
    if not isinstance(activations, dict) or not isinstance(kind, str):
        raise VectorFileError(
            f"A steering_vectors object has layer_activations and layer_type; got {type(steering_vector).__name__}."
        )
    if kind not in _SITES:
        raise VectorFileError(
            f"The layer type {kind!r:.60} has no hook point here; those that do: {', '.join(_SITES)}."
        )
    return as_vector_set(_SOURCE, [_vector(layer, value, _SITES[kind]) for layer, value in activations.items()])


def export_steering_vectors(vectors: VectorSet) -> dict[str, Any]:
    """What a `steering_vectors.SteeringVector` is made of: `SteeringVector(**export_steering_vectors(vectors))`.

    Returns:
        `layer_activations`, a dictionary from layer to float32 tensor [d_model], and `layer_type`.

    Raises:
        VectorFileError: if it is no vector set, such as a plan, or its site is no layer type there.

    Examples:
        >>> import torch
        >>> v = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
        >>> export_steering_vectors(VectorSet((v,)))
        {'layer_activations': {1: tensor([3., 4.])}, 'layer_type': 'decoder_block'}
    """
    held = list(getattr(vectors, "by_layer", ()))
    if not held:
        raise VectorFileError(
            f"steering_vectors holds vectors and no more; pass a vector set with at least one vector, not "
            f"{type(vectors).__name__}."
        )
    check_no_low_rank(held, "steering_vectors")
    kinds = [kind for kind, site in _SITES.items() if site == held[0].site]
    if not kinds:
        raise VectorFileError(f"steering_vectors has no layer type for {held[0].hook_point.name}.")
    return {"layer_activations": {v.layer: v.values.clone() for v in held}, "layer_type": kinds[0]}


def _vector(layer: Any, values: Any, site: str) -> SteeringVector:
    number, row = as_integer(layer), row_of(values, squeeze=True)
    if number is None or number < 0:
        raise VectorFileError(f"{_SOURCE} has the layer {shown(layer, 60)}; layers are numbers from 0.")
    if row is None or not row.is_floating_point():
        raise VectorFileError(
            f"{_SOURCE} holds no floating-point tensor [d_model] for layer {number}, but {shape_of(values)}."
        )
    point = HookPoint(number, site)
    card = VectorCard(extracted_at=point.name, notes="taken from a steering_vectors object")
    return usable_vector(_SOURCE, row, point, card)
