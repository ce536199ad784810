"""Small questions for the tiny models, the same for all protocols' tests."""

from typing import Any

import steerlab as sl
from steerlab.protocols import ChoiceItems, TruthQuestions

THINGS = ["cat", "dog", "bird", "fish", "horse", "cow", "hen", "goat", "pig", "duck", "fox", "owl"]


def records(n: int = 12) -> list[dict[str, Any]]:
    """Questions whose matching answer is (A) for every other one."""
    rows = []
    for k, thing in enumerate(THINGS[:n]):
        letters = (" (A)", " (B)") if k % 2 == 0 else (" (B)", " (A)")
        rows.append(
            {
                "question": f"Does the {thing} run?\n\nChoices:\n (A) Yes\n (B) No",
                "answer_matching_behavior": letters[0],
                "answer_not_matching_behavior": letters[1],
            }
        )
    return rows


ITEMS = ChoiceItems.from_records(records())

TRUTH = TruthQuestions.from_records(
    [
        {
            "question": f"Does the {thing} fly?",
            "mc2_targets": {f"The {thing} runs": 1, "No": 1, f"The {thing} was warm": 0, "Yes, at noon": 0, "Seven": 0},
        }
        for thing in THINGS
    ]
)

BEGUN = sl.ContrastPairs.from_lists(
    *(
        [[{"role": "user", "content": f"Name a {one}"}, {"role": "assistant", "content": begun}] for one in THINGS[:4]]
        for begun in ("I was stale", "Sure, seven")
    )
)
"""Chats with a begun refusal and a begun answer."""
