"""A vector learned by gradient: the one whose addition makes a model prefer the positive targets.

With v added at some positions of one layer, and r_v(y) = log p(y | prompt, v) − log p(y | prompt) for a target y, the
loss of a positive target y⁺ and a negative one y⁻ is

    L(v) = ½ Σ_{s = ±1} −log σ(s·β·(r_{s·v}(y⁺) − r_{s·v}(y⁻))),

so that v is pulled to make y⁺ likelier when added and y⁻ when subtracted. It is averaged over all (y⁺, y⁻) of a prompt
and over the prompts of a batch. After every step of Adam v is projected into the ball ‖v‖ ≤ bound. The model's weights
take no gradient and stay as they are.

Source:
    Cao et al. 2024, Personalized Steering of Large Language Models: Versatile Steering Vectors Through Bi-directional
    Preference Optimization (arXiv:2406.00045), the loss of algorithm 1. There the sign is drawn at random; here both
    signs enter every step, which is its expectation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import as_integer, as_number, plain, shown
from steerlab.core._progress import progress
from steerlab.core._text import PromptLike, TargetLike
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, VectorValueError
from steerlab.core.targets import Targets
from steerlab.steering.positions._sets import Where
from steerlab.steering.positions.where import WhereLike, as_where
from steerlab.steering.positions.where import default as default_where


@runtime_checkable
class AddedVectorScores(Protocol):
    """Log-probabilities of targets as a differentiable function of a vector that is added to the stream."""

    def log_probs(self, rows: Sequence[int], vector: Float[Tensor, " d_model"]) -> Float[Tensor, " rows"]:
        """Summed log p of these targets, in nats."""
        ...


@runtime_checkable
class DifferentiableEngine(Protocol):
    """An engine whose log-probabilities carry gradients to a vector that is added to the stream."""

    def added_vector_scores(
        self,
        prompts: Sequence[PromptLike],
        targets: Sequence[Sequence[TargetLike]],
        point: HookPoint,
        where: Where,
        *,
        chat: bool = False,
    ) -> AddedVectorScores:
        """The targets' log-probabilities as a function of the vector added at a hook point."""
        ...


