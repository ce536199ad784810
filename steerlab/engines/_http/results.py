"""Results as they travel, and read back: everything that a call of an engine returns, receipts included, exactly.

Integers and texts are JSON. What is measured is arrays, of all rows one after the other, since it may be NaN
or infinite; JSON holds neither.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

from steerlab.core.receipts import EditReceipt, Inherited, Receipt
from steerlab.core.results import Activations, Completion, Generations, Measured, Score, Scores
from steerlab.core.token_sets import TokenSets
from steerlab.engines._http.failures import failure_json, failure_of
from steerlab.engines._http.frames import Arrays, Frame

Result: TypeAlias = Generations | Scores | Measured | Activations


def result_frame(result: Result) -> Frame:
    if isinstance(result, Generations):
        content, arrays = _generations(result)
    elif isinstance(result, Scores):
        content, arrays = _scores(result)
    elif isinstance(result, Measured):
        content, arrays = _measured(result)
    else:
        content, arrays = _activations(result)
    return Frame({**content, **_accounts(result)}, arrays)


# --- generations --------------------------------------------------------------------------------------------------


def _generations(result: Generations) -> tuple[dict[str, Any], Arrays]:
    rows = result.completions
    content = {
        "engine": result.engine,
        "prompt_token_ids": [list(ids) for ids in result.prompt_token_ids],
        "completions": [[c.text, list(c.token_ids), c.finish_reason, c.prompt_index, c.sample_index] for c in rows],
        "errors": {str(index): failure_json(error) for index, error in result.errors.items()},
    }
    arrays = {name: _joined([getattr(c, name) for c in rows]) for name in ("token_log_probs", "token_log_qs")}
    if rows and all(c.supports is not None for c in rows):
        packed = [np.frombuffer(c.supports.to_bytes(), dtype=np.uint8) for c in rows if c.supports is not None]
        arrays["supports"] = np.concatenate(packed)
        arrays["support_bytes"] = np.array([len(one) for one in packed], dtype=np.int64)
    return content, arrays


def generations_in(frame: Frame) -> Generations:
    """The completions that a message holds."""
    content, arrays = frame.content, frame.arrays
    lengths = [len(row[1]) for row in content["completions"]]
    log_probs, log_qs = (list(_cut(arrays[name], lengths)) for name in ("token_log_probs", "token_log_qs"))
    supports: list[TokenSets | None] = [None] * len(lengths)
    if "supports" in arrays:
        parts = _cut(arrays["supports"], arrays["support_bytes"].tolist())
        supports = [TokenSets.from_bytes(part.tobytes()) for part in parts]
    rows = [
        Completion(text, ids, reason, prompt, sample, log_probs[k].tolist(), log_qs[k].tolist(), supports[k])
        for k, (text, ids, reason, prompt, sample) in enumerate(content["completions"])
    ]
    return Generations(
        tuple(rows),
        tuple(map(tuple, content["prompt_token_ids"])),
        content["engine"],
        _receipts(content),
        {int(index): failure_of(error) for index, error in content["errors"].items()},
        _inherited(content),
    )


# --- scores -------------------------------------------------------------------------------------------------------


def _scores(result: Scores) -> tuple[dict[str, Any], Arrays]:
    rows = [
        [s.prompt_index, s.target_index, list(s.token_ids), s.boundary, s.variant, s.num_bytes] for s in result.rows
    ]
    return {"scores": rows, "dtype": result.dtype}, {"token_log_probs": _joined([s.token_log_probs for s in result])}


def scores_in(frame: Frame) -> Scores:
    """The scores that a message holds."""
    content = frame.content
    values = _cut(frame.arrays["token_log_probs"], [len(row[2]) for row in content["scores"]])
    rows = [
        Score(prompt, target, tuple(ids), tuple(own.tolist()), boundary, variant, num_bytes)
        for (prompt, target, ids, boundary, variant, num_bytes), own in zip(content["scores"], values, strict=True)
    ]
    return Scores(tuple(rows), content["dtype"], _receipts(content), _inherited(content))


# --- measures -----------------------------------------------------------------------------------------------------


def _measured(result: Measured) -> tuple[dict[str, Any], Arrays]:
    names = list(result[0]) if result else []
    lengths = [len(row[names[0]]) for row in result] if names else []
    arrays = {f"measure.{k}": np.concatenate([row[name] for row in result]) for k, name in enumerate(names)}
    return {"measures": names, "tokens": lengths}, arrays


def measured_in(frame: Frame) -> Measured:
    """The measures that a message holds."""
    names, lengths = frame.content["measures"], frame.content["tokens"]
    parts = [list(_cut(frame.arrays[f"measure.{k}"], lengths)) for k in range(len(names))]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)]
    return Measured(rows, _receipts(frame.content), _inherited(frame.content))


# --- activations --------------------------------------------------------------------------------------------------


def _activations(result: Activations) -> tuple[dict[str, Any], Arrays]:
    content = {
        "site": result.site,
        "layers": list(result.layers),
        "pool": result.pool,
        **{
            name: [list(row) for row in getattr(result, name)]
            for name in ("positions", "prompt_token_ids", "completion_token_ids")
        },
    }
    values = zip(result.layers, result.values, strict=True)
    return content, {f"layer.{layer}": one.numpy() for layer, one in values}


def activations_in(frame: Frame) -> Activations:
    """The activations that a message holds."""
    content = frame.content
    return Activations(
        content["site"],
        tuple(content["layers"]),
        tuple(torch.from_numpy(frame.arrays[f"layer.{layer}"].copy()) for layer in content["layers"]),
        tuple(map(tuple, content["positions"])),
        content["pool"],
        tuple(map(tuple, content["prompt_token_ids"])),
        tuple(map(tuple, content["completion_token_ids"])),
        _receipts(content),
        _inherited(content),
    )


# --- receipts -----------------------------------------------------------------------------------------------------


def _accounts(result: Result) -> dict[str, Any]:
    return {
        "receipts": [[r.prompt_index, r.row_index, r.plan_hash, [_edit(e) for e in r.edits]] for r in result.receipts],
        "inherited": [[one.row_index, [list(row) for row in one.positions]] for one in result.inherited],
    }


def _edit(edit: EditReceipt) -> dict[str, Any]:
    change = edit.mean_relative_change
    return {**asdict(edit), "mean_relative_change": change if math.isfinite(change) else None}


def _receipts(content: Mapping[str, Any]) -> tuple[Receipt, ...]:
    return tuple(
        Receipt(prompt, row, plan, tuple(_edit_in(edit) for edit in edits))
        for prompt, row, plan, edits in content["receipts"]
    )


def _edit_in(stored: dict[str, Any]) -> EditReceipt:
    change = stored["mean_relative_change"]
    return EditReceipt(**{**stored, "mean_relative_change": math.nan if change is None else change})


def _inherited(content: Mapping[str, Any]) -> tuple[Inherited, ...]:
    return tuple(Inherited(row, tuple(map(tuple, positions))) for row, positions in content["inherited"])


# --- rows one after the other -------------------------------------------------------------------------------------


def _joined(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row], dtype=np.float64)


def _cut(values: np.ndarray, lengths: Sequence[int]) -> Iterator[np.ndarray]:
    return (values[start:stop].copy() for start, stop in pairwise(accumulate(lengths, initial=0)))
