"""Which tensors hold the residual stream of this model family? Found out by one forward pass, at load.

The stream after the last layer, normed, must be the model's output; each layer must hand its stream on to the next
unchanged; and tensor-parallel ranks must hold the same stream. A family that fails is refused by name: steering a
wrong tensor would go unnoticed.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import HookPointError
from steerlab.engines.vllm._worker.layers import INSTEAD, StreamRule, stream_parts
from steerlab.engines.vllm._worker.sublayers import (
    PartsSeen,
    Place,
    Places,
    adds_up,
    find_places,
    hook,
    is_stream,
    output_of,
    refused,
)

N_TOKENS = 8
_STEP = 0.75
"""What is added to find out whether a place belongs to the stream."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Probed:
    """What the probe found.

    Attributes:
        rule: how a layer's output holds the stream.
        digest: mean absolute value of the stream after each layer of this rank; equal on tensor-parallel ranks.
        inside: by layer, where the sites inside it are.
    """

    rule: StreamRule
    digest: tuple[float, ...]
    inside: Mapping[int, Places] = field(default_factory=dict)


@dataclass
class _Seen:
    """What one forward pass showed."""

    outputs: dict[int, Any] = field(default_factory=dict)
    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    tails: list[tuple[nn.Module, Any]] = field(default_factory=list)
    result: Any = None
    parts: dict[int, PartsSeen] = field(default_factory=dict)


def probe(worker: Any, layers: Sequence[nn.Module | None], wanted: Sequence[HookPoint] = ()) -> Probed:
    """The stream rule of a model that has just been loaded, checked on the way.

    Args:
        worker: whose model it is.
        layers: its decoder layers.
        wanted: hook points that will be wired; those inside layers are looked for.

    Raises:
        HookPointError: if the stream, or a hook point that is wanted, cannot be identified.
    """
    model = worker.model_runner.get_model()
    inner = [p for p in wanted if p.site != "resid_post" and layers[p.layer] is not None]
    seen = _forward(worker, model, layers, {point.layer: {} for point in inner})
    family = type(model).__name__
    here = [index for index, layer in enumerate(layers) if layer is not None]
    rule = _rule_of(seen, here[-1], family)
    _check_handed_on(seen, here, rule, family)
    digest = tuple(float(_stream(seen.outputs[i], rule).float().abs().mean()) for i in here)
    return Probed(rule, digest, _find_inside(worker, layers, seen, rule, inner) if inner else {})


def _find_inside(
    worker: Any, layers: Sequence[nn.Module | None], seen: _Seen, rule: StreamRule, wanted: Sequence[HookPoint]
) -> dict[int, Places]:
    """Where hook points inside layers are, checked by a second pass in which each of them is changed."""
    model = worker.model_runner.get_model()
    family = type(model).__name__
    found = {
        layer: find_places(seen.parts[layer], _before(seen, layer, rule), _after(seen, layer, rule))
        for layer in dict.fromkeys(point.layer for point in wanted)
    }
    places: dict[int, dict[str, Place]] = {layer: {} for layer in found}
    for point in wanted:
        if point.site not in found[point.layer]:
            raise refused(family, point.layer, point.site)
        places[point.layer][point.site] = found[point.layer][point.site]
    moved = _forward(worker, model, layers, places)
    for layer, chosen in places.items():
        summands = [output_of(moved.parts[layer], found[layer][site]) for site in ("attn_out", "mlp_out")]
        before, after = _before(moved, layer, rule), _after(moved, layer, rule)
        added = torch.full_like(before, len(chosen) * _STEP)
        if not adds_up([before, *summands, added], after):
            raise refused(family, layer, " or ".join(chosen))
    return dict(places)


def _before(seen: _Seen, layer: int, rule: StreamRule) -> Tensor:
    if layer - 1 in seen.outputs:
        return _stream(seen.outputs[layer - 1], rule)
    after = _after(seen, layer, rule)
    given = [x for x in seen.inputs[layer] if is_stream(x) and x.numel() == after.numel()]
    return sum(given[1:], given[0]).reshape(after.shape)


def _after(seen: _Seen, layer: int, rule: StreamRule) -> Tensor:
    return _stream(seen.outputs[layer], rule)


def _rule_of(seen: _Seen, last: int, family: str) -> StreamRule:
    """The rule under which the last layer's stream, normed, is the model's output."""
    output = seen.outputs[last]
    if isinstance(output, Tensor):
        candidates: list[StreamRule] = ["single"]
    elif isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        paired = len(output) > 1 and isinstance(output[1], Tensor) and output[1].shape == output[0].shape
        candidates = ["sum", "first"] if paired else ["first"]
    else:
        raise HookPointError(
            f"A layer of {family} puts out {type(output).__name__}; its stream cannot be identified. {INSTEAD}"
        )
    if not isinstance(seen.result, Tensor):  # not the last pipeline rank: there is no norm to compare with
        return candidates[0]
    for rule in candidates:
        if any(_same(_call(norm, _stream(output, rule)), seen.result) for norm, _ in seen.tails):
            return rule
    raise HookPointError(
        f"In {family} the stream after the last layer, normed, is not the model's output under any rule known here "
        f"({', '.join(candidates)}); this family cannot be steered inside vLLM. {INSTEAD}"
    )


