"""The two ways through a bridged model: with every hook point, or fast.

*bridge* runs the model as TransformerLens wrapped it. *fast* runs its unhooked model, the plain Hugging Face modules,
where the residual stream and the two sublayers' outputs can still be hooked. Hooks have one form on both,
`fn(value, hook=point)`: `point.name` is the hook point's canonical name, and a returned tensor replaces the value.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steerlab._runtime.backend import Backend
from steerlab._runtime.device_transfer import memoised_transfers
from steerlab._runtime.evaluation import evaluating
from steerlab._runtime.hooks import (
    HookPair,
    alone,
    install_input_hook,
    install_output_hook,
    require_fired,
    same_shape_hook,
)
from steerlab._runtime.model_state import forget, remembered
from steerlab._runtime.modules import modules_in
from steerlab._runtime.self_comparison import found_out, ordinary_tokens, rounding_of, undisturbed
from steerlab.core._hook_points import SITES
from steerlab.core._warning import warn
from steerlab.core.errors import HookPointError, InputError
from steerlab.engines.lens._fast_comparison import N_TOKENS, first_difference
from steerlab.engines.lens._hooking import attached, find_hook_point, hook_points
from steerlab.engines.lens._unhooked_model import UnhookedModel

DIFFERS = "A short comparison on this model found that the fast engine differs from the bridge in"
ENGINE_NAMES = ("auto", "bridge", "fast", "graph", "compiled")


class BridgeBackend(Backend):
    """The model as TransformerLens wrapped it."""

    name = "bridge"

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        self.model = bridge.original_model

    @contextmanager
    def attached(self, hooks: Sequence[HookPair]) -> Iterator[None]:
        """See `Backend.attached`."""
        checked = [(name, same_shape_hook(function)) for name, function in hooks]
        # users' own hooks may keep what they see, to train on it: no inference tensors here
        with alone(self.model), evaluating(self.model), torch.inference_mode(False), torch.no_grad():
            with memoised_transfers(self.model, list(self.bridge.blocks)), attached(self.bridge, checked):
                yield


@dataclass(frozen=True)
class PlainPoint:
    """What a hook on the unhooked model sees of its hook point."""

    name: str


class FastBackend(Backend):
    """The bridge's unhooked model, for hooks on the residual stream and on sublayer outputs.

    Args:
        bridge: the TransformerBridge.
        attention: the attention kernel: `sdpa`, or `eager` for numbers equal to the bridge's; see `attention_kernel`.
    """

    name = "fast"

    def __init__(self, bridge: Any, attention: str = "sdpa") -> None:
        self.bridge = bridge
        self.unhooked = unhooked_model_of(bridge)
        self.attention = attention_kernel(bridge, attention)
        self.model = self.unhooked.model

    @contextmanager
    def attached(self, hooks: Sequence[HookPair]) -> Iterator[None]:
        """See `Backend.attached`."""
        blocks = [self.unhooked.of(block) for block in self.bridge.blocks]
        checked = [(name, same_shape_hook(function)) for name, function in hooks]
        with alone(self.model), require_fired(checked) as listening, ExitStack() as stack:
            self.unhooked.set_attention(self.attention)
            for name, function in listening:
                stack.callback(self._install(name, function).remove)
            stack.enter_context(memoised_transfers(self.model, blocks))
            yield

    def _install(self, name: str, function: Callable[..., Any]) -> Any:
        point = PlainPoint(find_hook_point(self.bridge, name).name)
        wrapper = plain_points(self.bridge).get(point.name)
        if wrapper is None:
            raise HookPointError(f"The fast engine has no hook point {name!r}; use engine='bridge'.")
        module = self.unhooked.of(wrapper)

        def edit(value: Tensor) -> Tensor | None:
            return function(value, hook=point)

        return install_input_hook(module, edit) if point.name.endswith("hook_in") else install_output_hook(module, edit)


def plain_points(bridge: Any) -> dict[str, Any]:
    """Canonical hook points that the unhooked model has, with the bridge's component each belongs to."""
    return remembered(bridge, "plain points", lambda: _plain_points(bridge))


