"""verl's log-prob and entropy step, by the processor's head: no logits of a whole batch, and a nucleus if there is one.

verl itself is not imported. The step takes what verl's actor passes to its own, and gives what that gives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from steerlab.core.errors import InputError
from steerlab.sequences.processor import SequenceProcessor
from steerlab.sequences.trainers._responses import as_sequences, as_table
from steerlab.sequences.types import BatchedSequences

_KEYS = ("input_ids", "attention_mask", "responses")


class VerlStep:
    """Log-probs and entropies of a micro batch, as `DataParallelPPOActor._forward_micro_batch` gives them.

    That is verl up to 0.6; for its engines from 0.8 on there is `VerlEngineStep`. At top_p 1 the numbers are verl's
    own. With top_p below 1 they are log q and the entropy of the distribution that the tokens were drawn from.
    Gradients are kept where the caller has them on, as in the actor's update.

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
        found = self.scored(sequences, float(temperature), calculate_entropy)
        tables = {name: as_table(values, kept).to(ids.device) for name, values in found.items()}
        return tables.get("entropy"), tables["log_probs"]

    def scored(self, sequences: BatchedSequences, temperature: float, with_entropy: bool) -> dict[str, Any]:
        """`log_probs` and, if asked for, `entropy` of every token, `[B][G]` tensors; they keep their graph."""
        self._set_temperature(temperature)
        found = self.processor.teacher_force_logprobs(
            sequences,
            with_grad=torch.is_grad_enabled(),
            tf_batch_size=sequences.n_prompts,
            compute_rb=with_entropy,
        )
        if not with_entropy:
            return {"log_probs": found.token_logqs}
        entropies = found.rb_entropies_torch or [[torch.from_numpy(v) for v in row] for row in found.rb_entropies]
        return {"log_probs": found.token_logqs, "entropy": entropies}

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


class VerlEngineStep:
    """`forward_step` of the FSDP engine that verl has from 0.8 on, where a batch is nested rows without padding.

    Log-probs and entropies are at the places where verl has them, and 0 at those of prompts, which its losses leave
    out. At top_p 1 the numbers are verl's own; below, those of the distribution that the tokens were drawn from.

    Args:
        engine: the engine, initialised; its module plain or sharded by `fully_shard` (strategy `fsdp2`).
        top_p: of the rollouts.

    Examples:
        >>> engine.forward_step = VerlEngineStep(engine, top_p=0.95)  # doctest: +SKIP
    """

    def __init__(self, engine: Any, top_p: float = 1.0) -> None:
        self.engine = engine
        self._step = VerlStep(engine.module, top_p)
        dtype = getattr(engine, "_autocast_dtype", torch.bfloat16)
        if dtype != torch.float32:
            autocast = {"autocast": True, "dtype": dtype}
            config = self._step.processor.config
            self._step.processor.config = config.changed(precision={"tf_nograd": autocast, "tf_withgrad": autocast})

    def __call__(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss, and what verl keeps of the pass; arguments and results are those of verl's own `forward_step`.

        Raises:
            InputError: for images, distillation, Σπ², temperatures that differ, or no loss where there must be one.
        """
        _check_wishes(micro_batch)
        if loss_function is None and not forward_only:
            raise InputError("A training step needs a loss_function.")
        micro_batch = micro_batch.to(self._step.processor.parts.device)
        found = self._measured(micro_batch)
        loss, metrics = torch.tensor(1.0, device=found["log_probs"].device), {}
        if loss_function is not None:
            group = self.engine.get_data_parallel_group()
            loss, metrics = loss_function(model_output=found, data=micro_batch, dp_group=group)
        detached = {name: values.detach() for name, values in found.items()}
        return loss, {"model_output": detached, "loss": loss.detach().item(), "metrics": metrics}

    def _measured(self, micro_batch: Any) -> dict[str, Tensor]:
        rows, offsets = micro_batch["input_ids"].unbind(), micro_batch["input_ids"].offsets()
        ends, lens = offsets[1:].tolist(), _response_lens(micro_batch)
        sequences = BatchedSequences.from_ids(
            [row[: len(row) - n].tolist() for row, n in zip(rows, lens, strict=True)],
            [[row[len(row) - n :].tolist()] for row, n in zip(rows, lens, strict=True)],
        )
        with_entropy = bool(_wish(micro_batch, "calculate_entropy"))
        found = self._step.scored(sequences, _one_temperature(micro_batch["temperature"]), with_entropy)
        scored = torch.zeros(ends[-1], dtype=torch.bool)
        for end, n in zip(ends, lens, strict=True):
            scored[end - n - 1 : end - 1] = True  # where each token is predicted
        return {
            name: torch.nested.nested_tensor_from_jagged(_placed(values, scored).to(offsets.device), offsets)
            for name, values in found.items()
        }


def _response_lens(micro_batch: Any) -> list[int]:
    """Tokens of each row's response."""
    responses = micro_batch["responses"]
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    return micro_batch["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()


def _placed(nested: Sequence[Sequence[Tensor]], scored: Tensor) -> Tensor:
    """Numbers of every scored token at its place, 0 elsewhere."""
    values = torch.cat([row[0] for row in nested])
    empty = torch.zeros(scored.shape, dtype=values.dtype, device=values.device)
    return empty.masked_scatter(scored.to(values.device), values)


def _wish(micro_batch: Any, name: str) -> Any:
    return micro_batch[name] if name in micro_batch.keys() else None


def _check_wishes(micro_batch: Any) -> None:
    wishes = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
    refused = [name for name in wishes if _wish(micro_batch, name)]
    if refused or _wish(micro_batch, "multi_modal_inputs") is not None:
        what = refused[0] if refused else "multi_modal_inputs"
        raise InputError(f"The micro batch asks for {what}, which this step cannot do. Leave verl's own in place.")


def _one_temperature(given: Any) -> float:
    values = set(given.tolist()) if isinstance(given, Tensor) and given.dim() else {float(given)}
    if len(values) != 1:
        raise InputError(f"Rows have different temperatures, {sorted(values)}; this step takes one for all.")
    return float(values.pop())
