"""Vectors of attention heads: what a change of one head's output adds to the stream."""

from typing import Any

import torch

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint, resolve_layer
from steerlab.core._numbers import Integer, as_integer, shown
from steerlab.core.engine import HeadsEngine
from steerlab.core.errors import HookPointError, InputError, VectorShapeError, VectorValueError
from steerlab.steering._row_values import row_of, shape_of
from steerlab.steering.vectors import SteeringVector, VectorCard, model_entries


@explains_arguments
def head_vector(
    engine: HeadsEngine, layer: Integer, head: Integer, values: Any, *, name: str | None = None
) -> SteeringVector:
    """What adding values to one attention head's output adds to the stream: a vector at attn_out.

    A head's output z [d_head] goes through the head's rows of W_O and adds to attn_out. Adding the vector with coef 1
    at a token is therefore the same edit as adding the values to the head's z there, up to rounding. It is one of the
    stream, so it runs on every engine, inside vLLM too. Vectors of several heads of a layer add up with `+`.

    Args:
        engine: a `LensEngine` of the model, which has the weights.
        layer: layer index; negative ones count from the end.
        head: index of the query head, from 0.
        values: what is added to its z, shape [d_head], e.g. a difference of `engine.capture(…, site="z")`.
        name: what it is about; by default the head.

    Returns:
        The vector at `attn_out`; its card notes the head.

    Raises:
        HookPointError: for a layer or head that the model does not have, or a model in which attn_out is not the sum of
            its heads, as with a norm after attention (Gemma 2 and 3, OLMo 2).
        VectorShapeError: for values of another shape.
        InputError: for an engine without the weights.

    Examples:
        >>> engine = sl.load("smollm2-135m")  # doctest: +SKIP
        >>> z = engine.capture(prompts, layers=9, site="z", pool="mean")[9]  # doctest: +SKIP
        >>> v = head_vector(engine, layer=9, head=3, values=z[0, 3] - z[1, 3])  # doctest: +SKIP

    Source:
        Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, on heads as independent and additive; Li
        et al. 2023, Inference-Time Intervention (arXiv:2306.03341), equation 2, for steering by heads.
    """
    weights_at_hand(engine)
    layer = resolve_layer(layer, engine.info.n_layers)
    outputs = engine.head_outputs(layer)
    n_heads, d_head, _ = outputs.shape
    index = as_integer(head)
    if index is None or not 0 <= index < n_heads:
        raise HookPointError(f"Layer {layer} has {n_heads} heads, 0 to {n_heads - 1}; got head {shown(head)}.")
    row = row_of(values)
    if row is None or row.numel() != d_head:
        raise VectorShapeError(f"A head's values have shape ({d_head},), got {shape_of(values)}.")
    if not torch.isfinite(row).all():
        raise VectorValueError(f"The values for head {index} of layer {layer} hold NaN or infinities.")
    point = HookPoint(layer, "attn_out")
    card = VectorCard(
        name=name or f"head {layer}.{index}",
        method="head",
        extracted_at=point.name,
        notes=f"through W_O of head {index}",
        **model_entries(engine.info),
    )
    added = row.detach().to("cpu", torch.float64) @ outputs[index].double()
    return SteeringVector(added.float(), point, card)


def weights_at_hand(engine: object) -> None:
    """Checks that an engine reads heads apart and has their weights.

    Raises:
        InputError: otherwise.
    """
    if not isinstance(engine, HeadsEngine):
        raise InputError(
            f"Heads are read, and their vectors made, with sl.load(…) of the model, which has its weights at hand; got "
            f"{type(engine).__name__}. The vectors then run on every engine of the same model."
        )
