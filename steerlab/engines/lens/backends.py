"""The two ways through a bridged model: with every hook point, or fast.

*bridge* runs the model as TransformerLens wrapped it. *fast* runs its shadow, the plain Hugging Face modules, where
the residual stream and the two sublayers' outputs can still be hooked. Hooks have one form on both,
`fn(value, hook=point)`: `point.name` is the hook point's canonical name, and a returned tensor replaces the value.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steerlab.core.errors import HookPointError, InputError, VectorShapeError
from steerlab.core.hook_points import SITES
from steerlab.engines.lens.crossing import memoised_crossings
from steerlab.engines.lens.hooking import all_heard, alone, attached, find_hook_point, hook_points
from steerlab.engines.lens.shadow import Shadow

ENGINE_NAMES = ("auto", "bridge", "fast", "compiled")
HookPair = tuple[str, Callable[..., Any]]

# Families whose shadow was compared with the bridge and with plain Hugging Face, hook point by hook point.
CHECKED_FAMILIES = frozenset("llama gpt2 qwen2 qwen3 gemma2 gemma3_text mistral olmo2 gpt_neox phi3".split())


class Backend:
    """A callable model with hooks."""

    name: str
    model: Any

    @abstractmethod
    def attached(self, hooks: Sequence[HookPair]) -> AbstractContextManager[None]:
        """Runs the body with hooks, in the order given; they are gone afterwards, also after an error.

        Other threads that want the model wait.

        Raises:
            HookPointError: for an unknown hook point, or one that never fired while the body ran.
        """


class BridgeBackend(Backend):
    """The model as TransformerLens wrapped it."""

    name = "bridge"

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        self.model = bridge.original_model

    @contextmanager
    def attached(self, hooks: Sequence[HookPair]) -> Iterator[None]:
        """See `Backend.attached`."""
        checked = [(name, keeping_form(function)) for name, function in hooks]
        # users' own hooks may keep what they see, to train on it: no inference tensors here
        with alone(self.model), torch.inference_mode(False), torch.no_grad():
            with memoised_crossings(self.model, list(self.bridge.blocks)), attached(self.bridge, checked):
                yield


@dataclass(frozen=True)
class PlainPoint:
    """What a hook on the shadow sees of its hook point."""

    name: str


class FastBackend(Backend):
    """The bridge's shadow, for hooks on the residual stream and on sublayer outputs.

    Args:
        bridge: the TransformerBridge.
        attention: the attention kernel: `sdpa`, or `eager` for numbers equal to the bridge's; see `attention_kernel`.
    """

    name = "fast"

    def __init__(self, bridge: Any, attention: str = "sdpa") -> None:
        self.bridge = bridge
        self.shadow = shadow_of(bridge)
        self.attention = attention_kernel(bridge, attention)
        self.model = self.shadow.model

    @contextmanager
    def attached(self, hooks: Sequence[HookPair]) -> Iterator[None]:
        """See `Backend.attached`."""
        blocks = [self.shadow.of(block) for block in self.bridge.blocks]
        checked = [(name, keeping_form(function)) for name, function in hooks]
        with alone(self.model), all_heard(checked) as listening, ExitStack() as stack:
            self.shadow.set_attention(self.attention)
            for name, function in listening:
                stack.callback(self._install(name, function).remove)
            stack.enter_context(memoised_crossings(self.model, blocks))
            yield

    def _install(self, name: str, function: Callable[..., Any]) -> Any:
        point = PlainPoint(find_hook_point(self.bridge, name).name)
        wrapper = plain_points(self.bridge).get(point.name)
        if wrapper is None:
            raise HookPointError(f"The fast engine has no hook point {name!r}; use engine='bridge'.")
        module = self.shadow.of(wrapper)

        def edit(value: Tensor) -> Tensor | None:
            return function(value, hook=point)

        return install_input_hook(module, edit) if point.name.endswith("hook_in") else install_output_hook(module, edit)


def install_output_hook(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Any:
    """A forward hook that edits a module's output, or its first part if it returns a tuple."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        whole = isinstance(output, Tensor)
        changed = edit(output if whole else output[0])
        if changed is None:
            return None
        return changed if whole else (changed, *output[1:])

    return module.register_forward_hook(hook)


