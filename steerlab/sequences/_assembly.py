"""Putting the numbers of scored batches back in the caller's order."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerlab.core.receipts import Receipt
from steerlab.sequences._forcing import ForcedRow
from steerlab.sequences._head import FLIPPED, HeadResult
from steerlab.sequences.config import ProcessorConfig
from steerlab.sequences.diagnostics import COLUMNS, DiagnosticsResults, pack_of
from steerlab.sequences.types import FEATURE_NAMES, BatchedSequences, LogprobResults, Support, as_array, surprisal

_MAIN = ("log_probs", "log_qs", "entropies")
_BLOCK = "extras"


class Assembly:
    """Collects batches of results, and gives them out as the caller's types.

    Args:
        sequences: what was scored.
        config: the configuration.
        with_grad: whether results keep graph and device.
        support: the sets that q is taken on.

    Attributes:
        receipts: what the plan edited in each scored row.
    """

    def __init__(
        self, sequences: BatchedSequences, config: ProcessorConfig, with_grad: bool, support: Support = "recomputed"
    ) -> None:
        self.sequences, self.config, self.with_grad = sequences, config, with_grad
        self.support: Support = support
        self.receipts: tuple[Receipt, ...] = ()
        self._rows: dict[tuple[int, int], dict[str, Tensor]] = {}
        # the same on the CPU, without graph
        self._host: dict[tuple[int, int], dict[str, Tensor]] = {} if with_grad else self._rows
        self._extras: tuple[str, ...] = ()

    def take(self, rows: Sequence[ForcedRow], result: HeadResult) -> None:
        """Takes a batch's numbers: of all rows' tokens, one row after the other."""
        sizes = [row.n_scored for row in rows]
        named: dict[str, Tensor] = {name: getattr(result, name) for name in _MAIN}
        # one copy to the host for each batch, whose rows are views of it
        columns = torch.stack([values.detach() for values in named.values()]).cpu()
        host: dict[str, Tensor] = dict(zip(named, columns, strict=True))
        if result.shape:  # in one block, as many small tensors would take far more memory than their numbers
            self._extras = tuple(result.shape)
            named[_BLOCK] = torch.stack(list(result.shape.values()), dim=-1)
            host[_BLOCK] = named[_BLOCK].cpu()
        for table, values in ((self._rows, named), (self._host, host)) if self.with_grad else ((self._host, host),):
            parts = {name: column.split(sizes) for name, column in values.items()}
            for k, row in enumerate(rows):
                table[row.prompt_index, row.sample_index] = {name: part[k] for name, part in parts.items()}

    def logprobs(self, compute_rb: bool, with_features: bool) -> LogprobResults:
        """The results of scoring; rewards are those of the sequences, NaN where they have none."""
        log_probs, log_qs, entropies = (self._nested(name) for name in _MAIN)
        on_host = {name: self._nested(name, on_host=True) for name in _MAIN}
        torch_entropies = None
        if self.with_grad and compute_rb:
            keep = self.config.generation.rb_requires_grad
            torch_entropies = entropies if keep else [[values.detach() for values in row] for row in entropies]
        return LogprobResults(
            logprobs=log_probs,
            entropies=[[surprisal(as_array(values)) for values in row] for row in on_host["log_probs"]],
            sequence_logprobs=_sums(on_host["log_probs"]),
            rb_entropies=[
                [as_array(values if compute_rb else values[:0]) for values in row] for row in on_host["entropies"]
            ],
            rewards=self.sequences.rewards or [[math.nan] * len(row) for row in log_probs],
            rb_entropies_torch=torch_entropies,
            baseline_feats_torch=self._features() if with_features else None,
            token_logqs=log_qs,
            sequence_logqs=_sums(on_host["log_qs"]),
            policy=self.config.generation.policy,
            support=self.support,
            support_flips=self._flips(),
            receipts=self.receipts,
        )

    def diagnostics(self, early_steps: int) -> DiagnosticsResults:
        """The diagnostics of every response; of an empty one, without steps."""
        return DiagnosticsResults(
            [[pack_of(self._columns(b, g), early_steps=early_steps) for g in row] for b, row in self._places()],
            early_steps,
        )

    def _flips(self) -> list[list[np.ndarray]] | None:
        if FLIPPED not in self._extras:
            return None
        return [
            [as_array(self._extra(self._row(b, g, on_host=True), FLIPPED)) > 0 for g in row]
            for b, row in self._places()
        ]

    def _extra(self, found: dict[str, Tensor], name: str) -> Tensor:
        """What was measured under a name besides the main quantities; nothing of an empty response."""
        return found[_BLOCK][:, self._extras.index(name)] if _BLOCK in found else found["log_probs"][:0]

    def surrogate(self, b: int, credit: Tensor) -> Tensor:
        """Σ_k H_k + Σ_k log q_k·credit_k of response (b, 0), with its graph."""
        found = self._row(b, 0)
        log_qs = found["log_qs"]
        return found["entropies"].sum() + (log_qs * credit.to(log_qs)).sum()

    def log_q(self, b: int) -> Tensor:
        """Σ_k log q_k of response (b, 0), with its graph."""
        return self._row(b, 0)["log_qs"].sum()

    def _columns(self, b: int, g: int) -> dict[str, Any]:
        """Every diagnostic of a response by name, arrays [T]."""
        found = self._row(b, g, on_host=True)
        own = {
            "rb_entropy": as_array(found["entropies"]),
            "surprisal": surprisal(as_array(found["log_probs"])),
            "policy_surprisal": surprisal(as_array(found["log_qs"])),
        }
        extras = dict.fromkeys(COLUMNS, own["surprisal"][:0])
        if _BLOCK in found:
            extras |= zip(self._extras, np.ascontiguousarray(as_array(found[_BLOCK]).T), strict=True)
        return extras | own

    def _features(self) -> list[list[Tensor]]:
        return [[self._features_of(b, g) for g in row] for b, row in self._places()]

    def _features_of(self, b: int, g: int) -> Tensor:
        found = self._row(b, g)
        entropies = found["entropies"].detach()
        steps = torch.arange(len(entropies), device=entropies.device, dtype=entropies.dtype)
        own = {"rb_entropy": entropies, "progress": steps / max(1, self.config.generation.max_new_tokens)}
        return torch.stack([own[n] if n in own else self._extra(found, n) for n in FEATURE_NAMES], dim=-1)

    def _nested(self, name: str, *, on_host: bool = False) -> list[list[Any]]:
        return [[self._row(b, g, on_host=on_host)[name] for g in row] for b, row in self._places()]

    def _row(self, b: int, g: int, *, on_host: bool = False) -> dict[str, Tensor]:
        if (b, g) not in self._rows:  # an empty response: nothing was run
            dtype = self.config.precision.measure_dtype or torch.float32
            return dict.fromkeys(_MAIN, torch.zeros(0, dtype=dtype))
        return (self._host if on_host else self._rows)[b, g]

    def _places(self) -> list[tuple[int, range]]:
        return [(b, range(self.sequences.n_samples)) for b in range(self.sequences.n_prompts)]


def _sums(nested: list[list[Tensor]]) -> list[list[float]]:
    return [[float(values.double().sum()) for values in row] for row in nested]
