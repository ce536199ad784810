"""One row of a call on its way: what is submitted to vLLM for it, and what came back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steerlab.engines.vllm.compiled_plan import CompiledPlan
from steerlab.engines.vllm.specs import RequestSpec, Runs
from steerlab.steering.assign import AssignedPlan


@dataclass(frozen=True)
class Request:
    """One request to vLLM.

    Attributes:
        prompt_index: the caller's prompt.
        row_index: its place in the call's result.
        token_ids: what is submitted.
        arguments: of vLLM's SamplingParams.
        assigned: the plan as assigned to the prompt; None if nothing is steered in this call.
        compiled: the plan in the operator's terms; None without edits.
        groups: the positions of each group of its edits.
        read: positions whose activations are wanted.
        cache_salt: the caller's own salt for the prefix cache.
    """

    prompt_index: int
    row_index: int
    token_ids: tuple[int, ...]
    arguments: Mapping[str, Any]
    assigned: AssignedPlan
    compiled: CompiledPlan | None = None
    groups: tuple[Runs, ...] = ()
    read: Runs = ()
    cache_salt: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether anything is edited or read."""
        return self.compiled is not None or bool(self.read)

    def spec(self, row: str) -> RequestSpec | None:
        """What the workers are told; None if there is nothing to do."""
        if not self.has_work:
            return None
        return RequestSpec(row, None if self.compiled is None else self.compiled.fingerprint, self.groups, self.read)

    def prompt(self) -> dict[str, Any]:
        """As vLLM takes a prompt."""
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"prompt_token_ids": list(self.token_ids), **salt}


@dataclass
class Outcome:
    """What came back for one request.

    Attributes:
        output: vLLM's RequestOutput.
        ran: runs of positions that went through the model.
        tally: per edit of the plan, tokens edited and summed ‖Δx‖/‖x‖.
        read: positions that were read, in order.
        streams: per layer, their activations, float32 [positions, d_model].
    """

    output: Any
    ran: list[tuple[int, int]] = field(default_factory=list)
    tally: dict[int, tuple[float, float]] = field(default_factory=dict)
    read: list[int] = field(default_factory=list)
    streams: dict[int, Any] = field(default_factory=dict)
