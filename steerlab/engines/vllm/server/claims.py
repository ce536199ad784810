"""One prompt of a steered request inside the engine, and how many tokens each of its samples has."""

from copy import copy
from typing import Any

from steerlab.engines.vllm.client.requests import Request
from steerlab.engines.vllm.server.tickets import Ticket
from steerlab.engines.vllm.wire.request_spec import RequestSpec


class SampleCounts:
    """Counts tokens per sample, whether outputs bring the new ones or all so far.

    Args:
        params: the request's sampling parameters.
    """

    def __init__(self, params: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._brings_new_ones = params.output_kind == RequestOutputKind.DELTA
        self._counts: dict[int, int] = {}

    def add(self, output: Any) -> None:
        """Takes in one of vLLM's RequestOutputs."""
        for sample in output.outputs:
            before = self._counts.get(sample.index, 0) if self._brings_new_ones else 0
            self._counts[sample.index] = before + len(sample.token_ids)

    def of(self, sample: int) -> int:
        """Tokens of a sample."""
        return self._counts.get(sample, 0)


class Claim:
    """One prompt of a steered request, inside the engine.

    Attributes:
        ticket: the request's.
        index: which of its prompts.
        token_ids: the prompt.
        groups: the positions of each group of the plan's edits.
        key: names it until its samples have names of their own.
        counts: tokens that its samples have so far.
        rows: names of its samples, in order.
        may_run_on: whether the engine may not know yet that it has ended: stop strings are found outside of it.
        settled: whether the workers have handed over its accounts.
    """

    def __init__(
        self, ticket: Ticket, index: int, token_ids: tuple[int, ...], groups: Any, key: str, params: Any
    ) -> None:
        self.ticket, self.index, self.token_ids, self.groups, self.key = ticket, index, token_ids, groups, key
        self.counts = SampleCounts(params)
        self.rows: list[str] = []
        self.may_run_on = bool(params.stop)
        self.settled = False

    def marked(self, params: Any) -> Any:
        """The sampling parameters with the plan and its positions in them."""
        spec = self.request(0).spec(self.key)
        assert spec is not None  # it edits something
        return with_spec(params, spec)

    def request(self, sample: int) -> Request:
        """A sample, as receipts are made of."""
        ready = self.ticket.ready
        return Request(self.index, sample, self.token_ids, {}, ready.assigned, ready.compiled, self.groups)

    def length(self, sample: int) -> int:
        """Tokens that a sample's text rests on: its last one drives nothing."""
        return len(self.token_ids) + max(0, self.counts.of(sample) - 1)


def with_spec(params: Any, spec: RequestSpec) -> Any:
    """Sampling parameters that carry a request's steering."""
    marked = copy(params)
    marked.extra_args = {**(params.extra_args or {}), **spec.to_args()}
    return marked
