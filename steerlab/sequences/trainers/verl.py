"""verl's log-prob and entropy step, by the processor's head: no logits of a whole batch, and a nucleus if there is one.

verl itself is not imported. The step takes what verl's actor passes to its own, and gives what that gives.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from steerlab.core.errors import InputError
from steerlab.sequences.processor import SequenceProcessor
from steerlab.sequences.trainers._responses import as_sequences, as_table

_KEYS = ("input_ids", "attention_mask", "responses")


class VerlStep:
    """Log-probs and entropies of a micro batch, as `DataParallelPPOActor._forward_micro_batch` gives them.

    At top_p 1 the numbers are verl's own. With top_p below 1 they are log q and the entropy of the distribution that
    the tokens were drawn from. Gradients are kept where the caller has them on, as in the actor's update.

    Args:
        model: the actor's module: a plain Hugging Face causal language model, one in DistributedDataParallel, or one
            sharded by `fully_shard` (verl's `fsdp2` strategy).
        top_p: of the rollouts.

    Examples:
        >>> actor._forward_micro_batch = VerlStep(actor.actor_module)  # doctest: +SKIP
    """

    def __init__(self, model: Any, top_p: float = 1.0) -> None:
        precision = {"func_override": {"cast_params": False}}  # as they are, in both kinds of call
        config = {"generation": {"top_p": top_p, "rb_requires_grad": True}, "precision": precision}
        self.processor = SequenceProcessor(model, config=config)

    def __call__(
        self, micro_batch: Mapping[str, Tensor], temperature: float, calculate_entropy: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """Entropies and log-probs.

        Args:
            micro_batch: `input_ids` and `attention_mask` [rows, prompt + response], `responses` [rows, response].
            temperature: the logits are divided by it.
            calculate_entropy: also give entropies.

        Returns:
            Entropies (None unless asked for) and log-probs, [rows, response], nats; 0 where nothing was generated.

        Raises:
            InputError: for a batch without one of those entries, with images, or a row without response.
        """
        ids, mask, responses = self._given(micro_batch)
        length = responses.shape[-1]
        kept = mask[:, -length:].bool()
        sequences = as_sequences(ids[:, :-length], mask[:, :-length], responses, kept)
        with_grad = torch.is_grad_enabled()
        self._set_temperature(float(temperature))
        found = self.processor.teacher_force_logprobs(
            sequences, with_grad=with_grad, tf_batch_size=len(ids), compute_rb=calculate_entropy
        )
        log_probs = as_table(found.token_logqs, kept).to(ids.device)
        if not calculate_entropy:
            return None, log_probs
        entropies = found.rb_entropies_torch or [[torch.from_numpy(v) for v in row] for row in found.rb_entropies]
        return as_table(entropies, kept).to(ids.device), log_probs

    def _given(self, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        missing = [key for key in _KEYS if key not in micro_batch.keys()]
        if missing:
            raise InputError(f"The micro batch has no {missing[0]!r}; it holds {sorted(micro_batch.keys())}.")
        if "multi_modal_inputs" in micro_batch.keys():
            raise InputError("The micro batch has images; this step scores text only. Leave verl's own step in place.")
        ids, mask, responses = (micro_batch[key] for key in _KEYS)
        return ids, mask, responses

    def _set_temperature(self, temperature: float) -> None:
        config = self.processor.config
        if config.generation.temperature != temperature:
            self.processor.config = replace(config, generation=replace(config.generation, temperature=temperature))
