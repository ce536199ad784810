"""Sweeps: the exact scores of every item, for every arm and dose, and the metric made of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.numbers import as_list, as_number, check_integer, shown
from steerlab.core.targets import Targets
from steerlab.core.text import encode_prompt
from steerlab.experiment.controls import Arm
from steerlab.experiment.metrics import Metric, value_of
from steerlab.steering.plan import Plan

TOKENS_PER_CALL = {"vllm": 200_000}
HASH_COLUMNS = ["plan_hash", "vector_hash", "data_hash", "model_hash", "engine_hash"]
ROW_COLUMNS = [
    "family",
    "draw",
    "dose",
    "item",
    "group",
    "value",
    "positive_log_prob",
    "negative_log_prob",
    "edited_tokens",
    *HASH_COLUMNS,
]


def check_doses(doses: Sequence[float], *, at_least: int = 2) -> list[float]:
    """Sorted doses, if there are enough of them and all are finite and distinct.

    Raises:
        InputError: otherwise.
    """
    few = {1: "one", 2: "two"}[at_least]
    wrong = f"doses are {few} or more distinct finite numbers, got {shown(doses)}."
    values = [as_number(dose) for dose in as_list(doses) or ()]
    numbers = [value for value in values if value is not None]
    if len(values) < at_least or len(set(numbers)) < len(values):
        raise InputError(wrong)
    return sorted(numbers)


def check_targets(targets: Any) -> None:
    """Nothing, if these are targets.

    Raises:
        InputError: otherwise.
    """
    if not isinstance(targets, Targets):
        raise InputError(f"targets is a Targets, e.g. sl.Targets.from_jsonl(…), got {targets!r:.60}.")


def score_plans(engine: Engine, plans: Sequence[Plan], targets: Targets) -> list[pd.DataFrame]:
    """Scores of all targets under each of several plans, in one call of the engine.

    Returns:
        Per plan a row per item and target, positives before negatives: `item`, `target`, `log_prob` (nats),
        `num_tokens`, `boundary`, `edited_tokens` (the receipt's).
    """
    items = [item.targets for item in targets]
    scores = engine.score(
        targets.prompts * len(plans), items * len(plans), plan=[plan for plan in plans for _ in targets]
    )
    edited = [receipt.edited for receipt in scores.receipts]
    per_plan = sum(map(len, items))
    return [
        pd.DataFrame(
            {
                "item": np.repeat(np.arange(len(items)), [len(row) for row in items]),
                "target": np.concatenate([np.arange(len(row)) for row in items]),
                "log_prob": scores.log_prob[start : start + per_plan],
                "num_tokens": scores.num_tokens[start : start + per_plan],
                "boundary": scores.boundary[start : start + per_plan],
                "edited_tokens": edited[start : start + per_plan],
            }
        )
        for start in range(0, per_plan * len(plans), per_plan)
    ]


def row_tokens(engine: Any, rows: Sequence[tuple[Any, Sequence[Any]] | list[Any]]) -> int:
    """Tokens of one pass over rows of (prompt, targets), each target with its prompt; shared prompts run once."""
    total = 0
    for prompt, targets in rows:
        length = len(encode_prompt(engine.tokenizer, prompt, d_vocab=engine.info.d_vocab).token_ids)
        for target in targets:
            own = engine.tokenizer(target, add_special_tokens=False)["input_ids"] if isinstance(target, str) else target
            total += length + len(own)
    return total


def tokens_per_call_of(backend: str, asked: int | None = None) -> int | None:
    """How many tokens of several plans go to an engine at once; None for one plan a call.

    vLLM schedules what it is given together; the lens engine runs one plan at a time whatever it is given.

    Raises:
        InputError: for a budget that is no integer of at least 1.
    """
    if asked is None:
        return TOKENS_PER_CALL.get(backend)
    return check_integer(asked, "tokens_per_call", least=1)


def in_calls(plans: Sequence[Any], tokens_each: int, tokens_per_call: int | None) -> Iterator[list[Any]]:
    """Plans in batches of at most so many tokens, each of at least one plan; None puts each in a call of its own."""
    size = 1 if tokens_per_call is None else max(1, tokens_per_call // max(1, tokens_each))
    for start in range(0, len(plans), size):
        yield list(plans[start : start + size])


def item_rows(
    scores: pd.DataFrame, arm: Arm, dose: float, targets: Targets, metric: Metric, hashes: Mapping[str, str]
) -> pd.DataFrame:
    """One row per item of one arm at one dose.

    Args:
        scores: as `score_plans` gives them.
        arm: the arm.
        dose: what its plan was scaled by.
        targets: the items.
        metric: the metric.
        hashes: `data_hash`, `model_hash` and `engine_hash`, the same in every row.

    Returns:
        Columns `ROW_COLUMNS`: `value` is the metric; the two log-probs are means over an item's positive and negative
        targets, in nats; `edited_tokens` is the receipts' mean per target, 0 at dose 0.

    Raises:
        InputError: if the metric gives something else than a finite number.
    """
    log_probs = scores.log_prob.to_numpy()
    edited = scores.edited_tokens.to_numpy() * (dose != 0)  # at dose 0 operators reach tokens and change nothing
    plan_hash = arm.plan.scaled(dose).hash
    vectors = "+".join(dict.fromkeys(edit.vector.hash for edit in arm.plan))
    same = (plan_hash, vectors, *(hashes[name] for name in HASH_COLUMNS[2:]))
    rows, start = [], 0
    for index, item in enumerate(targets):
        cut, stop = start + len(item.positives), start + len(item.targets)
        positive, negative = log_probs[start:cut], log_probs[cut:stop]
        value = value_of(metric, positive, negative, index)
        means = (float(positive.mean()), float(negative.mean()), float(edited[start:stop].mean()))
        rows.append((arm.family, arm.draw, dose, index, item.group, value, *means, *same))
        start = stop
    return pd.DataFrame(rows, columns=ROW_COLUMNS)
