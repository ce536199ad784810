"""LoReFT: a low-rank edit that rewrites what the stream holds in a small subspace.

The edit is h → h + Rᵀ(W h + b − R h), where the r rows of R are orthonormal, and the loss is the negative
log-likelihood of the wanted completions per token. R is kept orthonormal by a QR decomposition of the matrix that is
learned in its place. Training starts at W = R and b = 0, where the edit changes nothing.

Source:
    Wu et al. 2024, ReFT: Representation Finetuning for Language Models (arXiv:2404.03592), equation 2. The published
    code starts W at random, keeps R orthonormal by torch's parametrisation, and edits the first and last prompt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core.errors import InputError, VectorValueError
from steerlab.steering.extraction.learned.training import Learned, Setting, check_count
from steerlab.steering.low_rank import LowRank


@dataclass(frozen=True)
class LoreftSettings:
    """What LoReFT takes beside `TrainingSettings`.

    Attributes:
        rank: r, the dimensions of the subspace. vLLM needs `max_directions` of twice as many.

    Raises:
        InputError: for a value outside its range.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        check_count(self, "rank")


class Loreft:
    """R, W and b, and their loss.

    Args:
        setting: scores and sizes.
        settings: the rank.

    Raises:
        InputError: for a rank above the width of the stream.
    """

    def __init__(self, setting: Setting, settings: LoreftSettings) -> None:
        if settings.rank > setting.width:
            raise InputError(f"rank is at most the width of the stream, {setting.width}; got {settings.rank}.")
        self._setting = setting
        generator = torch.Generator().manual_seed(setting.seed)
        self.basis = torch.randn(setting.width, settings.rank, generator=generator).requires_grad_()
        self.weight = self.rotation().detach().clone().requires_grad_()
        self.bias = torch.zeros(settings.rank, requires_grad=True)

    def rotation(self) -> Float[Tensor, "rank d_model"]:
        """R, with orthonormal rows."""
        return torch.linalg.qr(self.basis).Q.T

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The matrices, with entries of about 1/√d_model, and b, of about a projection of the stream."""
        rate = self._setting.rate
        return [
            {"params": [self.weight], "lr": rate(1.0)},
            {"params": [self.basis], "lr": rate(float(self.basis.detach().norm(dim=0).mean()))},
            {"params": [self.bias], "lr": rate(self._setting.median_norm)},
        ]

    def change(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Rᵀ(W h + b − R h)."""
        rotation, device = self.rotation(), stream.device
        read = stream @ (self.weight - rotation).T.to(device) + self.bias.to(device)
        return read @ rotation.to(device)

    def loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """Negative log p per token."""
        return self._setting.token_loss(items, lambda stream, chosen, places: self.change(stream))

    def held_out_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """The same."""
        return self.loss(items)

    def unsteered_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """Negative log p per token without an edit."""
        return self._setting.token_loss(items, lambda stream, chosen, places: torch.zeros(stream.shape[-1]))

    def after_step(self) -> None:
        """Nothing: every value of the parameters is an edit."""

    @torch.no_grad()
    def learned(self, items: Sequence[int]) -> Learned:
        """The edit, and as a vector what it adds on average at the chosen positions of the wanted texts.

        Raises:
            VectorValueError: if it changes nothing.
        """
        edit = LowRank(self.rotation(), self.weight, self.bias)
        total, count = torch.zeros(self._setting.width, dtype=torch.float64), 0

        def record(stream: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
            nonlocal total, count
            added = self.change(stream)
            total = total + added[chosen].double().sum(dim=0).cpu()
            count += int(chosen.sum())
            return added

        self._setting.scores.changed_log_probs([row for item in items for row in self._setting.wanted[item]], record)
        if not count or not bool(total.any()):
            raise VectorValueError(
                "loreft arrived at an edit that changes nothing: no step had a lower held-out loss than the start. "
                "Give more items, more steps or another learning_rate; check where=."
            )
        return Learned((total / count).float(), edit, {"rank": edit.rank})
