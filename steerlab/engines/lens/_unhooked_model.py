"""The unhooked model under a bridge: the plain Hugging Face modules again, sharing every weight.

TransformerLens replaces a model's modules by wrappers with hook points, which cost Python time at every step. The
unhooked model undoes that without touching the bridge: every module is copied shallowly, wrappers are replaced by what
they wrap, and each copy has hook registries of its own. Parameters are the same tensors, so nothing is stored twice.
"""

import copy
from collections import OrderedDict
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

from steerlab._runtime.model_state import share_lock
from steerlab._runtime.modules import unwrapped

_HOOK_REGISTRIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# What accelerate puts on modules that it moves inputs for: a forward bound to the original module, hence unusable here.
_PLACEMENT_ENTRIES = ("forward", "_hf_hook", "_old_forward")


class UnhookedModel:
    """A bridged model without its wrappers.

    Args:
        model: a causal language model whose modules a bridge has wrapped.

    Attributes:
        model: the model without wrappers, in evaluation mode; call it like the original Hugging Face model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[int, nn.Module] = {}
        self._children: list[tuple[ReferenceType[nn.Module], list[int]]] = []
        self._configs: dict[int, Any] = {}
        self.model: Any = self._copy(model).eval()
        share_lock(self.model, model)  # a call with other parameters puts them where both look

    @property
    def is_outdated(self) -> bool:
        """Whether a module of the model was replaced since, say by an adapter: this one still runs the old one."""
        for reference, children in self._children:  # every call asks this several times, hence no generators
            original = reference()
            if original is None or _children(original) != children:
                return True
        return False

    def of(self, module: nn.Module) -> nn.Module:
        """The counterpart here of a module or of the wrapper around it.

        Raises:
            KeyError: if the module is not part of the model.
        """
        return self._copies[id(unwrapped(module))]

    def set_attention(self, implementation: str) -> None:
        """Chooses the attention kernel of the next calls: `sdpa` or `eager`."""
        for config in self._configs.values():
            if config._attn_implementation != implementation:
                config._attn_implementation = implementation

    def keep_experts_on_device(self) -> None:
        """Lets experts gather their weights where they would otherwise count tokens on the processor.

        The kernel for experts takes bfloat16; for other dtypes Hugging Face reads from the device how many tokens each
        has.
        """
        for config in self._configs.values():
            if getattr(config, "_experts_implementation", None) == "grouped_mm":
                config._experts_implementation = "batched_mm"

    def _copy(self, module: nn.Module) -> nn.Module:
        original = unwrapped(module)
        if id(original) not in self._copies:
            made = object.__new__(type(original))
            made.__dict__ = {k: v for k, v in original.__dict__.items() if k not in _PLACEMENT_ENTRIES}
            made.__dict__ |= {name: OrderedDict() for name in _HOOK_REGISTRIES}
            self._copies[id(original)] = made
            self._children.append((ref(original), _children(original)))
            made._modules = {
                name: child if child is None else self._copy(child)
                for name, child in original._modules.items()
                if not _is_hook_point(child)
            }
            for name, value in original.__dict__.items():
                if _is_model_config(value):
                    made.__dict__[name] = self._config(value)
        return self._copies[id(original)]

    def _config(self, config: Any) -> Any:
        if id(config) not in self._configs:
            made = copy.copy(config)
            self._configs[id(config)] = made
            for request in ("output_attentions", "output_hidden_states"):  # the bridge asks for both; nobody reads them
                if getattr(made, request, False):
                    setattr(made, request, False)
            # With one, some families look for padding in every pass that has no mask, which waits for the device.
            made.pad_token_id = None
            for name, value in config.__dict__.items():
                if _is_model_config(value):
                    made.__dict__[name] = self._config(value)
        return self._configs[id(config)]


def shallow_copy(model: nn.Module) -> Any:
    """A model of copied modules without hooks that shares every parameter: to wrap in place of the original."""
    return UnhookedModel(model).model


def _children(module: nn.Module) -> list[int]:
    """Identities of a module's own modules, without wrappers."""
    found = []
    for child in module._modules.values():
        while child is not None and (inner := child._modules.get("_original_component")) is not None:
            child = inner
        found.append(id(child))
    return found


def _is_hook_point(module: nn.Module | None) -> bool:
    from transformer_lens.hook_points import HookPoint

    return isinstance(module, HookPoint)


def _is_model_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)
