"""Learns an edit at one hook point by a named method, and says how it went."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from steerlab.core._hook_points import HookPoint
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.steering.extraction.bipo import DifferentiableEngine
from steerlab.steering.extraction.learned._examples import Examples
from steerlab.steering.extraction.learned.loreft import Loreft, LoreftSettings
from steerlab.steering.extraction.learned.reft_r1 import ReftR1, ReftR1Settings
from steerlab.steering.extraction.learned.reps import Reps, RepsSettings
from steerlab.steering.extraction.learned.training import (
    ChangedScores,
    Learned,
    Method,
    Setting,
    Training,
    TrainingSettings,
    settings_of,
    train,
)
from steerlab.steering.positions.where import as_where
from steerlab.steering.positions.where import default as default_where

LEARNED: Final[Mapping[str, tuple[Callable[[Setting, Any], Method], type]]] = {
    "reft_r1": (ReftR1, ReftR1Settings),
    "reps": (Reps, RepsSettings),
    "loreft": (Loreft, LoreftSettings),
}
"""The methods by name: what is learned, and the settings of its own."""


@dataclass(frozen=True)
class LearnedEdit:
    """An edit, and how it was learned.

    Attributes:
        learned: vector and low-rank edit.
        training: losses and cost.
        report: all that the vector's card tells of it, for JSON.
    """

    learned: Learned
    training: Training
    report: dict[str, Any]


def learn_edit(
    engine: Engine,
    examples: Examples,
    point: HookPoint,
    method: str,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    chat: bool = False,
) -> LearnedEdit:
    """Learns an edit at one hook point.

    Args:
        engine: an engine that can differentiate: `steerlab.load`.
        examples: prompts with completions.
        point: where the edit acts.
        method: `reft_r1`, `reps` or `loreft`.
        options: settings of training and of the method.
        seed: of the start, the held-out items and the batches.
        chat: take strings as user turns of a chat.

    Raises:
        InputError: if the engine cannot differentiate, or for an unknown option.
        DataError: for data that the method cannot use.
        VectorValueError: if nothing was learned, or a loss is not finite.
    """
    make, kind = LEARNED[method]
    settings, own = settings_of([TrainingSettings, kind], options, method)
    fitted, held = examples.split(settings.validation, seed)
    setting = _setting(engine, examples, point, settings, seed, chat, unwanted=method == "reps")
    edit = make(setting, own)
    training = train(edit, fitted, held, settings, seed=seed, name=method)
    learned = edit.learned(range(len(examples.items)))
    return LearnedEdit(learned, training, _report(learned, training, settings, own, setting, len(held), seed))


def _setting(
    engine: Engine,
    examples: Examples,
    point: HookPoint,
    settings: TrainingSettings,
    seed: int,
    chat: bool,
    *,
    unwanted: bool,
) -> Setting:
    if not isinstance(engine, DifferentiableEngine):
        raise InputError(f"Learning needs gradients, which {type(engine).__name__} does not give; use sl.load(…).")
    items = examples.items
    targets = [[*item.positives, *(item.negatives if unwanted else ())] for item in items]
    where = as_where(settings.where, default_where())
    scores = engine.added_vector_scores([item.prompt for item in items], targets, point, where, chat=chat)
    if not isinstance(scores, ChangedScores):
        raise InputError(f"{type(engine).__name__} differentiates added vectors only; use sl.load(…).")
    wanted_rows, unwanted_rows, start = [], [], 0
    for item, listed in zip(items, targets, strict=True):
        rows, middle = range(start, start + len(listed)), len(item.positives)
        wanted_rows.append(tuple(rows[:middle]))
        unwanted_rows.append(tuple(rows[middle:]))
        start += len(listed)
    median = engine.median_norm(point.layer, point.site)
    return Setting(
        scores,
        tuple(wanted_rows),
        tuple(unwanted_rows),
        engine.info.d_model,
        median,
        settings.learning_rate,
        seed,
    )


def _report(
    learned: Learned, training: Training, settings: TrainingSettings, own: Any, setting: Setting, n_held: int, seed: int
) -> dict[str, Any]:
    where = as_where(settings.where, default_where())
    given = {f.name: getattr(settings, f.name) for f in fields(settings)} | {"where": where.to_json()}
    given |= {f.name: getattr(own, f.name) for f in fields(own)}
    return {
        **learned.figures,
        "held_out_loss": training.held_out_loss,
        "unsteered_loss": training.unsteered_loss,
        "held_out_items": n_held,
        "best_step": training.best_step,
        "stopped_early": training.stopped_early,
        "steps": training.steps,
        "tokens": setting.scores.tokens_run,
        "seconds": round(training.seconds, 3),
        "seed": seed,
        "settings": {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()},
        "curve": [
            {"step": step, "loss": None if step == 0 else loss, "held_out_loss": held}
            for step, loss, held in training.curve
        ],
    }
