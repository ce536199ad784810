"""What model a TransformerBridge runs."""

from typing import Any

from steerlab._runtime.weights import hash_of_weights, parameters_hash
from steerlab.core._quantisation import quantisation
from steerlab.core.engine import ModelInfo
from steerlab.models import weights_hash


def describe_model(bridge: Any, name: str | None, path: Any, revision: str | None, given: Any = None) -> ModelInfo:
    """Name, hashes and sizes of the model behind a bridge.

    Args:
        bridge: the TransformerBridge.
        name: the name to record; by default the bridge's.
        path: directory of the weights, if they came from one.
        revision: hub revision, if there is one.
        given: the plain model in memory that the bridge was made from, whose weights are hashed; None without one.
    """
    embedding = bridge.original_model.get_input_embeddings().weight
    head = bridge.original_model.get_output_embeddings()
    context = context_length(bridge)
    assert context is not None  # a bridge's configuration has n_ctx
    return ModelInfo(
        name=name or str(bridge.cfg.model_name),
        revision=revision,
        weights_hash=_hash(bridge, path, given),
        weight_processing=_weight_processing(bridge),
        n_layers=int(bridge.cfg.n_layers),
        d_model=int(bridge.cfg.d_model),
        d_vocab=int(head.weight.shape[0]) if head is not None else int(embedding.shape[0]),
        context_length=context,
        dtype=str(embedding.dtype).removeprefix("torch."),
    )


def _hash(bridge: Any, path: Any, given: Any) -> str:
    if given is not None:
        return hash_of_weights(given)
    return weights_hash(path) if path is not None else parameters_hash(bridge.original_model)


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
