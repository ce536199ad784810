"""What model a TransformerBridge runs."""

import hashlib
from typing import Any

import torch

from steerlab.core.engine import ModelInfo
from steerlab.core.hashing import HASH_LENGTH
from steerlab.core.quantisation import quantisation
from steerlab.core.stopping import eos_ids_of
from steerlab.models import weights_hash


def describe_model(bridge: Any, name: str | None, path: Any, revision: str | None) -> ModelInfo:
    """Name, hashes and sizes of the model behind a bridge."""
    embedding = bridge.original_model.get_input_embeddings().weight
    head = bridge.original_model.get_output_embeddings()
    context = context_length(bridge)
    assert context is not None  # a bridge's configuration has n_ctx
    return ModelInfo(
        name=name or str(bridge.cfg.model_name),
        revision=revision,
        weights_hash=weights_hash(path) if path is not None else parameters_hash(bridge.original_model),
        weight_processing=_weight_processing(bridge),
        n_layers=int(bridge.cfg.n_layers),
        d_model=int(bridge.cfg.d_model),
        d_vocab=int(head.weight.shape[0]) if head is not None else int(embedding.shape[0]),
        context_length=context,
        dtype=str(embedding.dtype).removeprefix("torch."),
    )


def _weight_processing(bridge: Any) -> str:
    done = quantisation(bridge.original_model.config)
    if not getattr(bridge, "compatibility_mode", False):
        return done
    return "compatibility_mode" if done == "none" else f"{done} compatibility_mode"


def context_length(model: Any) -> int | None:
    """The longest sequence, in tokens, of a TransformerBridge or a HookedTransformer; None if a model states none."""
    original = getattr(model, "original_model", None)
    stated = None if original is None else getattr(original.config.get_text_config(), "max_position_embeddings", None)
    stated = stated or getattr(getattr(model, "cfg", None), "n_ctx", None)
    return None if stated is None else int(stated)


def parameters_hash(model: torch.nn.Module) -> str:
    """Content hash of a model held in memory: names and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:HASH_LENGTH]


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text: of the tokenizer, the configuration and the generation configuration, if there."""
    return eos_ids_of(tokenizer, getattr(model, "config", None), getattr(model, "generation_config", None))