def _plain_points(bridge: Any) -> dict[str, Any]:
    found = {}
    for layer, block in enumerate(bridge.blocks):
        for site in SITES:
            point = hook_points(bridge).get(f"blocks.{layer}.hook_{site}")
            if point is None:
                continue
            *components, end = point.name.removeprefix(f"blocks.{layer}.").split(".")
            if end in ("hook_in", "hook_out"):
                found[point.name] = _component(block, components)
    return found


def _component(block: Any, path: Sequence[str]) -> Any:
    for name in path:
        block = getattr(block, name)
    return block


def unhooked_model_of(bridge: Any) -> UnhookedModel:
    """The bridge's unhooked model, made once; anew, with all that was found out, where a module was replaced since."""
    found = remembered(bridge, "unhooked model", lambda: UnhookedModel(bridge.original_model))
    if not found.is_outdated:
        return found
    forget(bridge)
    return unhooked_model_of(bridge)


def plain_model(bridge: Any) -> Any:
    """A Hugging Face model of its own on the bridge's weights, compared with the bridge on a short probe.

    Raises:
        InputError: for a bridge in compatibility mode, or one that computes something else than its model.
    """
    if getattr(bridge, "compatibility_mode", False):
        raise InputError(
            "The bridge is in compatibility mode, which has changed its weights; load the model without it to share it."
        )
    made = UnhookedModel(bridge.original_model)
    made.set_attention(attention_kernel(bridge, "sdpa"))
    ids = _probe(made.model)
    with alone(made.model), undisturbed(bridge.original_model):
        wanted, found = (model(input_ids=ids).logits for model in (bridge.original_model, made.model))
    if not rounding_of(made.model).explains(found, wanted):
        raise InputError(
            f"The plain {type(made.model).__name__} under this bridge gives other logits than the bridge, so they "
            "cannot share weights; load the model with AutoModelForCausalLM.from_pretrained."
        )
    return made.model


def attention_kernel(bridge: Any, wanted: str) -> str:
    """The attention kernel to run.

    Eager where scores are soft-capped, since sdpa would leave the cap out silently, and where a family has no sdpa.
    sdpa in float64: eager attention takes its softmax in float32 there, where the mask of a padded row becomes −inf and
    the row NaN.
    """
    model = bridge.original_model
    is_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    if is_capped or not getattr(model, "_supports_sdpa", False):
        return "eager"
    return "sdpa" if model.get_input_embeddings().weight.dtype == torch.float64 else wanted


def choose_backend(bridge: Any, hook_names: Sequence[str], engine: str = "auto", *, attention: str = "sdpa") -> Backend:
    """The backend for these hook points.

    `auto` is *fast* where it can be: a short comparison on this model found no difference, the weights are plain, every
    hook point is on the residual stream or a sublayer's output, and nobody else has hooks on the bridge (they would not
    fire on the unhooked model).

    Raises:
        InputError: for an unknown name, or a fast engine that this model or these hooks rule out.
    """
    if engine not in ENGINE_NAMES:
        raise InputError(f"engine is one of {', '.join(ENGINE_NAMES)}, got {engine!r}.")
    if engine == "bridge":
        return BridgeBackend(bridge)
    reason = why_not_fast(bridge, hook_names)
    if reason is None:
        return FastBackend(bridge, attention)
    if engine != "auto":
        raise InputError(f"engine={engine!r} cannot run here: {reason} Use engine='bridge'.")
    _say_once(bridge, reason)
    return BridgeBackend(bridge)


def exact_backend(bridge: Any, hooks: Sequence[HookPair]) -> Backend:
    """The backend for scores and captures: eager attention, whose numbers equal the bridge's to the bit."""
    return choose_backend(bridge, [name for name, _ in hooks], "auto", attention="eager")


