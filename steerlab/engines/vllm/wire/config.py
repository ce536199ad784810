"""What an engine asks of its workers, and how it reaches them: vLLM's `additional_config`.

`additional_config` is part of vLLM's compile cache key, so a graph that was compiled for other layers, other buffer
shapes or another version of the operator is never loaded.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from steerlab.core.numbers import check_integer

KEY = "steerlab"
"""Our entry in `additional_config` and in a request's `extra_args`."""

OP_VERSION = 1
"""Changes whenever the operator's arguments or meaning change."""


@dataclass(frozen=True)
class SteeringConfig:
    """What is wired into a model.

    Attributes:
        layers: layers after which the stream can be edited and read.
        max_directions: directions that one request may have at one layer.
        max_runs: runs of consecutive positions that one edit may act on.
        capture_tokens: positions that one forward pass may read; 0 wires no reading.
        score_bytes: working memory for scoring, reserved on each device; 0 wires no scoring.
        op_version: the operator's version.
    """

    layers: tuple[int, ...]
    max_directions: int = 4
    max_runs: int = 8
    capture_tokens: int = 2048
    score_bytes: int = 1 << 29
    op_version: int = OP_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(sorted(self.layers)))
        for name, least in (("max_directions", 1), ("max_runs", 1), ("capture_tokens", 0), ("score_bytes", 0)):
            object.__setattr__(self, name, check_integer(getattr(self, name), name, least=least))

    def to_json(self) -> dict[str, Any]:
        """As `additional_config` carries it."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def of(cls, vllm_config: Any) -> "SteeringConfig | None":
        """What a vLLM configuration asks for; None if it asks for no steering."""
        found = vllm_config.additional_config[KEY] if is_ours(vllm_config) else None
        return None if found is None else cls(**{**found, "layers": tuple(found["layers"])})


def is_ours(vllm_config: Any) -> bool:
    """Whether steerlab started this vLLM, to steer or, as a server without layers, not to."""
    additional = vllm_config.additional_config
    return isinstance(additional, Mapping) and KEY in additional
