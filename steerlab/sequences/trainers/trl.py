"""A callback for TRL's GRPO trainer that logs what its policy's entropy and importance ratios really are.

The trainer offers callbacks neither its batch nor its policy, so the callback is given the trainer, and reads the
batch where the trainer buffers it (TRL 1.16).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from steerlab.core.errors import InputError
from steerlab.sequences.config import check_count
from steerlab.sequences.processor import SequenceProcessor
from steerlab.sequences.trainers._responses import as_sequences, as_table

NEAR = (0.9, 1.1)
"""Ratios within these bounds count as near 1."""


class PolicyEntropyCallback(TrainerCallback):
    """Scores the trainer's buffered responses before an optimiser's step, and adds means to the trainer's own log.

    Under `policy/` are, over tokens that were drawn: `rb_entropy`, the entropy of the sampling distribution;
    `naive_entropy`, −log q of the tokens, which has the same mean over draws and more noise; `support_size`, how many
    tokens could be drawn; `outside_nucleus`, the share of tokens that this scoring says could not. And of the ratios to
    the log-probs that the responses were drawn with (the sampler's where the trainer has them, else ours when they were
    new): `ratio_outside`, the share outside [0.9, 1.1]; `ratio_ess`, the effective sample size of whole responses over
    how many they are. With several processes a mean is the mean over them.

    Args:
        trainer: the GRPO trainer; the callback still has to be added to it.
        every: optimiser steps from one scoring to the next.
        tf_batch_size: rows at a time; None takes all of a micro batch.

    Raises:
        InputError: for a trainer that samples under top_k, min_p or a repetition penalty, or has no such buffer.

    Examples:
        >>> trainer.add_callback(PolicyEntropyCallback(trainer))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, trainer: Any, *, every: int = 1, tf_batch_size: int | None = None) -> None:
        if not hasattr(trainer, "_buffered_inputs") or not hasattr(trainer, "_metrics"):
            raise InputError(f"{type(trainer).__name__} buffers no responses as TRL's GRPOTrainer (1.16) does.")
        self.trainer, self.every = trainer, check_count(every, "every")
        self.tf_batch_size = tf_batch_size
        generation = {"temperature": trainer.temperature, "top_p": _top_p(trainer)}
        precision = {"func_override": {"cast_params": False}}  # as the trainer sees them
        self.processor = SequenceProcessor(trainer.model, config={"generation": generation, "precision": precision})
        self._batches: Any = None
        self._drawn: list[np.ndarray] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Scores and logs; parameters are still those of the last step."""
        batches = self.trainer._buffered_inputs
        if batches is None or state.global_step % self.every:
            return
        scored = [self._score(batch) for batch in batches]
        if batches is not self._batches:
            self._batches = batches
            self._drawn = [_given_log_qs(batch, one) for batch, one in zip(batches, scored, strict=True)]
        for name, value in _summary(scored, self._drawn).items():
            local = torch.tensor([value], device=self.trainer.accelerator.device)
            mean = self.trainer.accelerator.gather(local).nanmean()
            self.trainer._metrics["train"][f"policy/{name}"].append(float(mean))

    def _score(self, batch: dict[str, Any]) -> "_Scored":
        mask = batch["completion_mask"].bool()
        sequences = as_sequences(batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], mask)
        size = len(mask) if self.tf_batch_size is None else self.tf_batch_size
        found, diagnostics = self.processor.teacher_force_logprobs_with_diagnostics(sequences, tf_batch_size=size)
        drawn = mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask
        sizes = [[torch.as_tensor(one.steps.support_size) for one in row] for row in diagnostics.diagnostics]
        entropies = [[torch.as_tensor(values) for values in row] for row in found.rb_entropies]
        tables = [as_table(nested, mask.cpu()) for nested in (found.token_logqs, entropies, sizes)]
        log_qs, rb_entropies, supports = (table.double().numpy() for table in tables)
        return _Scored(log_qs, rb_entropies, supports, drawn.cpu().numpy())


@dataclass(frozen=True)
class _Scored:
    """A micro batch, [rows, response]; `drawn` says which tokens the policy drew."""

    log_qs: np.ndarray
    entropies: np.ndarray
    support: np.ndarray
    drawn: np.ndarray


def _top_p(trainer: Any) -> float:
    """The trainer's top_p.

    Raises:
        InputError: for another cut.
    """
    others = {"top_k": (0, None), "min_p": (0, None), "repetition_penalty": (1, None)}
    for name, off in others.items():
        value = getattr(trainer, name, None)
        if value not in off:
            raise InputError(f"The trainer samples with {name}={value}; only temperature and top_p can be scored here.")
    return 1.0 if trainer.top_p is None else trainer.top_p


def _given_log_qs(batch: dict[str, Any], scored: _Scored) -> np.ndarray:
    """Log q with which the responses were drawn: the sampler's, where it reported them, else ours."""
    reported = batch.get("sampling_per_token_logps")
    return scored.log_qs if reported is None else reported.double().cpu().numpy()


def _summary(scored: list[_Scored], drawn: list[np.ndarray]) -> dict[str, float]:
    """Means over tokens; see the callback."""
    chosen = [one.drawn for one in scored]
    log_q = np.concatenate([one.log_qs[kept] for one, kept in zip(scored, chosen, strict=True)])
    before = np.concatenate([values[kept] for values, kept in zip(drawn, chosen, strict=True)])
    inside = np.isfinite(log_q)
    moved = np.where(inside, log_q - before, -np.inf)
    ratios = np.exp(moved[~np.isnan(moved)])  # a sampler may not have reported every token
    logs = [
        np.where(one.drawn, one.log_qs - values, 0.0).sum(axis=1) for one, values in zip(scored, drawn, strict=True)
    ]
    return {
        "rb_entropy": _mean([one.entropies[one.drawn] for one in scored]),
        "naive_entropy": float(-log_q[inside].mean()) if inside.any() else float("nan"),
        "support_size": _mean([one.support[one.drawn] for one in scored]),
        "outside_nucleus": float(1 - inside.mean()) if len(inside) else float("nan"),
        "ratio_outside": float(((ratios < NEAR[0]) | (ratios > NEAR[1])).mean()) if len(ratios) else float("nan"),
        "ratio_ess": _effective_share(np.concatenate(logs)),
    }


def _mean(parts: list[np.ndarray]) -> float:
    values = np.concatenate(parts)
    return float(values.mean()) if len(values) else float("nan")


def _effective_share(log_weights: np.ndarray) -> float:
    """(Σw)² / Σw² over the number of weights; NaN where a weight is unknown or all are 0."""
    highest = log_weights.max(initial=-np.inf)
    if not np.isfinite(highest):
        return float("nan")
    weights = np.exp(log_weights - highest)
    return float(weights.sum() ** 2 / np.square(weights).sum() / len(weights))
