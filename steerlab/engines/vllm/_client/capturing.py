"""One call of `capture`: prompts are run once more, whatever the prefix cache holds, and wanted positions are read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from steerlab._runtime.encoding import raise_error
from steerlab.core.errors import InputError, ReceiptError, SteerlabError
from steerlab.core.results import Activations
from steerlab.engines.vllm._client.build_receipts import receipts_of
from steerlab.engines.vllm._client.position_runs import Row, positions_of
from steerlab.engines.vllm._client.ready_plans import Planner, ReadyPlan
from steerlab.engines.vllm._client.requests import ONE_TOKEN, Outcome, Request, RunRows, require_finite
from steerlab.engines.vllm._wire.runs import Runs, clip, positions_in, runs_of, size
from steerlab.steering.positions._prompt_lookup import PromptContent
from steerlab.steering.positions.where import Where

ARGUMENTS = {
    **ONE_TOKEN,
    "skip_reading_prefix_cache": True,  # a position that is not run cannot be read
}


MEDIAN_NORM = "median norm"
"""What a call is named that measures the unit of a dose."""


@dataclass
class CaptureCall:
    """A call in progress.

    Attributes:
        layers: what the caller calls them.
        wired: the wired hook point behind each.
        site: the site they are read at.
        where: the positions.
        pool: `mean`, `last` or None.
        room: positions that one pass may read.
    """

    layers: Sequence[int]
    wired: Sequence[int]
    site: str
    where: Where
    pool: str | None
    room: int
    values: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def requests(
        self, contents: Sequence[PromptContent], plans: Sequence[ReadyPlan | SteerlabError], planner: Planner
    ) -> list[Request]:
        """A request per prompt.

        Raises:
            InputError: if `where` selects nothing in a prompt.
        """
        found = []
        for index, content in enumerate(contents):
            ready = raise_error(plans[index])
            row = Row(content.token_ids, len(content.token_ids), len(content.token_ids), content)
            found.append(
                Request(
                    prompt_index=index,
                    row_index=index,
                    first_ids=content.token_ids,
                    arguments=ARGUMENTS,
                    assigned=ready.assigned,
                    compiled=ready.compiled,
                    groups=planner.positions(ready.compiled, row),
                    read=self._wanted(row),
                )
            )
        return found

    def _wanted(self, row: Row) -> Runs:
        runs = positions_of(self.where, row)
        if not runs:
            raise InputError(
                f"{self.where} selects no token in prompt {row.content.index} of {row.length} tokens; nothing can be "
                "read there."
            )
        return runs

    def waves(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Requests that may run together, so that no pass reads more than there is room for."""
        wave: list[Request] = []
        for request in [part for whole in requests for part in self._parts(whole)]:
            if wave and sum(size(r.read) for r in wave) + size(request.read) > self.room:
                yield wave
                wave = []
            wave.append(request)
        if wave:
            yield wave

    def _parts(self, request: Request) -> list[Request]:
        """A request that reads more than one pass may is run several times."""
        positions = positions_in(request.read)
        if len(positions) <= self.room:
            return [request]
        chunks = [positions[start : start + self.room] for start in range(0, len(positions), self.room)]
        return [replace(request, read=_runs(chunk, request.n_tokens)) for chunk in chunks]

    def run(self, requests: Sequence[Request], run: RunRows, dtype: str, what: str = "capture") -> Activations:
        """Runs the requests in waves; what was read, with receipts.

        Args:
            requests: the requests.
            run: runs them.
            dtype: of the model.
            what: names the call.

        Raises:
            NonFiniteError: if an activation is not finite.
        """
        last: dict[int, Outcome] = {}
        for wave in self.waves(requests):
            outcomes = run(wave, what)
            require_finite(wave, outcomes, dtype)
            for request, outcome in zip(wave, outcomes, strict=True):
                self.take(request, outcome)
                last[request.row_index] = outcome
        outcomes, lengths = [last[r.row_index] for r in requests], [r.n_tokens for r in requests]
        receipts, inherited = receipts_of(requests, outcomes, lengths)
        return replace(self.activations(requests), receipts=receipts, inherited=inherited)

    def take(self, request: Request, outcome: Outcome) -> None:
        """Keeps what one request read.

        Raises:
            ReceiptError: if a position is missing.
        """
        if outcome.read != positions_in(request.read):
            raise ReceiptError(
                f"Prompt {request.prompt_index}: {size(request.read)} positions were to be read, and "
                f"{len(outcome.read)} were."
            )
        for layer, wired in zip(self.layers, self.wired, strict=True):
            values = torch.from_numpy(outcome.streams[wired].copy())
            self.values.setdefault((request.prompt_index, layer), []).append(values)

    def activations(self, requests: Sequence[Request]) -> Activations:
        """What was read, in order of the prompts."""
        join = torch.cat if self.pool is None else torch.stack
        return Activations(
            site=self.site,
            layers=tuple(self.layers),
            values=tuple(join([self._of(r.prompt_index, layer) for r in requests]) for layer in self.layers),
            positions=tuple(tuple(positions_in(request.read)) for request in requests),
            pool=self.pool,
            prompt_token_ids=tuple(request.token_ids for request in requests),
            completion_token_ids=tuple(() for _ in requests),
        )

    def _of(self, prompt: int, layer: int) -> Tensor:
        values = torch.cat(self.values[prompt, layer])
        if self.pool is None:
            return values
        return values.mean(dim=0) if self.pool == "mean" else values[-1]


def _runs(positions: Sequence[int], length: int) -> Runs:
    chosen = set(positions)
    return clip(runs_of([p in chosen for p in range(length)]), 0, length)
