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
        self._extras: tuple[str, ...] = ()

    def take(self, rows: Sequence[ForcedRow], result: HeadResult) -> None:
        """Takes a batch's numbers: of all rows' tokens, one row after the other."""
        sizes = [len(row.response_ids) for row in rows]
        named = {name: getattr(result, name) for name in _MAIN}
        if result.shape:  # in one block, as many small tensors would take far more memory than their numbers
            self._extras = tuple(result.shape)
            named[_BLOCK] = torch.stack(list(result.shape.values()), dim=-1)
        if not self.with_grad:
            named = {name: values.detach().cpu() for name, values in named.items()}
        parts = {name: values.split(sizes) for name, values in named.items()}
        for k, row in enumerate(rows):
            self._rows[row.prompt_index, row.sample_index] = {name: part[k] for name, part in parts.items()}

    def logprobs(self, compute_rb: bool, with_features: bool) -> LogprobResults:
        """The results of scoring; rewards are those of the sequences, NaN where they have none."""
        log_probs, log_qs, entropies = (self._nested(name) for name in _MAIN)
        torch_entropies = None
        if self.with_grad and compute_rb:
            keep = self.config.generation.rb_requires_grad
            torch_entropies = entropies if keep else [[values.detach() for values in row] for row in entropies]
        return LogprobResults(
            logprobs=log_probs,
            entropies=[[surprisal(as_array(values)) for values in row] for row in log_probs],
            sequence_logprobs=_sums(log_probs),
            rb_entropies=[
                [as_array(values) if compute_rb else as_array(values[:0]) for values in r] for r in entropies
            ],
            rewards=self.sequences.rewards or [[math.nan] * len(row) for row in log_probs],
            rb_entropies_torch=torch_entropies,
            baseline_feats_torch=self._features() if with_features else None,
            token_logqs=log_qs,
            sequence_logqs=_sums(log_qs),
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
        return [[as_array(self._extra(self._row(b, g), FLIPPED)) > 0 for g in row] for b, row in self._places()]

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
        found = self._row(b, g)
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

    def _nested(self, name: str) -> list[list[Any]]:
        return [[self._row(b, g)[name] for g in row] for b, row in self._places()]

    def _row(self, b: int, g: int) -> dict[str, Tensor]:
        if (b, g) not in self._rows:  # an empty response: nothing was run
            dtype = self.config.precision.measure_dtype or torch.float32
            return dict.fromkeys(_MAIN, torch.zeros(0, dtype=dtype))
        return self._rows[b, g]

    def _places(self) -> list[tuple[int, range]]:
        return [(b, range(self.sequences.n_samples)) for b in range(self.sequences.n_prompts)]


def _sums(nested: list[list[Tensor]]) -> list[list[float]]:
    return [[float(values.detach().double().sum()) for values in row] for row in nested]