@dataclass(frozen=True)
class LearningSettings:
    """How a vector is learned.

    Attributes:
        max_dose: bound of the norm, in median norms of the stream at the hook point. Give it or `max_norm`.
        max_norm: bound of the norm.
        steps: steps of Adam.
        learning_rate: how far a step goes at most, about, as a share of the bound: Adam's rate per coordinate is
            learning_rate·bound/√d_model.
        batch_size: prompts per step; each runs with all its targets, for both signs, in one graph.
        beta: how sharply a preference is weighed: β in the loss.
        where: positions where the vector is added; the last prompt token and everything after it by default.

    Raises:
        InputError: for a value outside its range, or not exactly one bound.
    """

    max_dose: float | None = None
    max_norm: float | None = None
    steps: int = 100
    learning_rate: float = 0.1
    batch_size: int = 4
    beta: float = 0.1
    where: WhereLike = None

    def __post_init__(self) -> None:
        if (self.max_dose is None) == (self.max_norm is None):
            raise InputError(
                "bipo needs exactly one bound on the vector's norm: max_dose= (in median norms of the stream, e.g. "
                f"0.2) or max_norm=; got max_dose={self.max_dose!r} and max_norm={self.max_norm!r}."
            )
        for name in ("max_dose", "max_norm", "learning_rate", "beta"):
            value = getattr(self, name)
            if value is None and name in ("max_dose", "max_norm"):
                continue
            number = as_number(value)
            if number is None or number <= 0:
                raise InputError(f"bipo takes a finite number > 0 as {name}, got {shown(value)}.")
            object.__setattr__(self, name, number)
        for name in ("steps", "batch_size"):
            count = as_integer(getattr(self, name))
            if count is None or count < 1:
                raise InputError(f"bipo takes an integer ≥ 1 as {name}, got {shown(getattr(self, name))}.")
            object.__setattr__(self, name, count)
        object.__setattr__(self, "where", as_where(self.where, default_where()))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "LearningSettings":
        """Settings from keyword arguments.

        Raises:
            InputError: for a name that is not one of them.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise InputError(f"bipo does not know {', '.join(unknown)}; it takes {', '.join(known)}.")
        return cls(**{name: plain(value) for name, value in options.items()})

    def bound(self, median_norm: float) -> float:
        """The largest norm allowed."""
        return float(self.max_norm if self.max_dose is None else self.max_dose * median_norm)  # pyright: ignore


@dataclass(frozen=True)
class Learned:
    """A learned vector.

    Attributes:
        values: float32, shape [d_model].
        losses: the loss of each step's batch, before the step.
        bound: the largest norm that was allowed.
        notes: how it was learned, for the card.
    """

    values: Tensor
    losses: tuple[float, ...]
    bound: float
    notes: str


def learn(
    engine: Engine, targets: Targets, point: HookPoint, settings: LearningSettings, *, seed: int = 0, chat: bool = False
) -> Learned:
    """Learns the vector to add at one hook point, starting from zero.

    Args:
        engine: an engine that can differentiate: `steerlab.load`.
        targets: items with positive and negative targets.
        point: where the vector is added.
        settings: how it is learned.
        seed: of the batches.
        chat: take strings as user turns of a chat.

    Raises:
        InputError: if the engine cannot differentiate.
        VectorValueError: if the vector does not change any of the targets.
    """
    scores = _scores(engine, targets, point, settings, chat)
    bound = settings.bound(engine.median_norm(point.layer, point.site) if settings.max_dose is not None else math.nan)
    preferences = Preferences.of(targets)
    width = engine.info.d_model
    values = torch.zeros(width, requires_grad=True)
    adam = torch.optim.Adam([values], lr=settings.learning_rate * bound / math.sqrt(width))
    losses: list[float] = []
    reference: dict[int, float] = {}
    batches = _batches(len(targets), settings.batch_size, np.random.default_rng(seed))
    with progress(settings.steps, "bipo", "step") as bar:
        for _ in range(settings.steps):
            loss = _batch_loss(scores, preferences, next(batches), values, reference, settings.beta)
            (values.grad,) = torch.autograd.grad(loss, [values])
            adam.step()
            project(values, bound)
            losses.append(float(loss.detach()))
            bar.update()
    if not values.detach().any():
        raise VectorValueError(
            f"bipo found no gradient at {point.name}: adding there changes none of the targets' log-probabilities. "
            "Check where=, and that positive and negative targets differ."
        )
    return Learned(values.detach(), tuple(losses), bound, _notes(settings, losses, bound, seed))


def preference_loss(
    plus: Float[Tensor, " rows"],
    minus: Float[Tensor, " rows"],
    reference: Float[Tensor, " rows"],
    preferred: "Preferences",
    beta: float,
) -> Float[Tensor, ""]:
    """The bidirectional loss of rows of targets.

    Args:
        plus: log p of each target with v added, in nats.
        minus: with v subtracted.
        reference: without v.
        preferred: which of them are preferred to which, counted within these rows.
        beta: how sharply a preference is weighed: β in the loss.

    Examples:
        Without a vector the loss is log 2:

        >>> zero = torch.zeros(2)
        >>> round(preference_loss(zero, zero, zero, Preferences((0,), (1,), (1.0,)), 0.1).item(), 4)
        0.6931
    """
    positive, negative = list(preferred.positive), list(preferred.negative)
    weights = torch.tensor(preferred.weights, device=plus.device)
    gains = [change[positive] - change[negative] for change in (plus - reference, minus - reference)]
    losses = (softplus(-beta * gains[0]) + softplus(beta * gains[1])) / 2
    return (losses * weights).sum() / weights.sum()


@dataclass(frozen=True)
class Preferences:
    """Which rows of targets are preferred to which: positive[k] to negative[k], with a weight.

    The weights of one prompt's preferences add up to 1.
    """

    positive: tuple[int, ...]
    negative: tuple[int, ...]
    weights: tuple[float, ...]
    items: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, targets: Targets) -> "Preferences":
        """Every positive target of an item over every negative one; rows count all targets in order."""
        found, items, start = [], [], 0
        for item in targets:
            n_positive, n_negative = len(item.positives), len(item.negatives)
            rows = range(start, start + n_positive + n_negative)
            found += [(p, n, 1 / (n_positive * n_negative)) for p in rows[:n_positive] for n in rows[n_positive:]]
            items.append(tuple(rows))
            start += len(rows)
        positive, negative, weights = zip(*found, strict=True)
        return cls(positive, negative, weights, tuple(items))

    def among(self, rows: Sequence[int]) -> "Preferences":
        """Those between these rows, counted within them."""
        place = {row: index for index, row in enumerate(rows)}
        kept = [
            (place[p], place[n], w)
            for p, n, w in zip(self.positive, self.negative, self.weights, strict=True)
            if p in place
        ]
        positive, negative, weights = zip(*kept, strict=True)
        return Preferences(positive, negative, weights)


@torch.no_grad()
def project(values: Tensor, bound: float) -> None:
    """Shortens a vector in place to the norm allowed, if it is longer."""
    norm = torch.linalg.vector_norm(values.double())
    if norm > bound:
        values.mul_((bound / norm).to(values.dtype))


def _batch_loss(
    scores: AddedVectorScores,
    preferences: Preferences,
    items: Sequence[int],
    values: Tensor,
    reference: dict[int, float],
    beta: float,
) -> Tensor:
    """The loss of a batch; log-probabilities without the vector are stored in `reference` for later batches."""
    rows = [row for item in items for row in preferences.items[item]]
    fresh = [row for row in rows if row not in reference]
    if fresh:
        with torch.no_grad():
            reference.update(zip(fresh, scores.log_probs(fresh, torch.zeros_like(values)).tolist(), strict=True))
    plus, minus = scores.log_probs(rows, values), scores.log_probs(rows, -values)
    known = torch.tensor([reference[row] for row in rows])
    return preference_loss(plus, minus, known, preferences.among(rows), beta)


def _scores(
    engine: Engine, targets: Targets, point: HookPoint, settings: LearningSettings, chat: bool
) -> AddedVectorScores:
    if not isinstance(engine, DifferentiableEngine):
        raise InputError(f"bipo needs gradients, which {type(engine).__name__} does not give; use sl.load(…).")
    where = as_where(settings.where, default_where())
    return engine.added_vector_scores(targets.prompts, [item.targets for item in targets], point, where, chat=chat)


def _batches(n_items: int, size: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Batches of items without end; every item comes once in each round."""
    waiting: list[int] = []
    while True:
        batch: list[int] = []
        while len(batch) < min(size, n_items):
            waiting = waiting or rng.permutation(n_items).tolist()
            fresh = next((item for item in waiting if item not in batch), None)
            if fresh is None:
                break
            waiting.remove(fresh)
            batch.append(fresh)
        yield batch


def _notes(settings: LearningSettings, losses: Sequence[float], bound: float, seed: int) -> str:
    where = as_where(settings.where, default_where())
    return (
        f"added at {where}; norm at most {bound:.6g}; {settings.steps} steps of {settings.batch_size} prompts, "
        f"learning rate {settings.learning_rate:g}, beta {settings.beta:g}, seed {seed}; "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    )
