"""ReFT-r1: one direction that both detects a concept and steers towards it.

With a unit direction w and a bias b, a token of stream h has the activation a = ReLU(w·h + b). In training the edit
adds, at every chosen position of a text, the mean of the text's k largest activations along w,

    Δ = (1/k · Σ_{t in top k} a_t) · w,

and the loss is the negative log-likelihood of the wanted completions per token, plus λ times the mean activation
outside the top k, so that the detector is silent where it is not needed. What is saved is w times the largest
activation found in the wanted texts: a coefficient of 1 adds as much as the concept had at its strongest.

Source:
    Wu et al. 2025, AxBench: Steering LLMs? Even Simple Baselines Outperform Sparse Autoencoders (arXiv:2501.17148),
    section 4, ReFT-r1. The published code ramps λ up over the steps and leaves b out; here λ is constant, and b is
    learned as the paper writes it. The random start is given the sign in which it is active.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from steerlab.core.errors import VectorValueError
from steerlab.steering.extraction.learned.training import Learned, Setting, check_count, check_positive


@dataclass(frozen=True)
class ReftR1Settings:
    """What ReFT-r1 takes beside `TrainingSettings`.

    Attributes:
        top_k: k, how many of a text's activations set the strength.
        sparsity: λ, in nats per median norm of the stream.

    Raises:
        InputError: for a value outside its range.
    """

    top_k: int = 1
    sparsity: float = 0.1

    def __post_init__(self) -> None:
        check_count(self, "top_k")
        check_positive(self, "sparsity", least=0.0)


class ReftR1:
    """The direction, its bias, and their loss.

    Args:
        setting: scores and sizes.
        settings: k and λ.
    """

    def __init__(self, setting: Setting, settings: ReftR1Settings) -> None:
        self._setting, self._settings = setting, settings
        generator = torch.Generator().manual_seed(setting.seed)
        start = normalize(torch.randn(setting.width, generator=generator), dim=0)
        self.bias = torch.zeros((), requires_grad=True)
        self.direction = start if self._mean_projection(start) >= 0 else -start
        self.direction.requires_grad_()

    @torch.no_grad()
    def _mean_projection(self, direction: Float[Tensor, " d_model"]) -> float:
        """Mean of w·h over the chosen positions of the wanted texts; where it is negative, ReLU passes no gradient."""
        total = 0.0

        def change(stream: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
            nonlocal total
            total += float((stream @ direction.to(stream.device))[chosen].double().sum())
            return torch.zeros(stream.shape[-1])

        self._setting.scores.changed_log_probs([row for rows in self._setting.wanted for row in rows], change)
        return total

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The direction, of length 1, and the bias, of about a projection of the stream."""
        rate = self._setting.rate
        return [
            {"params": [self.direction], "lr": rate(1.0)},
            {"params": [self.bias], "lr": rate(self._setting.median_norm)},
        ]

    def loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """Negative log p per token, plus the sparsity of activations."""
        others: list[Tensor] = []

        def change(stream: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
            added, rest = self.edit(stream, chosen)
            others.append(rest.cpu())
            return added

        loss = self._setting.token_loss(items, change)
        return loss + self._settings.sparsity / self._setting.median_norm * torch.cat(others).mean()

    def held_out_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """Negative log p per token."""
        return self._setting.token_loss(items, lambda stream, chosen, places: self.edit(stream, chosen)[0])

    def unsteered_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """Negative log p per token without an edit."""
        return self._setting.token_loss(items, lambda stream, chosen, places: torch.zeros(stream.shape[-1]))

    def activations(
        self, stream: Float[Tensor, "batch pos d_model"], chosen: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos"]:
        """ReLU(w·h + b) at the chosen positions, 0 elsewhere."""
        direction = normalize(self.direction, dim=0).to(stream.device)
        return torch.relu(stream @ direction + self.bias.to(stream.device)).masked_fill(~chosen, 0.0)

    def edit(
        self, stream: Float[Tensor, "batch pos d_model"], chosen: Bool[Tensor, "batch pos"]
    ) -> tuple[Float[Tensor, "batch 1 d_model"], Float[Tensor, " batch"]]:
        """What is added to each text, and the mean of its activations outside the top k."""
        active = self.activations(stream, chosen)
        count = chosen.sum(dim=1)
        top = active.topk(min(self._settings.top_k, active.shape[1]), dim=1).values.sum(dim=1)
        n_top = count.clamp(1, self._settings.top_k)
        rest = (active.sum(dim=1) - top) / (count - n_top).clamp_min(1)
        direction = normalize(self.direction, dim=0).to(stream.device)
        return (top / n_top)[:, None, None] * direction, rest

    @torch.no_grad()
    def after_step(self) -> None:
        """Gives the direction length 1."""
        self.direction.copy_(normalize(self.direction, dim=0))

    @torch.no_grad()
    def learned(self, items: Sequence[int]) -> Learned:
        """The direction, as long as its largest activation in the wanted texts.

        Raises:
            VectorValueError: if it is active nowhere.
        """
        largest = 0.0

        def change(stream: Tensor, chosen: Bool[Tensor, "batch pos"], places: Int[Tensor, " batch"]) -> Tensor:
            nonlocal largest
            largest = max(largest, float(self.activations(stream, chosen).max()))
            return torch.zeros(stream.shape[-1])

        self._setting.scores.changed_log_probs([row for item in items for row in self._setting.wanted[item]], change)
        if not largest > 0:
            raise VectorValueError(
                "reft_r1 found a direction that is active in none of the wanted texts, so it has no strength. Give "
                "more steps, a smaller sparsity or another seed."
            )
        values = normalize(self.direction.detach(), dim=0) * largest
        return Learned(values, None, {"max_activation": largest, "bias": float(self.bias)})