def install_input_hook(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Any:
    """A forward pre-hook that edits a module's first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = edit(args[0] if args else kwargs["hidden_states"])
        if changed is None:
            return None
        return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def keeping_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook whose result keeps the activation's dtype and device, and must have its shape."""

    def hook(value: Any, hook: Any) -> Any:
        changed = function(value, hook=hook)
        if changed is None or not isinstance(value, Tensor):
            return changed
        if not isinstance(changed, Tensor) or changed.shape != value.shape:
            found = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise VectorShapeError(
                f"The hook at {hook.name} got an activation of shape {tuple(value.shape)} and returned {found}; "
                "return the same shape, or None to leave it as it is."
            )
        return changed.to(device=value.device, dtype=value.dtype)

    return hook


def plain_points(bridge: Any) -> dict[str, Any]:
    """Canonical hook points that the shadow has, with the bridge's component each belongs to."""
    found = bridge.__dict__.get("_steerlab_plain_points")
    if found is None:
        found = {}
        for layer, block in enumerate(bridge.blocks):
            for site in SITES:
                point = hook_points(bridge).get(f"blocks.{layer}.hook_{site}")
                if point is None:
                    continue
                *components, end = point.name.removeprefix(f"blocks.{layer}.").split(".")
                if end in ("hook_in", "hook_out"):
                    found[point.name] = _component(block, components)
        bridge.__dict__["_steerlab_plain_points"] = found
    return found


def _component(block: Any, path: Sequence[str]) -> Any:
    for name in path:
        block = getattr(block, name)
    return block


def shadow_of(bridge: Any) -> Shadow:
    """The bridge's shadow, made once; it lives as long as the bridge."""
    if "_steerlab_shadow" not in bridge.__dict__:
        bridge.__dict__["_steerlab_shadow"] = Shadow(bridge.original_model)
    return bridge.__dict__["_steerlab_shadow"]


def attention_kernel(bridge: Any, wanted: str) -> str:
    """The attention kernel to run.

    Eager where scores are soft-capped, since sdpa would leave the cap out silently. sdpa in float64: eager attention
    takes its softmax in float32 there, where the mask of a padded row becomes −inf and the row NaN.
    """
    model = bridge.original_model
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "eager"
    return "sdpa" if model.get_input_embeddings().weight.dtype == torch.float64 else wanted


def choose_backend(bridge: Any, hook_names: Sequence[str], engine: str = "auto", *, attention: str = "sdpa") -> Backend:
    """The backend for these hook points.

    `auto` is *fast* where it can be: the family was checked, the weights are plain, every hook point is on the residual
    stream or a sublayer's output, and nobody else has hooks on the bridge (they would not fire on the shadow).

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
    """Why the shadow cannot serve, in a sentence; None if it can."""
    model = bridge.original_model
    config = model.config
    family = config.get_text_config().model_type
    if family not in CHECKED_FAMILIES:
        return f"The family {family!r} was not checked on the fast engine."
    if getattr(config, "quantization_config", None) is not None:
        return "The weights are quantised."
    if type(model).__module__.startswith("transformers_modules"):
        return "The model runs code of its own from the hub."
    if getattr(bridge, "compatibility_mode", False):
        return "The bridge is in compatibility mode."
    outside = [name for name in hook_names if find_hook_point(bridge, name).name not in plain_points(bridge)]
    if outside:
        return f"The hook point {outside[0]!r} exists on the bridge only."
    if _has_hooks(bridge):
        return "The bridge has hooks of yours, which would not fire."
    return None


def _has_hooks(bridge: Any) -> bool:
    """Whether a user's forward hooks are on the bridge's hook points, or by torch's own call on modules inside it."""
    modules = bridge.__dict__.get("_steerlab_modules")
    if modules is None:
        modules = bridge.__dict__["_steerlab_modules"] = tuple(bridge.original_model.modules())
    registered = (
        hook for module in modules for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    return any(not _is_library_hook(hook) for hook in registered) or any(
        point.fwd_hooks for point in hook_points(bridge).values()
    )


def _is_library_hook(hook: Any) -> bool:
    """Whether the libraries themselves put this hook there; theirs collect outputs that nobody asked for here."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in ("transformers", "transformer_lens")


def _say_once(bridge: Any, reason: str) -> None:
    said = bridge.__dict__.setdefault("_steerlab_said", set())
    lasting = "was not checked" in reason or "quantised" in reason or "code of its own" in reason
    if lasting and reason not in said:
        said.add(reason)
        warnings.warn(f"{reason} Generation runs on the bridge engine.", UserWarning, stacklevel=4)


def embedding_device(model: Any) -> torch.device:
    """Where token ids go."""
    return model.get_input_embeddings().weight.device
