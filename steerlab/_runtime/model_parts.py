"""Finding the parts of a user's causal language model: decoder, layers, head, and what it does to its logits.

Nothing is assumed of a family that is not checked on the model itself: a short probe compares the parts, put together,
with the model's own logits, and a model that they do not explain is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from steerlab._runtime.self_comparison import ordinary_tokens, undisturbed
from steerlab._runtime.sharding import as_forward_of, is_sharded, unsharded_type
from steerlab.core._not_finite_errors import not_finite
from steerlab.core.errors import InputError
from steerlab.measures._rounding import Rounding
from steerlab.measures.log_probs import rows_not_finite

T = TypeVar("T")

_PROBE_TOKENS = 12


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the head's output: multiply, divide, cap softly.

    Attributes:
        multiplier: e.g. Cohere's `logit_scale`.
        divisor: e.g. Granite's `logits_scaling`.
        softcap: c in c·tanh(x / c), e.g. Gemma 2's `final_logit_softcapping`.
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """The model's logits, in the dtype of the head's output."""
        scaled = raw if self.multiplier == 1 else raw * self.multiplier
        scaled = scaled if self.divisor == 1 else scaled / self.divisor
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap

    def pull_back(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient by the head's output, from the one by the logits it became."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits.to(gradient.dtype) / self.softcap) ** 2)
        factor = self.multiplier / self.divisor
        return gradient if factor == 1 else gradient * factor


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model.

    Attributes:
        root: the user's model, out of its DistributedDataParallel or compile wrapper; its parameter names are the ones
            that overrides use. Adapters (LoRA and the like) stay.
        causal: the Hugging Face causal language model inside.
        decoder: the part that turns ids into final hidden states.
        head: the linear layer from those to logits.
        transform: what happens to the logits afterwards.
        averager: the DistributedDataParallel wrapper around root, which averages gradients; None without one.
    """

    root: nn.Module
    causal: Any
    decoder: Any
    head: nn.Linear
    transform: LogitTransform
    averager: DistributedDataParallel | None = None

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.causal.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.causal.get_input_embeddings().weight.device

    @cached_property
    def is_sharded(self) -> bool:
        """Whether torch's `fully_shard` keeps the parameters in shards."""
        return is_sharded(self.root)

    def in_forward(self, work: Callable[[], T]) -> T:
        """The result of `work`, run as the model's forward, in which parameters of a sharded model are whole."""
        if self.causal is self.root:
            return as_forward_of(self.root, work)
        return as_forward_of(self.root, lambda: as_forward_of(self.causal, work))

    @property
    def d_vocab(self) -> int:
        """Number of logits."""
        return self.head.weight.shape[0]

    @property
    def context_length(self) -> int | None:
        """The longest sequence; None if the model states none."""
        return getattr(self.config, "max_position_embeddings", None)

    def check_head(self) -> None:
        """Checks that the model still has the head that was found.

        Raises:
            InputError: if another one has taken its place, e.g. after `resize_token_embeddings`.
        """
        if self.causal.get_output_embeddings() is not self.head:
            raise InputError(
                f"The head of {_name(self.causal)} was replaced after this SequenceProcessor was made (new tokens, an "
                "adapter); make a new one."
            )

    def layers(self) -> list[nn.Module]:
        """The decoder's layers, in order.

        Raises:
            InputError: if they cannot be identified.
        """
        count = getattr(self.config, "num_hidden_layers", None)
        found = [
            module
            for name, module in self.decoder.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and name.count(".") <= 1
        ]
        if len(found) != 1:
            raise InputError(
                f"The layers of {_name(self.causal)} cannot be identified: {len(found)} lists of {count} modules. "
                "Plans need them; score without a plan, or through an engine."
            )
        return list(found[0])


def unwrapped(model: Any) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile wrappers.

    Raises:
        InputError: if there is no Hugging Face causal language model inside, or its parameters are not here.
    """
    root = _wrappings(model)[-1]
    if not isinstance(root, nn.Module) or not hasattr(root, "get_output_embeddings"):
        raise InputError(
            f"SequenceProcessor takes a Hugging Face causal language model, got {type(root).__name__}. "
            "Load it with AutoModelForCausalLM.from_pretrained."
        )
    _check_whole(root)
    return root


def _wrappings(model: Any) -> list[Any]:
    """A model's wrappers from the outside in, and the model itself last."""
    found = [model]
    while True:
        inner = getattr(found[-1], "_orig_mod", None)
        if inner is None and isinstance(found[-1], DistributedDataParallel | DataParallel):
            inner = found[-1].module
        if inner is None:
            return found
        found.append(inner)


