"""How attention heads write into the stream: W_O of a layer, cut up by head.

A head's z, the mean of its values under its attention, goes through its rows of W_O, and attn_out is the sum over heads
plus a bias. Adding v to a head's z at a token therefore adds v·W_O[head] to attn_out there, whatever the token: the
bias stays, and grouped-query attention changes nothing, since z is per query head. A norm after attention (Gemma 2 and
3, OLMo 2) ends this: what a change of z does there depends on the token. Rather than know the families, a probe adds
something to every head and compares.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steerlab._runtime.model_state import remembered
from steerlab._runtime.modules import unwrapped
from steerlab.core._hook_points import HeadPoint, HookPoint
from steerlab.core.errors import HookPointError
from steerlab.engines.lens._backends import embedding_device, exact_backend
from steerlab.engines.lens._hooking import find_hook_point, hook_points

_PROBE_TOKENS = 8


@torch.no_grad()
def head_outputs(bridge: Any, layer: int) -> Float[Tensor, "n_heads d_head d_model"]:
    """W_O of a layer by head, float32 on the CPU; the layer is checked once.

    Raises:
        HookPointError: if there are no such weights, or attn_out is not the sum that they say.
    """
    weight = _weight(bridge, layer)
    n_heads = remembered(bridge, f"heads of layer {layer}", lambda: _checked_heads(bridge, layer, weight))
    return weight.unflatten(0, (n_heads, -1))


def _weight(bridge: Any, layer: int) -> Float[Tensor, "z d_model"]:
    from transformers.pytorch_utils import Conv1D

    find_hook_point(bridge, HeadPoint(layer).name)
    module = unwrapped(bridge.blocks[layer].attn.o)
    if not isinstance(module, nn.Linear | Conv1D) or type(module) not in (nn.Linear, Conv1D):
        raise HookPointError(
            f"W_O of layer {layer} of {_family(bridge)} is in a {type(module).__name__}, no plain Linear layer: merge "
            "adapters, or load the model without quantisation."
        )
    weight = module.weight.to("cpu", torch.float32)
    return weight.T if isinstance(module, nn.Linear) else weight


def _checked_heads(bridge: Any, layer: int, weight: Float[Tensor, "z d_model"]) -> int:
    """How many heads a layer has; checks that what is added to z comes out of attention through W_O."""
    out = HookPoint(layer, "attn_out")
    after = hook_points(bridge)[out.name].name if out.name in hook_points(bridge) else ""
    if after != f"blocks.{layer}.attn.hook_out":
        raise HookPointError(
            f"In {_family(bridge)}, attn_out of layer {layer} comes after a norm, so that what a head adds to the "
            "stream depends on the token: no vector at attn_out states it. Read heads with capture(site='z'); steer "
            "the stream itself, at resid_post say."
        )
    (z, plain), (_, added) = (_attention(bridge, layer, change) for change in (None, weight))
    error = (added - plain - _probe(z, weight) @ weight).abs().max() / (added - plain).abs().max()
    if not error <= (1e-3 if _embedding(bridge).dtype in (torch.float32, torch.float64) else 0.1):
        raise HookPointError(
            f"In {_family(bridge)}, attn_out of layer {layer} is not the sum of its heads through W_O: a change of them"
            f" is off by {float(error):.2g} of its size. No vector at attn_out states what a head adds."
        )
    return z.shape[-2]


def _attention(bridge: Any, layer: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The heads' z and attn_out of a few tokens, float32 on the CPU; with W_O, after the probe was added to z."""
    seen: dict[str, Tensor] = {}

    def heads(value: Tensor, hook: Any = None) -> Tensor | None:
        seen["z"] = value.to("cpu", torch.float32)
        if weight is None:
            return None
        return value + _probe(seen["z"], weight).to(value).view_as(value[:1, :1])

    def output(value: Tensor, hook: Any = None) -> None:
        seen["out"] = value.to("cpu", torch.float32)

    hooks = [(HeadPoint(layer).name, heads), (HookPoint(layer, "attn_out").name, output)]
    backend = exact_backend(bridge, hooks)
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=embedding_device(backend.model))[None]
    with backend.attached(hooks):
        backend.model(input_ids=ids % len(_embedding(bridge)), use_cache=False)
    return seen["z"], seen["out"]


def _probe(z: Float[Tensor, "1 pos n_heads d_head"], weight: Float[Tensor, "z d_model"]) -> Float[Tensor, " z"]:
    """Something to add to all heads at once, four times as large as what they hold, so that rounding is small to it."""
    direction = torch.randn(len(weight), generator=torch.Generator().manual_seed(0))
    return 4 * direction * z.square().mean().sqrt().clamp_min(1e-3)


def _embedding(bridge: Any) -> Tensor:
    """The embedding matrix, [d_vocab, d_model]."""
    return bridge.original_model.get_input_embeddings().weight


def _family(bridge: Any) -> str:
    return type(bridge.original_model).__name__
