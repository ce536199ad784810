"""The loop that learns an edit: Adam on batches of items, watched on items that it never fits."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._numbers import as_integer, as_number, plain, shown
from steerlab.core._progress import progress
from steerlab.core._warning import warn
from steerlab.core.errors import InputError, VectorValueError
from steerlab.steering.low_rank import LowRank
from steerlab.steering.positions.where import WhereLike, as_where
from steerlab.steering.positions.where import default as default_where


@runtime_checkable
class ChangedScores(Protocol):
    """Log-probabilities of targets as a differentiable function of a change of the stream at one hook point."""

    tokens_run: int

    @property
    def lengths(self) -> list[int]:
        """How many tokens each target has."""
        ...

    def changed_log_probs(self, rows: Sequence[int], change: Any) -> Float[Tensor, " rows"]:
        """Summed log p of these targets, in nats, where `change(stream, chosen, places)` is added to the stream."""
        ...


@dataclass(frozen=True)
class TrainingSettings:
    """How an edit is learned, whatever the method.

    Attributes:
        steps: steps of Adam at most; the learning rate falls linearly to zero over them.
        learning_rate: how far a step goes at most, about, in units that suit the parameter: Adam's rate per coordinate
            is learning_rate/√d_model times the length that the parameter has.
        batch_size: items per step; each runs with its completions, in one graph.
        validation: share of the items that is held out, groups undivided; they choose the step that is kept.
        evaluate_every: steps from one held-out loss to the next.
        patience: how many held-out losses in a row may fail to improve before training stops.
        where: positions where the edit acts; the last prompt token and everything after it by default.

    Raises:
        InputError: for a value outside its range.
    """

    steps: int = 200
    learning_rate: float = 0.1
    batch_size: int = 8
    validation: float = 0.2
    evaluate_every: int = 10
    patience: int = 5
    where: WhereLike = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "patience"):
            check_count(self, name)
        check_positive(self, "learning_rate")
        share = as_number(self.validation)
        if share is None or not 0 < share < 1:
            raise InputError(
                f"validation is the share of items held out, between 0 and 1; got {shown(self.validation)}."
            )
        object.__setattr__(self, "validation", share)
        object.__setattr__(self, "where", as_where(self.where, default_where()))


def check_count(settings: Any, name: str) -> None:
    """Makes a setting an integer of at least 1, or raises InputError."""
    count = as_integer(getattr(settings, name))
    if count is None or count < 1:
        raise InputError(f"Training takes an integer ≥ 1 as {name}, got {shown(getattr(settings, name))}.")
    object.__setattr__(settings, name, count)


def check_positive(settings: Any, name: str, *, least: float | None = None) -> None:
    """Makes a setting a finite number > 0, or ≥ `least`, or raises InputError."""
    number = as_number(getattr(settings, name))
    if number is None or (number <= 0 if least is None else number < least):
        wanted = "> 0" if least is None else f"≥ {least:g}"
        raise InputError(f"Training takes a finite number {wanted} as {name}, got {shown(getattr(settings, name))}.")
    object.__setattr__(settings, name, number)


def settings_of(kinds: Sequence[type], options: Mapping[str, Any], method: str) -> list[Any]:
    """One settings object of each kind, from keyword arguments.

    Raises:
        InputError: for a name that none of them has.
    """
    names = {kind: [f.name for f in fields(kind)] for kind in kinds}
    known = [name for kind in kinds for name in names[kind]]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InputError(f"{method} does not know {', '.join(unknown)}; it takes {', '.join(known)}.")
    return [kind(**{n: plain(v) for n, v in options.items() if n in names[kind]}) for kind in kinds]


@dataclass(frozen=True)
class Setting:
    """What a method is made with.

    Attributes:
        scores: log-probabilities of the completions, differentiable in the edit.
        wanted: per item, the rows of its wanted completions.
        unwanted: per item, the rows of its unwanted completions.
        width: d_model.
        median_norm: median norm of the stream at the hook point.
        learning_rate: as in `TrainingSettings`.
        seed: of everything random.
    """

    scores: ChangedScores
    wanted: tuple[tuple[int, ...], ...]
    unwanted: tuple[tuple[int, ...], ...]
    width: int
    median_norm: float
    learning_rate: float
    seed: int

    def rate(self, length: float) -> float:
        """Adam's rate per coordinate for a parameter that has about this length."""
        return self.learning_rate * length / math.sqrt(self.width)

    def lengths(self, rows: Sequence[int]) -> Float[Tensor, " rows"]:
        """Tokens of these completions."""
        every = self.scores.lengths
        return torch.tensor([float(every[row]) for row in rows])

    def token_loss(self, items: Sequence[int], change: Any) -> Float[Tensor, ""]:
        """Negative log p of the wanted completions of items, in nats per token, under a change of the stream."""
        rows = [row for item in items for row in self.wanted[item]]
        return -self.scores.changed_log_probs(rows, change).sum() / self.lengths(rows).sum()


