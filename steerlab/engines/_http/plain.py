"""Results as plain JSON, for clients that read nothing else: a row each; NaN and infinity are null."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from steerlab.core.receipts import Receipt
from steerlab.core.results import Activations, Generations, Measured, Scores
from steerlab.engines._http.results import Result


def plain_result(result: Result) -> dict[str, Any]:
    """A result as an answer in JSON; one entry of `rows` per row of the result."""
    if isinstance(result, Generations):
        rows = [
            {
                "prompt_index": c.prompt_index,
                "sample_index": c.sample_index,
                "text": c.text,
                "token_ids": list(c.token_ids),
                "finish_reason": c.finish_reason,
                "token_log_probs": _numbers(c.token_log_probs),
                "token_log_qs": _numbers(c.token_log_qs),
            }
            for c in result
        ]
    elif isinstance(result, Scores):
        rows = [
            {
                "prompt_index": s.prompt_index,
                "target_index": s.target_index,
                "variant": s.variant,
                "log_prob": _numbers(s.log_prob),
                "num_tokens": s.num_tokens,
                "token_ids": list(s.token_ids),
                "token_log_probs": _numbers(s.token_log_probs),
                "boundary": s.boundary,
            }
            for s in result
        ]
    elif isinstance(result, Measured):
        rows = [{name: _numbers(values) for name, values in row.items()} for row in result]
    else:
        rows = _activation_rows(result)
    return {"rows": [{**row, "edits": edits} for row, edits in zip(rows, _edits(result, len(rows)), strict=True)]}


def _activation_rows(result: Activations) -> list[dict[str, Any]]:
    return [
        {
            "prompt_index": index,
            "positions": list(positions),
            "layers": {str(layer): _numbers(result.of(index, layer).numpy()) for layer in result.layers},
        }
        for index, positions in enumerate(result.positions)
    ]


def _edits(result: Result, n_rows: int) -> Sequence[list[dict[str, Any]]]:
    return [_of_receipt(receipt) for receipt in result.receipts] or [[]] * n_rows


def _of_receipt(receipt: Receipt) -> list[dict[str, Any]]:
    return [
        {
            "hook_point": edit.hook_point,
            "operator": edit.operator,
            "vector": edit.vector,
            "edited": edit.edited,
            "expected": edit.expected,
            "mean_relative_change": _numbers(edit.mean_relative_change),
            "condition_passed": edit.condition_passed,
        }
        for edit in receipt.edits
    ]


def _numbers(values: Any) -> Any:
    """Numbers as JSON has them, exactly; what it has not is null."""
    listed = np.asarray(values, dtype=np.float64).tolist()
    return _finite(listed)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if math.isfinite(value) else None
