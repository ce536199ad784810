"""One prompt of a steered request inside the engine, and the tokens that each of its samples has."""

from copy import copy
from typing import Any

from steerlab.engines.vllm._client.requests import Request
from steerlab.engines.vllm._server.tickets import Ticket
from steerlab.engines.vllm._wire.request_spec import RequestSpec


class SampleTokens:
    """The tokens of each sample, whether outputs bring the new ones or all so far.

    Args:
        params: the request's sampling parameters.
    """

    def __init__(self, params: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._brings_new_ones = params.output_kind == RequestOutputKind.DELTA
        self._tokens: dict[int, list[int]] = {}

    def add(self, output: Any) -> None:
        """Takes in one of vLLM's RequestOutputs."""
        for sample in output.outputs:
            if self._brings_new_ones:
                self._tokens.setdefault(sample.index, []).extend(sample.token_ids)
            else:
                self._tokens[sample.index] = list(sample.token_ids)

    def of(self, sample: int) -> tuple[int, ...]:
        return tuple(self._tokens.get(sample, ()))


class Claim:
    """One prompt of a steered request, inside the engine.

    Attributes:
        ticket: the request's.
        index: which of its prompts.
        token_ids: the prompt.
        groups: the positions of each group of the plan's edits.
        key: names it until its samples have names of their own.
        tokens: those of its samples so far.
        rows: names of its samples, in order.
        may_run_on: whether the engine may not know yet that it has ended: stop strings are found outside of it.
        settled: whether the workers have handed over its accounts.
    """

    def __init__(
        self, ticket: Ticket, index: int, token_ids: tuple[int, ...], groups: Any, key: str, params: Any
    ) -> None:
        self.ticket, self.index, self.token_ids, self.groups, self.key = ticket, index, token_ids, groups, key
        self.tokens = SampleTokens(params)
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
        return len(self.token_ids) + max(0, len(self.tokens.of(sample)) - 1)


def with_spec(params: Any, spec: RequestSpec) -> Any:
    """Sampling parameters that carry a request's steering."""
    marked = copy(params)
    marked.extra_args = {**(params.extra_args or {}), **spec.to_args()}
    return marked