def _check_handed_on(seen: _Seen, here: Sequence[int], rule: StreamRule, family: str) -> None:
    """Every layer must get the stream that the one before put out."""
    for before, after in itertools.pairwise(here):
        parts = [part for part in stream_parts(seen.outputs[before], rule) if part is not None]
        if not all(any(_same(part, given) for given in seen.inputs[after]) for part in parts):
            raise HookPointError(
                f"In {family}, layer {after} does not get what layer {before} puts out; this family cannot be steered "
                f"inside vLLM. {INSTEAD}"
            )


def _forward(worker: Any, model: nn.Module, layers: Sequence[nn.Module | None], inside: Mapping[int, Places]) -> _Seen:
    """One pass; parts of the layers in `inside` are watched, and something is added at the places named there."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    seen = _Seen()
    inputs = _inputs(worker, model)
    with (
        torch.inference_mode(),
        _watched(model, layers, seen),
        _moved(layers, inside, seen),
        _made_up_attention(worker, model),
        set_current_vllm_config(worker.vllm_config),
        set_forward_context(None, worker.vllm_config, num_tokens=N_TOKENS, skip_compiled=True),
    ):
        seen.result = model(**inputs)
    return seen


def _inputs(worker: Any, model: Any) -> dict[str, Any]:
    from vllm.distributed.parallel_state import get_pp_group

    device, config = worker.device, worker.vllm_config.model_config
    first = get_pp_group().is_first_rank
    ids = torch.arange(N_TOKENS, device=device) % config.get_vocab_size()
    middle = None
    if not first:
        middle = model.make_empty_intermediate_tensors(batch_size=N_TOKENS, dtype=config.dtype, device=device)
        generator = torch.Generator(device="cpu").manual_seed(0)
        for tensor in middle.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    return {
        "input_ids": ids if first else None,
        "positions": torch.arange(N_TOKENS, device=device),
        "intermediate_tensors": middle,
        "inputs_embeds": None,
    }


@contextmanager
def _watched(model: nn.Module, layers: Sequence[nn.Module | None], seen: _Seen) -> Iterator[None]:
    """Records what goes in and out of the layers, and which modules run after the last one."""
    handles = []
    last = max(index for index, layer in enumerate(layers) if layer is not None)
    try:
        for index, layer in enumerate(layers):
            if layer is not None:
                handles.append(layer.register_forward_pre_hook(_input_recorder(seen, index), with_kwargs=True))
                handles.append(layer.register_forward_hook(_output_recorder(seen, index)))
        inside = {id(part) for layer in layers if layer is not None for part in layer.modules()}
        for module in model.modules():
            if id(module) not in inside and not list(module.children()):
                handles.append(module.register_forward_hook(_tail_recorder(seen, last)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _moved(layers: Sequence[nn.Module | None], inside: Mapping[int, Places], seen: _Seen) -> Iterator[None]:
    """Records what the parts of layers do, before something is added to it at some places."""
    handles = []
    try:
        for index, places in inside.items():
            layer = layers[index]
            assert layer is not None
            seen.parts[index] = PartsSeen()
            handles += seen.parts[index].recorders(layer)
            handles += [hook(layer, place, _step) for place in places.values()]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _step(_: nn.Module, changed: Tensor, beside: Tensor | None) -> None:
    changed.add_(_STEP)


@contextmanager
def _made_up_attention(worker: Any, model: nn.Module) -> Iterator[None]:
    """Without a cache, attention leaves its output as the memory was; it gets values that are the same every time.

    vLLM's Transformers backend keeps its attention layers beside the model's modules and calls their `forward`, past
    any hook.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    known = worker.vllm_config.compilation_config.static_forward_context.values()
    layers: dict[int, Any] = {id(m): m for m in (*model.modules(), *known) if isinstance(m, AttentionLayerBase)}
    usual = {key: vars(layer).get("forward") for key, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.forward = functools.partial(_made_up, layer.forward)
        yield
    finally:
        for key, layer in layers.items():
            vars(layer).pop("forward", None)
            if usual[key] is not None:
                layer.forward = usual[key]


def _made_up(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    if not isinstance(output, Tensor):
        return output
    ramp = torch.arange(output.numel(), device=output.device, dtype=torch.float32).cos()
    return ramp.view(output.shape).to(output.dtype)


def _input_recorder(seen: _Seen, index: int) -> Any:
    """Before the layer runs: its own fused norms may write into its inputs."""

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        seen.inputs[index] = [value.clone() for value in given if isinstance(value, Tensor)]

    return record


def _output_recorder(seen: _Seen, index: int) -> Any:
    def record(_: nn.Module, __: Any, output: Any) -> None:
        seen.outputs[index] = _copied(output)

    return record


def _tail_recorder(seen: _Seen, last: int) -> Any:
    def record(module: nn.Module, _: Any, output: Any) -> None:
        if last in seen.outputs:
            seen.tails.append((module, output))

    return record


def _copied(output: Any) -> Any:
    """Fused norms write into their inputs, so what a layer put out is kept apart."""
    if isinstance(output, Tensor):
        return output.clone()
    if isinstance(output, tuple | list):
        return tuple(_copied(part) for part in output)
    return output


def _stream(output: Any, rule: StreamRule) -> Tensor:
    hidden, residual = stream_parts(output, rule)
    return hidden if residual is None else hidden + residual


def _call(norm: nn.Module, stream: Tensor) -> Any:
    result = norm(stream.clone())
    return result[0] if isinstance(result, tuple) else result


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.numel() != other.numel():
        return False
    bound = _TOLERANCE.get(other.dtype, 1e-4)
    return torch.allclose(one.reshape(other.shape).float(), other.float(), rtol=bound, atol=bound)
