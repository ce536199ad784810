"""The direction in which a batch would move a policy's parameters: its policy gradient, plain or as Adam scales it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from steerlab.core.errors import InputError
from steerlab.sequences.entropy_gradient import summed_gradients
from steerlab.sequences.types import BatchedSequences
from steerlab.steering._plan_assignment import PlanArgument

if TYPE_CHECKING:
    from steerlab.sequences.processor import SequenceProcessor


def group_advantages(rewards: Sequence[Sequence[float]]) -> np.ndarray:
    """Each reward less the mean of the other responses to its prompt, [B, G]; unbiased as a baseline.

    Raises:
        InputError: for a missing reward, or prompts with one response.

    Source:
        Kool, van Hoof & Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free!".

    Examples:
        >>> group_advantages([[1.0, 0.0, 0.5]])
        array([[ 0.75, -0.75,  0.  ]])
    """
    table = np.asarray(rewards, dtype=float)
    if table.ndim != 2 or table.shape[1] < 2:
        raise InputError(
            f"Advantages compare at least two responses to a prompt; rewards have shape {table.shape}. Draw with G of "
            "2 or more, or pass advantages of your own."
        )
    if not np.isfinite(table).all():
        b, g = np.argwhere(~np.isfinite(table))[0]
        raise InputError(f"The reward of response ({b}, {g}) is {table[b, g]}; every response needs a finite one.")
    others = (table.sum(axis=1, keepdims=True) - table) / (table.shape[1] - 1)
    return table - others


def update_direction(
    processor: "SequenceProcessor",
    sequences: BatchedSequences,
    advantages: Sequence[Sequence[float]] | np.ndarray,
    *,
    names: Sequence[str] | None = None,
    second_moments: Mapping[str, Tensor] | None = None,
    eps: float = 1e-8,
    tf_batch_size: int | None = None,
    plan: PlanArgument = None,
) -> dict[str, Tensor]:
    """The ascent direction of a batch: v = (1/N) Σ A(y)·∇log q(y), or each entry of it over √moment + eps.

    A step θ + η·v with small η raises the expected advantage. `.grad` of the parameters is not touched.

    Args:
        processor: the processor; log q is under its policy.
        sequences: N responses drawn under it.
        advantages: A of each, [B, G], e.g. `group_advantages(logprobs.rewards)`.
        names: parameters to move; None means all that require gradients.
        second_moments: running means of squared gradients by name, e.g. `adam_second_moments(optimizer, model)`; None
            leaves the gradient as it is.
        eps: Adam's ε.
        tf_batch_size: rows per backward pass.
        plan: as in `teacher_force_logprobs`.

    Raises:
        InputError: for advantages of another shape, or a parameter without a second moment.
    """
    table = np.asarray(advantages, dtype=float)
    shape = (sequences.n_prompts, sequences.n_samples)
    if table.shape != shape or not np.isfinite(table).all():
        raise InputError(f"advantages holds one finite number per response, {shape}, got shape {table.shape}.")
    places = [
        (b, g) for b in range(shape[0]) for g in range(shape[1]) if table[b, g] != 0 and sequences.gen_lens[b][g] > 0
    ]

    def term(assembly: Any, k: int, place: tuple[int, int]) -> Tensor:
        return float(table[place]) / table.size * assembly.log_q(k)

    found = summed_gradients(processor, sequences, places, term, names, tf_batch_size, plan)
    return found if second_moments is None else preconditioned(found, second_moments, eps)


def preconditioned(
    direction: Mapping[str, Tensor], second_moments: Mapping[str, Tensor], eps: float = 1e-8
) -> dict[str, Tensor]:
    """Each entry of a direction over √moment + eps, as Adam scales a step.

    Raises:
        InputError: for a parameter without a second moment.

    Source:
        Kingma & Ba 2015 (arXiv:1412.6980), algorithm 1.
    """
    missing = [name for name in direction if name not in second_moments]
    if missing:
        raise InputError(f"There is no second moment of {missing[0]!r}; take one from an optimiser that moves it.")
    return {name: v / (second_moments[name].to(v).sqrt() + eps) for name, v in direction.items()}


def adam_second_moments(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Tensor]:
    """Adam's running means of squared gradients, corrected for their start at 0, by parameter name.

    With `amsgrad` they are the largest means so far, by which that variant scales its steps.

    Args:
        optimizer: Adam or AdamW that has made at least one step.
        model: whose names to use; parameters that the optimiser has not moved are left out.

    Raises:
        InputError: for an optimiser without such moments.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            moments = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))  # the first with amsgrad only
            if id(parameter) in names and moments is not None and "betas" in group and float(state["step"]) > 0:
                correction = 1 - group["betas"][1] ** float(state["step"])
                found[names[id(parameter)]] = moments.detach() / correction
    if not found:
        raise InputError(
            f"{type(optimizer).__name__} holds no second moments of this model's parameters; pass Adam or AdamW after "
            "its first step."
        )
    return found