def _check_whole(root: nn.Module) -> None:
    """Checks that the model itself is here, and its parameters whole or sharded by torch itself.

    Raises:
        InputError: for an engine around a model, whose gradients would stay unsynchronised, and for parameters that are
            elsewhere.
    """
    away = [name for name, parameter in root.named_parameters() if parameter.is_meta]
    if away:
        raise InputError(
            f"{away[0]!r} of {type(root).__name__} is on the meta device: offloaded by a device map, or never loaded. "
            "Scoring needs every parameter in memory; spread the model over more devices, or load it on the CPU."
        )
    inner = root._modules.get("module", root._modules.get("_fsdp_wrapped_module"))
    if hasattr(inner, "get_output_embeddings"):
        raise InputError(
            f"{type(root).__name__} shards the model or wraps it in a way that is not known here. SequenceProcessor "
            "takes the plain model, one sharded by torch's fully_shard (FSDP2), or one in DistributedDataParallel, "
            "DataParallel or torch.compile."
        )


def find_parts(model: Any) -> ModelParts:
    """The parts of a model, compared with the model itself on a short probe.

    Raises:
        InputError: for a model whose logits the parts do not explain.
    """
    root = unwrapped(model)
    averager = next((w for w in _wrappings(model) if isinstance(w, DistributedDataParallel)), None)
    causal = _without_adapter_wrapper(root)
    if getattr(causal.config, "is_encoder_decoder", False):
        raise InputError(f"{_name(causal)} is an encoder-decoder model; SequenceProcessor takes causal models only.")
    head = causal.get_output_embeddings()
    if unsharded_type(head) is not nn.Linear:
        raise InputError(
            f"The head of {_name(causal)} is a {_path(head)}, not a plain torch Linear layer, so its logits cannot "
            "be made in chunks. Take adapters off the head, or merge them."
        )
    decoder = _decoder(causal)
    parts = [ModelParts(root, causal, decoder, head, transform, averager) for transform in _transforms(causal.config)]
    errors = [_probe(part) for part in parts]
    best = min(range(len(parts)), key=errors.__getitem__)
    if not errors[best] <= 1:
        raise InputError(
            f"{_name(causal)} does something to its logits that is not known here: its own differ from head(decoder) "
            f"by {errors[best]:.3g} times what rounding explains. The family is not supported."
        )
    return parts[best]


def _without_adapter_wrapper(root: Any) -> Any:
    if not hasattr(root, "peft_config"):
        return root
    for config in root.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            raise InputError("Prompt-learning adapters put virtual tokens before the text; they are not supported.")
    return root.get_base_model()


def _decoder(causal: Any) -> Any:
    for found in (causal.get_decoder(), causal.base_model):
        if found is not None and found is not causal and isinstance(found, nn.Module):
            return found
    raise InputError(f"The decoder of {_name(causal)} cannot be identified; the family is not supported.")


def _transforms(config: Any) -> list[LogitTransform]:
    """What the configuration may mean; the probe decides between readings."""
    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    factors = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    found = [LogitTransform(multiplier=float(f), softcap=cap) for f in factors if isinstance(f, int | float)]
    scaling = getattr(text, "logits_scaling", None)
    if isinstance(scaling, int | float):
        found.append(LogitTransform(divisor=float(scaling), softcap=cap))
        found.append(LogitTransform(multiplier=float(scaling), softcap=cap))
    return [*found, LogitTransform(softcap=cap)]


def _probe(parts: ModelParts) -> float:
    """How far the parts' logits are from the model's own, over what rounding explains."""
    ids = torch.tensor([ordinary_tokens(parts.causal, _PROBE_TOKENS)], device=parts.device)

    def put_together() -> Tensor:
        hidden = parts.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return parts.transform(parts.head(hidden.to(parts.head.weight.device)))

    with undisturbed(parts.causal):
        own = parts.causal(input_ids=ids, use_cache=False).logits
        ours = parts.in_forward(put_together)
    if bool(rows_not_finite(own).any()):
        raise not_finite(f"The logits of {_name(parts.causal)}", own.dtype)
    return Rounding(parts.head.weight.dtype, n_layers=0).excess(ours, own)


def _name(model: Any) -> str:
    return type(model).__name__


def _path(module: Any) -> str:
    """A type with its module: adapter libraries call their layers Linear too."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}"
