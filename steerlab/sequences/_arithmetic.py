"""Arithmetic word problems made by seed, with their answers: prompts that need no download."""

from collections.abc import Callable
from typing import Any

import numpy as np

_NAMES = ("Mira", "Jonas", "Aylin", "Tomasz", "Nadia", "Ben", "Chiara", "Emeka", "Sofia", "Kenji", "Lucía", "Omar")
_THINGS = ("pencils", "stamps", "apples", "marbles", "stickers", "shells", "buttons", "postcards")
_SHOPS = ("a bakery", "a market stall", "a bookshop", "a flower shop", "a small garage", "a print shop")

Rng = np.random.Generator


def _gather(rng: Rng) -> tuple[str, int]:
    name, thing = _pick(rng, _NAMES), _pick(rng, _THINGS)
    start, found, given = _between(rng, 12, 60), _between(rng, 5, 40), _between(rng, 2, 11)
    text = (
        f"{name} has {start} {thing}. On the way home {name} finds {found} more and then gives {given} of them to a "
        f"friend. How many {thing} does {name} have now?"
    )
    return text, start + found - given


def _boxes(rng: Rng) -> tuple[str, int]:
    thing = _pick(rng, _THINGS)
    boxes, each, loose = _between(rng, 3, 14), _between(rng, 4, 25), _between(rng, 1, 9)
    text = f"A shelf holds {boxes} boxes with {each} {thing} each, and {loose} loose {thing}. How many {thing} is that?"
    return text, boxes * each + loose


def _share(rng: Rng) -> tuple[str, int]:
    name, thing = _pick(rng, _NAMES), _pick(rng, _THINGS)
    people, each, kept = _between(rng, 3, 9), _between(rng, 3, 15), _between(rng, 1, 8)
    text = (
        f"{name} keeps {kept} of {people * each + kept} {thing} and shares the others equally among {people} children. "
        f"How many {thing} does each child get?"
    )
    return text, each


def _takings(rng: Rng) -> tuple[str, int]:
    shop = _pick(rng, _SHOPS)
    price, sold, days, rent = _between(rng, 3, 12), _between(rng, 10, 30), _between(rng, 3, 6), _between(rng, 20, 80)
    text = (
        f"In {shop} an item costs {price} euros. {sold} are sold every day for {days} days, and the rent for that time "
        f"is {rent} euros. How many euros are left after the rent?"
    )
    return text, price * sold * days - rent


def _journey(rng: Rng) -> tuple[str, int]:
    name = _pick(rng, _NAMES)
    speed, hours, more = 5 * _between(rng, 3, 18), _between(rng, 2, 6), _between(rng, 5, 45)
    text = (
        f"{name} rides a bus at {speed} kilometres an hour for {hours} hours and then walks another {more} kilometres "
        "over two days. How many kilometres is that in all?"
    )
    return text, speed * hours + more


def _ages(rng: Rng) -> tuple[str, int]:
    first, second = (str(name) for name in rng.choice(_NAMES, size=2, replace=False))
    age, times, years = _between(rng, 4, 12), _between(rng, 2, 5), _between(rng, 2, 9)
    text = (
        f"{first} is {age} years old, and {second} is {times} times as old. How old will {second} be in {years} years?"
    )
    return text, age * times + years


_TEMPLATES: tuple[Callable[[Rng], tuple[str, int]], ...] = (_gather, _boxes, _share, _takings, _journey, _ages)
_SPLITS = {"train": (0, 4096), "validation": (1, 512), "test": (2, 512)}


def arithmetic_problems(split: str = "train") -> list[dict[str, Any]]:
    """Word problems with whole-number answers, the same list every time.

    Args:
        split: `train` (4096 problems), `validation` or `test` (512 each); drawn from different seeds, and no problem of
            one is in another.

    Returns:
        Rows with `question` and `answer`, both text.

    Raises:
        KeyError: for another split.
    """
    taken: set[str] = set()
    for name, (seed, size) in _SPLITS.items():
        rows = _fresh(np.random.default_rng((7, seed)), size, taken)
        if name == split:
            return rows
    raise KeyError(split)


def _fresh(rng: Rng, size: int, taken: set[str]) -> list[dict[str, Any]]:
    """This many problems that were not there before."""
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        text, answer = _TEMPLATES[len(rows) % len(_TEMPLATES)](rng)
        if text not in taken:
            taken.add(text)
            rows.append({"question": text, "answer": str(answer)})
    return rows


def plain_prompt(question: str) -> str:
    """The question, and the start of an answer."""
    return f"Question: {question}\nAnswer:"


def r1_prompt(question: str) -> str:
    """The question in an R1-style template: reasoning in `<think>` tags, then the answer in `<answer>` tags.

    Source:
        DeepSeek-AI 2025 (arXiv:2501.12948), table 1, for the form; the words are our own.
    """
    return (
        "Solve the problem. First work it out step by step between <think> and </think>. Then write the final answer, "
        f"and nothing else, between <answer> and </answer>.\n\nProblem: {question}\n\n<think>"
    )


def _pick(rng: Rng, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _between(rng: Rng, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(rng.integers(low, high + 1))
