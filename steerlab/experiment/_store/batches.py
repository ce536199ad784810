"""How many plans or rows go to an engine in one call."""

from collections.abc import Iterator, Sequence
from typing import Any

from steerlab.core._numbers import check_integer
from steerlab.core._text import encode_prompt
from steerlab.core.engine import Engine

TOKENS_PER_CALL = {"vllm": 200_000}
PLANS_PER_CALL = 8
"""Where no number of tokens is set: plans of a call share what none of them edits, and a killed run loses a call."""


def row_tokens(engine: Engine, rows: Sequence[tuple[Any, Sequence[Any]] | list[Any]]) -> int:
    """Tokens of one pass over rows of (prompt, targets), each target with its prompt; shared prompts run once."""
    total = 0
    for prompt, targets in rows:
        length = len(encode_prompt(engine.tokenizer, prompt, d_vocab=engine.info.d_vocab).token_ids)
        for target in targets:
            own = engine.tokenizer(target, add_special_tokens=False)["input_ids"] if isinstance(target, str) else target
            total += length + len(own)
    return total


def tokens_per_call_of(backend: str, asked: int | None = None) -> int | None:
    """How many tokens of several plans go to an engine at once; None for `PLANS_PER_CALL` plans.

    vLLM schedules what it is given together. Other engines run one plan after the other.

    Raises:
        InputError: for a budget that is no integer of at least 1.
    """
    if asked is None:
        return TOKENS_PER_CALL.get(backend)
    return check_integer(asked, "tokens_per_call", least=1)


def batch_plans(plans: Sequence[Any], tokens_each: int, tokens_per_call: int | None) -> Iterator[list[Any]]:
    """Plans in batches of at most so many tokens, each of at least one plan; None makes batches of `PLANS_PER_CALL`."""
    size = PLANS_PER_CALL if tokens_per_call is None else max(1, tokens_per_call // max(1, tokens_each))
    for start in range(0, len(plans), size):
        yield list(plans[start : start + size])
