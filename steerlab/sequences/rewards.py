"""Rewards: a number for each response, or NaN where nobody knows the right answer."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from steerlab.core.errors import RewardError
from steerlab.sequences.types import BatchedSequences

Reward = Callable[[Any, str, Mapping[str, Any]], float]
"""From (prompt, response, example) to a number. The example is the data set's row; empty without a data set."""

_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?%?")


def tag_reward(prompt: Any, response: str, example: Mapping[str, Any]) -> float:
    """1.0 if the answer inside `<answer>` tags equals the example's `answer`, else 0.0; NaN without such an answer.

    The last pair of tags counts; a closing tag that a stop string took away may be missing. Numbers are compared as
    numbers ("1,200" equals "1200.0"), anything else as text, apart from case and space around it.

    Examples:
        >>> tag_reward("", "so it is <answer> 12 </answer>", {"answer": "12"})
        1.0
        >>> tag_reward("", "twelve", {"answer": "12"}), tag_reward("", "<answer>12</answer>", {})
        (0.0, nan)
    """
    gold = example.get("answer")
    if gold is None or str(gold).strip() == "":
        return math.nan
    found = answer_in(response)
    return float(found is not None and same_answer(found, str(gold)))


def answer_in(response: str) -> str | None:
    """What stands inside the last `<answer>` tags; None without an opening tag."""
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def same_answer(a: str, b: str) -> bool:
    """Whether two answers are the same number, or the same text apart from case and space."""
    x, y = as_number(a), as_number(b)
    if x is not None and y is not None:
        return math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-9)
    return a.strip().casefold() == b.strip().casefold()


def as_number(text: str) -> float | None:
    """The number a text consists of, thousands separators, `$` and `%` left out; None for anything else."""
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped) is None:
        return None
    return float(stripped.replace(",", "").replace("$", "").replace("%", ""))


def rewards_of(sequences: BatchedSequences, reward: Reward | None) -> list[list[float]]:
    """Every response's reward, `[B][G]`; NaN without a reward.

    Raises:
        RewardError: if the reward fails, or gives something that is not a number; names the row.
    """
    found = []
    for b, row in enumerate(sequences.responses_text):
        prompt = None if sequences.prompts is None else sequences.prompts[b]
        example = {} if sequences.examples is None else sequences.examples[b]
        found.append([_one(reward, prompt, text, example, (b, g)) for g, text in enumerate(row)])
    return found


def _one(reward: Reward | None, prompt: Any, text: str, example: Mapping[str, Any], place: tuple[int, int]) -> float:
    if reward is None:
        return math.nan
    try:
        return float(reward(prompt, text, example))
    except Exception as error:
        raise RewardError(
            f"The reward failed on prompt {place[0]}, sample {place[1]} (response {text!r:.80}): "
            f"{type(error).__name__}: {error}"
        ) from error
