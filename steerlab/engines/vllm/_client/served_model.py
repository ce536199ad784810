"""What an engine has to know of the model that vLLM runs."""

from dataclasses import dataclass, field
from typing import Any

from steerlab._runtime.reference_norm import WINDOW
from steerlab.core._hook_points import HookPoint
from steerlab.core.engine import ModelInfo
from steerlab.engines.vllm._client.info import describe, eos_token_ids
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.models._resolver import ResolvedModel


@dataclass(frozen=True)
class ServedModel:
    """A model that vLLM runs.

    Attributes:
        info: the model.
        config: what is wired.
        tokenizer: the model's own; None if vLLM works with token ids only.
        eos_ids: ids that end a row.
        own_context: tokens that the model itself takes, whatever vLLM gives it.
        median_norms: those that have been measured.
    """

    info: ModelInfo
    config: SteeringConfig
    tokenizer: Any
    eos_ids: frozenset[int]
    own_context: int
    median_norms: dict[HookPoint, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, found: ResolvedModel, hf_config: Any, tokenizer: Any, config: SteeringConfig, model_config: Any
    ) -> "ServedModel":
        """The model in a directory, as a running vLLM has it.

        Args:
            found: the directory.
            hf_config: its configuration.
            tokenizer: its tokenizer, or None.
            config: what is wired.
            model_config: vLLM's own configuration of it.
        """
        eos_ids = eos_token_ids(tokenizer, hf_config, found.path)
        own_context = int(getattr(hf_config.get_text_config(), "max_position_embeddings", WINDOW))
        return cls(describe(found, hf_config, model_config), config, tokenizer, eos_ids, own_context)
