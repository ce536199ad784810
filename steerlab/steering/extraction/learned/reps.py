"""RePS: a vector whose addition makes a model prefer wanted completions, and whose removal the unwanted ones.

For a prompt x with a wanted completion y⁺ and an unwanted one y⁻, and |y| the tokens of a completion,

    gain = β⁺/|y⁺| · log p(y⁺ | x, h + α·v) − 1/|y⁻| · log p(y⁻ | x, h + α·v)
    drop = β⁻/|y⁻| · log p(y⁻ | x, h − ReLU(h·v)/‖v‖² · v) − 1/|y⁺| · log p(y⁺ | x, h − ReLU(h·v)/‖v‖² · v)
    L(v) = −log σ(gain) − log σ(drop),

where α is drawn from a list of factors for each prompt and step, and β⁺ = max(log p(y⁻ | x) − log p(y⁺ | x), 1) and
β⁻ = max(log p(y⁺ | x) − log p(y⁻ | x), 1) weigh up what the unsteered model finds unlikely. The second edit is
`sl.clamp(v, hi=0.0)`: it takes out what the stream already has of the direction.

Source:
    Wu et al. 2025, Improved Representation Steering for Language Models (arXiv:2505.20809), section 3, for a steering
    vector of rank 1. The published code divides by the tokens of prompt and completion together, draws a factor of its
    own for y⁺ and for y⁻, and learns a bias on the factor; here the formulas of the paper stand, without a bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize, softplus

from steerlab.core._numbers import as_list, as_number, shown
from steerlab.core.errors import DataError, InputError, VectorValueError
from steerlab.steering.extraction.learned.training import Learned, Setting, check_positive


@dataclass(frozen=True)
class RepsSettings:
    """What RePS takes beside `TrainingSettings`.

    Attributes:
        factors: what α is drawn from; 1 is the vector as it is saved.
        start: length of the random vector that training starts from, in median norms of the stream.

    Raises:
        InputError: for a value outside its range.
    """

    factors: Sequence[float] = (0.5, 1.0, 1.5)
    start: float = 0.05

    def __post_init__(self) -> None:
        listed = [as_number(factor) for factor in as_list(self.factors, ordered=True) or ()]
        numbers = tuple(factor for factor in listed if factor is not None and factor > 0)
        if not numbers or len(numbers) < len(listed):
            raise InputError(f"reps takes a list of finite numbers > 0 as factors, got {shown(self.factors)}.")
        object.__setattr__(self, "factors", numbers)
        check_positive(self, "start")


class Reps:
    """The vector and its loss.

    Args:
        setting: scores and sizes.
        settings: factors and start.

    Raises:
        DataError: if an item has no unwanted completion.
    """

    def __init__(self, setting: Setting, settings: RepsSettings) -> None:
        missing = [index for index, rows in enumerate(setting.unwanted) if not rows]
        if missing:
            raise DataError(
                f"reps needs a wanted and an unwanted completion (label -1) of every prompt; item {missing[0]} has no "
                "unwanted one, such as what the model answers by itself."
            )
        self._setting, self._settings = setting, settings
        self._rng = np.random.default_rng([setting.seed, 1])
        generator = torch.Generator().manual_seed(setting.seed)
        start = normalize(torch.randn(setting.width, generator=generator), dim=0)
        self.vector = (settings.start * setting.median_norm * start).requires_grad_()
        self._reference: dict[int, float] = {}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The vector, whose steps are shares of the median norm of the stream."""
        return [{"params": [self.vector], "lr": self._setting.rate(self._setting.median_norm)}]

    def loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """The loss with factors drawn anew for each item."""
        return self._loss(items, self._rng.choice(self._settings.factors, size=len(items)).tolist())

    def held_out_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """The loss with the factors in turn."""
        factors = self._settings.factors
        return self._loss(items, [factors[index % len(factors)] for index in range(len(items))])

    def unsteered_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """The loss without an edit."""
        rows, pairs, _ = self._pairs(items, [0.0] * len(items))
        plain = self._plain(rows)
        return reps_loss(plain, plain, plain, self._setting.lengths(rows), pairs)

    def _loss(self, items: Sequence[int], factors: Sequence[float]) -> Tensor:
        rows, pairs, by_row = self._pairs(items, factors)
        scale = torch.tensor(by_row)

        def steer(stream: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
            return (scale[places].to(stream.device)[:, None] * self.vector.to(stream.device))[:, None, :]

        def null(stream: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
            vector = self.vector.to(stream.device)
            return -(torch.relu(stream @ vector) / (vector @ vector))[..., None] * vector

        scores = self._setting.scores
        steered, nulled = scores.changed_log_probs(rows, steer), scores.changed_log_probs(rows, null)
        return reps_loss(steered, nulled, self._plain(rows), self._setting.lengths(rows), pairs)

    def _plain(self, rows: Sequence[int]) -> Float[Tensor, " rows"]:
        """Log p of completions without an edit, measured once."""
        fresh = [row for row in rows if row not in self._reference]
        if fresh:
            with torch.no_grad():
                found = self._setting.scores.changed_log_probs(fresh, lambda stream, *_: torch.zeros(stream.shape[-1]))
            self._reference.update(zip(fresh, found.tolist(), strict=True))
        return torch.tensor([self._reference[row] for row in rows])

    def _pairs(
        self, items: Sequence[int], factors: Sequence[float]
    ) -> tuple[list[int], list[tuple[int, int, float]], list[float]]:
        """Rows of these items; every wanted with every unwanted one, by place, with a weight; a factor per row."""
        rows: list[int] = []
        pairs: list[tuple[int, int, float]] = []
        by_row: list[float] = []
        for item, factor in zip(items, factors, strict=True):
            wanted, unwanted = self._setting.wanted[item], self._setting.unwanted[item]
            start, middle = len(rows), len(rows) + len(wanted)
            rows += [*wanted, *unwanted]
            by_row += [factor] * (len(wanted) + len(unwanted))
            weight = 1 / (len(wanted) * len(unwanted))
            pairs += [(p, n, weight) for p in range(start, middle) for n in range(middle, len(rows))]
        return rows, pairs, by_row

    def after_step(self) -> None:
        """Nothing: the vector may have any length."""

    @torch.no_grad()
    def learned(self, items: Sequence[int]) -> Learned:
        """The vector as it is: factor 1.

        Raises:
            VectorValueError: if it is zero.
        """
        if not bool(self.vector.any()):
            raise VectorValueError("reps arrived at a vector of zeros, which has no direction; use another seed.")
        return Learned(self.vector.detach().clone(), None, {"factors": list(self._settings.factors)})


def reps_loss(
    steered: Float[Tensor, " rows"],
    nulled: Float[Tensor, " rows"],
    reference: Float[Tensor, " rows"],
    lengths: Float[Tensor, " rows"],
    pairs: Sequence[tuple[int, int, float]],
) -> Float[Tensor, ""]:
    """The loss of completions of some prompts.

    Args:
        steered: log p of each completion with α·v added, in nats.
        nulled: with the stream's part along v taken out.
        reference: without an edit.
        lengths: tokens of each completion.
        pairs: (wanted, unwanted, weight), by place among these rows; the weights of one prompt add up to 1.

    Examples:
        Completions of equal length and log p leave the choice open twice, 2 log 2:

        >>> same = torch.tensor([-3.0, -3.0])
        >>> round(reps_loss(same, same, same, torch.ones(2), [(0, 1, 1.0)]).item(), 4)
        1.3863
    """
    positive, negative = [p for p, _, _ in pairs], [n for _, n, _ in pairs]
    weights = torch.tensor([weight for _, _, weight in pairs])
    margin = reference[negative] - reference[positive]
    per_token = 1 / lengths
    gain = margin.clamp_min(1.0) * per_token[positive] * steered[positive] - per_token[negative] * steered[negative]
    drop = (-margin).clamp_min(1.0) * per_token[negative] * nulled[negative] - per_token[positive] * nulled[positive]
    return ((softplus(-gain) + softplus(-drop)) * weights).sum() / weights.sum()