@dataclass(frozen=True)
class Learned:
    """What a method learned.

    Attributes:
        values: the vector, float32 [d_model].
        low_rank: a low-rank edit, if that is what was learned.
        figures: numbers that belong to the vector, for its card.
    """

    values: Tensor
    low_rank: LowRank | None
    figures: Mapping[str, Any]


@runtime_checkable
class Method(Protocol):
    """An edit with parameters, and the loss that it is learned by."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters with their learning rates, as `torch.optim.Adam` takes them."""
        ...

    def loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """What a step lowers, on these items."""
        ...

    def held_out_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """What the choice of a step goes by, on items that are not fitted."""
        ...

    def unsteered_loss(self, items: Sequence[int]) -> Float[Tensor, ""]:
        """The held-out loss without any edit."""
        ...

    def after_step(self) -> None:
        """Brings the parameters back to where they belong."""
        ...

    def learned(self, items: Sequence[int]) -> Learned:
        """The edit that the parameters are, with figures measured on these items."""
        ...


@dataclass(frozen=True)
class Training:
    """How a training went.

    Attributes:
        curve: rows of (step, mean loss of the steps since the row before, held-out loss); step 0 is the start.
        best_step: the step whose parameters were kept.
        held_out_loss: its held-out loss.
        unsteered_loss: the held-out loss without an edit.
        steps: steps taken.
        stopped_early: whether the held-out loss had stopped improving.
        seconds: of the whole training.
    """

    curve: tuple[tuple[int, float, float], ...]
    best_step: int
    held_out_loss: float
    unsteered_loss: float
    steps: int
    stopped_early: bool
    seconds: float


def train(
    method: Method, fitted: Sequence[int], held: Sequence[int], settings: TrainingSettings, *, seed: int, name: str
) -> Training:
    """Learns a method's parameters, and leaves those of the step with the lowest held-out loss in place.

    Args:
        method: the edit and its loss.
        fitted: items that are fitted.
        held: items that are held out.
        settings: steps, batches and when to stop.
        seed: of the batches.
        name: of the method, for messages and the progress bar.

    Raises:
        VectorValueError: if a loss is not finite.
    """
    start, groups = time.monotonic(), method.parameter_groups()
    parameters = [parameter for group in groups for parameter in group["params"]]
    adam = torch.optim.Adam(groups)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: max(0.0, 1 - step / settings.steps))
    batches = item_batches(fitted, settings.batch_size, np.random.default_rng(seed))
    with torch.no_grad():
        unsteered = _finite(method.unsteered_loss(held), name, 0)
        curve = [(0, math.nan, _finite(method.held_out_loss(held), name, 0))]
    kept, since, stopped, steps = _copies(parameters), [], False, 0
    with progress(settings.steps, name, "step") as bar:
        for steps in range(1, settings.steps + 1):
            loss = method.loss(next(batches))
            since.append(_finite(loss.detach(), name, steps))
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            adam.step()
            decay.step()
            method.after_step()
            bar.update()
            if steps % settings.evaluate_every and steps < settings.steps:
                continue
            with torch.no_grad():
                found = _finite(method.held_out_loss(held), name, steps)
            if found < min(row[2] for row in curve):
                kept = _copies(parameters)
            curve.append((steps, float(np.mean(since)), found))
            since = []
            stopped = steps < settings.steps and _stale(curve) >= settings.patience
            if stopped:
                break
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    best = min(curve, key=lambda row: row[2])
    if best[2] >= unsteered:
        warn(
            f"{name}: the held-out loss is {best[2]:.4f} at best and {unsteered:.4f} without an edit, so the edit does "
            "not carry over to items that were not fitted. Give more items, more steps or another learning_rate."
        )
    seconds = time.monotonic() - start
    return Training(tuple(curve), best[0], best[2], unsteered, steps, stopped, seconds)


def item_batches(items: Sequence[int], size: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Batches without end, in rounds: every item comes once in each round, and a round's last batch may be smaller."""
    while True:
        order = rng.permutation(np.asarray(items)).tolist()
        yield from (order[start : start + size] for start in range(0, len(order), size))


def _stale(curve: Sequence[tuple[int, float, float]]) -> int:
    """How many held-out losses there are since the lowest."""
    losses = [row[2] for row in curve]
    return len(losses) - 1 - losses.index(min(losses))


def _copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _finite(loss: Tensor, name: str, step: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise VectorValueError(f"{name}: the loss of step {step} is {value}; give a smaller learning_rate.")
    return value