def why_not_fast(bridge: Any, hook_names: Sequence[str]) -> str | None:
    """Why the unhooked model cannot serve, in a sentence; None if it can."""
    model = bridge.original_model
    config = model.config
    if getattr(config, "quantization_config", None) is not None:
        return "The weights are quantised."
    if type(model).__module__.startswith("transformers_modules"):
        return "The model runs code of its own from the hub."
    if getattr(bridge, "compatibility_mode", False):
        return "The bridge is in compatibility mode."
    outside = [name for name in hook_names if find_hook_point(bridge, name).name not in plain_points(bridge)]
    if outside:
        return f"The hook point {outside[0]!r} exists on the bridge only."
    with alone(model):  # another thread's call has hooks on it while it runs
        if _has_hooks(bridge):
            return "The bridge has hooks of yours, which would not fire."
        different = fast_difference(bridge)
    return None if different is None else f"{DIFFERS} {different}."


def fast_difference(bridge: Any) -> str | None:
    """What the fast engine gives otherwise than the bridge on this model, in words; compared once.

    The bridge must have no hooks of others.
    """
    return found_out(bridge, "fast difference", lambda: _compared(bridge), weights=unhooked_model_of(bridge).model)


def _compared(bridge: Any) -> str | None:
    model = bridge.original_model
    engines = BridgeBackend(bridge), FastBackend(bridge, "eager"), FastBackend(bridge, "sdpa")
    with undisturbed(model):
        return first_difference(*engines, list(plain_points(bridge)), _probe(model))


def _probe(model: Any) -> Tensor:
    """What comparisons of one pass run, shape [1, tokens]."""
    return torch.tensor([ordinary_tokens(model, N_TOKENS)], device=embedding_device(model))


def _has_hooks(bridge: Any) -> bool:
    """Whether a user's forward hooks are on the bridge's hook points, or by torch's own call on modules inside it."""
    registered = (
        hook
        for module in modules_in(bridge.original_model)
        if module._forward_hooks or module._forward_pre_hooks
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    on_points = (handle.user_hook for point in hook_points(bridge).values() for handle in point.fwd_hooks)
    return any(not _is_library_hook(hook) for hook in (*registered, *on_points))


def _is_library_hook(hook: Any) -> bool:
    """Whether the libraries themselves put this hook there; theirs collect outputs that nobody asked for here."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in ("transformers", "transformer_lens")


def _say_once(bridge: Any, reason: str) -> None:
    if DIFFERS in reason or "quantised" in reason or "code of its own" in reason:  # it lasts
        warn_once(bridge, f"{reason} Generation runs on the bridge engine.")


def warn_once(bridge: Any, message: str) -> None:
    """Gives a warning about a model, unless it was given before."""
    said = remembered(bridge, "warnings given", set)
    if message not in said:
        said.add(message)
        warn(message)


def embedding_device(model: Any) -> torch.device:
    """Where token ids go."""
    return model.get_input_embeddings().weight.device


@dataclass(frozen=True)
class BridgedModel:
    """A TransformerBridge as the runtime sees it; a `HookedModel`.

    Attributes:
        bridge: the TransformerBridge.
    """

    bridge: Any

    @property
    def causal(self) -> Any:
        """The Hugging Face model that the bridge wraps."""
        return self.bridge.original_model

    def exact_backend(self, hooks: Sequence[HookPair]) -> Backend:
        """See `exact_backend`."""
        return exact_backend(self.bridge, hooks)


@dataclass(frozen=True)
class BridgedCall(BridgedModel):
    """A TransformerBridge as one call sees it: the backend for the same hook points is looked for once."""

    _found: dict[frozenset[str], Backend] = field(default_factory=dict, repr=False, compare=False)

    def exact_backend(self, hooks: Sequence[HookPair]) -> Backend:
        """See `exact_backend`."""
        names = frozenset(name for name, _ in hooks)
        if names not in self._found:
            self._found[names] = super().exact_backend(hooks)
        return self._found[names]
