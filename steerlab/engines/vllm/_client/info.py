"""What model an engine runs, and what ends its texts."""

from pathlib import Path
from typing import Any

from steerlab.core._quantisation import quantisation
from steerlab.core._stopping import eos_ids_of
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError, ModelNotFoundError
from steerlab.models import weights_hash
from steerlab.models._resolver import ResolvedModel


def read_config(path: Path) -> Any:
    """A model directory's Hugging Face configuration.

    Raises:
        ModelNotFoundError: if it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"The configuration in {path} cannot be read: {error}") from error


def read_tokenizer(path: Path) -> Any:
    """A model directory's own tokenizer.

    Raises:
        InputError: if there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise InputError(
            f"The tokenizer in {path} cannot be read: {error} Pass skip_tokenizer_init=True to work with token ids."
        ) from error


def describe(found: ResolvedModel, config: Any, model_config: Any) -> ModelInfo:
    """Name, hash and sizes of the model that vLLM runs; the context is what vLLM was given."""
    text = config.get_text_config()
    return ModelInfo(
        name=found.name,
        revision=found.revision,
        weights_hash=weights_hash(found.path),
        weight_processing=quantisation(config, getattr(model_config, "quantization", None)),
        n_layers=int(text.num_hidden_layers),
        d_model=int(text.hidden_size),
        d_vocab=int(text.vocab_size),
        context_length=int(model_config.max_model_len),
        dtype=str(model_config.dtype).removeprefix("torch."),
    )


def eos_token_ids(tokenizer: Any, config: Any, path: Path) -> frozenset[int]:
    """Every id that ends a text: of the tokenizer, the configuration and the generation configuration, if there."""
    return eos_ids_of(tokenizer, config, _generation_config(path))


def _generation_config(path: Path) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(str(path)) if (path / "generation_config.json").is_file() else None
