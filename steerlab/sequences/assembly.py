"""Putting the numbers of scored batches back in the caller's order."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steerlab.core.receipts import Receipt
from steerlab.sequences.config import ProcessorConfig
from steerlab.sequences.diagnostics import COLUMNS, DiagnosticsResults, pack_of
from steerlab.sequences.forcing import ForcedRow
from steerlab.sequences.head import HeadResult
from steerlab.sequences.types import FEATURE_NAMES, BatchedSequences, LogprobResults, as_array, surprisal

_MAIN = ("log_probs", "log_qs", "entropies")


class Assembly:
    """Collects batches of results, and gives them out as the caller's types.

    Args:
        sequences: what was scored.
        config: the configuration.
        with_grad: whether results keep graph and device.

    Attributes:
        receipts: what the plan edited in each scored row.
    """

    def __init__(self, sequences: BatchedSequences, config: ProcessorConfig, with_grad: bool) -> None:
        self.sequences, self.config, self.with_grad = sequences, config, with_grad
        self.receipts: tuple[Receipt, ...] = ()
        self._rows: dict[tuple[int, int], dict[str, Tensor]] = {}

    def take(self, rows: Sequence[ForcedRow], result: HeadResult) -> None:
        """Takes a batch's numbers: of all rows' tokens, one row after the other."""
        sizes = [len(row.response_ids) for row in rows]
        named = {name: getattr(result, name) for name in _MAIN} | result.shape
        if not self.with_grad:
            named = {name: values.detach().cpu() for name, values in named.items()}
        parts = {name: values.split(sizes) for name, values in named.items()}
        for k, row in enumerate(rows):
            self._rows[row.prompt_index, row.sample_index] = {name: part[k] for name, part in parts.items()}

    def logprobs(self, compute_rb: bool, with_features: bool) -> LogprobResults:
        """The results of scoring; rewards are NaN."""
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
            rewards=[[math.nan] * len(row) for row in log_probs],
            rb_entropies_torch=torch_entropies,
            baseline_feats_torch=self._features() if with_features else None,
            token_logqs=log_qs,
            sequence_logqs=_sums(log_qs),
            policy=self.config.generation.policy,
            receipts=self.receipts,
        )

    def diagnostics(self, early_steps: int) -> DiagnosticsResults:
        """The diagnostics of every response; of an empty one, without steps."""
        return DiagnosticsResults(
            [[pack_of(self._columns(b, g), early_steps=early_steps) for g in row] for b, row in self._places()],
            early_steps,
        )

    def surrogate(self, b: int, credit: Tensor) -> Tensor:
        """Σ_k H_k + Σ_k log q_k·credit_k of response (b, 0), with its graph."""
        found = self._row(b, 0)
        log_qs = found["log_qs"]
        return found["entropies"].sum() + (log_qs * credit.to(log_qs)).sum()

    def log_q(self, b: int) -> Tensor:
        """Σ_k log q_k of response (b, 0), with its graph."""
        return self._row(b, 0)["log_qs"].sum()

    def _columns(self, b: int, g: int) -> dict[str, Tensor]:
        found = self._row(b, g)
        own = {
            "rb_entropy": found["entropies"],
            "surprisal": surprisal(found["log_probs"]),
            "policy_surprisal": surprisal(found["log_qs"]),
        }
        return {name: own.get(name, found.get(name, found["log_probs"][:0])) for name in COLUMNS}

    def _features(self) -> list[list[Tensor]]:
        return [[self._features_of(b, g) for g in row] for b, row in self._places()]

    def _features_of(self, b: int, g: int) -> Tensor:
        columns = self._columns(b, g)
        like = columns["rb_entropy"]
        steps = torch.arange(len(like), device=like.device, dtype=like.dtype)
        columns["progress"] = steps / max(1, self.config.generation.max_new_tokens)
        return torch.stack([columns[name].detach() for name in FEATURE_NAMES], dim=-1)

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
