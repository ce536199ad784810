"""What a steered HTTP request is, from its arrival to its receipts."""

import math
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from steerlab.core.errors import SteerlabError
from steerlab.core.receipts import Receipt
from steerlab.engines.vllm._client.compiled_plan import CompiledPlan
from steerlab.engines.vllm._client.ready_plans import ReadyPlan

KEPT_RECEIPTS = 4096


@dataclass
class Ticket:
    """One HTTP request that asked for steering.

    Attributes:
        ready: its plan.
        name: under which its receipts are found.
        id: what stands in for the plan inside the request that vLLM sees.
        n_prompts: prompts of it that vLLM has handed to its engine so far.
        reached: whether the engine has taken it up; an answer without that was not steered.
        problem: what was wrong with it, if that showed only inside the engine.
        receipts: one per completion, in the order in which they ended.
    """

    ready: ReadyPlan
    name: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    n_prompts: int = 0
    reached: bool = False
    problem: SteerlabError | None = None
    receipts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def compiled(self) -> CompiledPlan:
        """Its plan in the operator's terms; a plan without edits gets no ticket."""
        assert self.ready.compiled is not None
        return self.ready.compiled


class ReceiptBook:
    """The receipts of the last requests; the oldest go first."""

    def __init__(self, room: int = KEPT_RECEIPTS) -> None:
        self._room = room
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def enter(self, ticket: Ticket) -> None:
        """Keeps what is known of a request."""
        plan = ticket.ready.assigned.given_hash
        self._kept[ticket.name] = {"plan": plan, "completions": ticket.receipts}
        self._kept.move_to_end(ticket.name)
        while len(self._kept) > self._room:
            self._kept.popitem(last=False)

    def find(self, name: str) -> dict[str, Any] | None:
        """The receipts of a request, by its name or by the id of its answer."""
        bare = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
        return self._kept.get(name) or self._kept.get(bare)


def receipt_json(receipt: Receipt, prompt: int, inherited: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """A completion's receipt as JSON; a mean over nothing, or one that is not finite, is null."""
    edits = [
        {
            "hook_point": edit.hook_point,
            "layer": edit.layer,
            "operator": edit.operator,
            "vector": edit.vector,
            "edited": edit.edited,
            "expected": edit.expected,
            "inherited": len(positions),
            "mean_relative_change": edit.mean_relative_change if math.isfinite(edit.mean_relative_change) else None,
        }
        for edit, positions in zip(receipt.edits, inherited, strict=True)
    ]
    return {"prompt": prompt, "index": receipt.row_index, "edits": edits}
