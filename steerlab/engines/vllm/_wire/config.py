"""What an engine asks of its workers, and how it reaches them: vLLM's `additional_config`.

`additional_config` is part of vLLM's compile cache key, so a graph that was compiled for other layers, other buffer
shapes or another version of the operator is never loaded.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from steerlab.core._hook_points import HookPoint, check_site
from steerlab.core._numbers import as_list, check_integer
from steerlab.core.errors import HookPointError, InputError

KEY = "steerlab"
"""Our entry in `additional_config` and in a request's `extra_args`."""

OP_VERSION = 3
"""Changes whenever the operator's arguments or meaning change."""

MOST_CONDITIONS = 4
"""Which combinations of their answers let an edit act is a number of 2^4 bits, which float32 holds exactly."""

MOST_TOKEN_RULES = 4
"""In which combinations of their answers a run of positions acts is a number of 2^4 bits."""

MOST_SEQUENCES, MOST_TOKENS = 32, 8
"""Sequences of ids that one event of a token rule may have, and tokens of each."""

SITES = ("attn_out", "resid_mid", "mlp_out", "resid_post")
"""The sites that can be wired, in the order in which a layer reaches them."""


@dataclass(frozen=True)
class SteeringConfig:
    """What is wired into a model.

    Attributes:
        layers: layers in which the stream can be edited and read.
        max_directions: directions that one request may have at one hook point; twice as many edits, and terms of them.
        max_runs: runs of consecutive positions that one edit may act on.
        capture_tokens: positions that one forward pass may read; 0 wires no reading.
        score_bytes: working memory for scoring, reserved on each device; 0 wires no scoring.
        sites: where in these layers.
        max_conditions: conditions that one request may have; 0 wires none.
        max_token_rules: sets that look at generated tokens which one request may have; 0 follows none.
        op_version: the operator's version.
    """

    layers: tuple[int, ...]
    max_directions: int = 4
    max_runs: int = 8
    capture_tokens: int = 2048
    score_bytes: int = 1 << 29
    sites: tuple[str, ...] = ("resid_post",)
    max_conditions: int = 2
    max_token_rules: int = 2
    op_version: int = OP_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(sorted(self.layers)))
        object.__setattr__(self, "sites", sites_in_order(self.sites))
        for name, least in (("max_directions", 1), ("max_runs", 1), ("capture_tokens", 0), ("score_bytes", 0)):
            object.__setattr__(self, name, check_integer(getattr(self, name), name, least=least))
        for name, most in (("max_conditions", MOST_CONDITIONS), ("max_token_rules", MOST_TOKEN_RULES)):
            number = check_integer(getattr(self, name), name, least=0)
            if number > most:
                raise InputError(f"{name} is at most {most}, got {number}.")
            object.__setattr__(self, name, number)

    @cached_property
    def points(self) -> tuple[HookPoint, ...]:
        """The wired hook points, in the order in which a pass reaches them."""
        return tuple(HookPoint(layer, site) for layer in self.layers for site in self.sites)

    @property
    def max_edits(self) -> int:
        """Edits, and terms of them, that one request may have at one hook point."""
        return 2 * self.max_directions

    def to_json(self) -> dict[str, Any]:
        """As `additional_config` carries it."""
        return {**asdict(self), "layers": list(self.layers), "sites": list(self.sites)}

    @classmethod
    def of(cls, vllm_config: Any) -> "SteeringConfig | None":
        """What a vLLM configuration asks for; None if it asks for no steering."""
        found = vllm_config.additional_config[KEY] if is_ours(vllm_config) else None
        return None if found is None else cls(**{**found, "layers": tuple(found["layers"])})


def sites_in_order(sites: Any) -> tuple[str, ...]:
    """The sites to wire, in the order in which a layer reaches them.

    Raises:
        HookPointError: for none, or one that cannot be wired.
    """
    given = [sites] if isinstance(sites, str) else as_list(sites)
    wanted = {check_site(site) for site in given or ()}
    if not wanted or "resid_pre" in wanted:
        raise HookPointError(
            f"sites names one or more of {', '.join(SITES)}; got {sites!r}. resid_pre of a layer is resid_post of the "
            "one before."
        )
    return tuple(site for site in SITES if site in wanted)


def is_ours(vllm_config: Any) -> bool:
    """Whether steerlab started this vLLM, to steer or, as a server without layers, not to."""
    additional = vllm_config.additional_config
    return isinstance(additional, Mapping) and KEY in additional
