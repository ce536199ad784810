import math
from pathlib import Path

import pandas as pd
import pytest

from steerlab.core.errors import DataError, InputError, PromptError, RewardError
from steerlab.experiment.measurements.texts import judged, neutral_texts, text_statistics, with_repetition


def completions() -> pd.DataFrame:
    rows = [
        (0.0, [1, 2, 3, 4, 5, 9], "eos"),  # without the EOS: two 4-grams, none repeated
        (0.0, [1, 2, 3], "length"),  # too short for a 4-gram
        (1.0, [1, 1, 1, 1, 1, 1], "length"),  # three 4-grams, all alike: two repeated
        (1.0, [1, 2, 1, 2, 9], "eos"),  # one 4-gram
    ]
    frame = pd.DataFrame(rows, columns=["dose", "token_ids", "finish_reason"])
    return frame.assign(num_tokens=frame.token_ids.map(len), prompt="p", text="t")


def test_worked_by_hand():
    table = text_statistics(completions()).set_index("dose")
    assert table.num_completions.tolist() == [2, 2]
    assert table.repetition.tolist() == [0.0, pytest.approx((2 / 3 + 0) / 2)]
    assert table.repetition_count.tolist() == [1, 2]
    assert table.mean_tokens.tolist() == [4.5, 5.5]
    assert table.finished.tolist() == [0.5, 0.5]
    # dose 0: 1 2 3 4 5 | 1 2 3: 5 of 8; 12 23 34 45 | 12 23: 4 of 6; 123 234 345 | 123: 3 of 4
    assert table.loc[0.0, ["distinct_1", "distinct_2", "distinct_3"]].tolist() == [5 / 8, pytest.approx(4 / 6), 3 / 4]
    # dose 1: 1×6 | 1 2 1 2: 2 of 10; 11×5 | 12 21 12: 3 of 8; 111×4 | 121 212: 3 of 6
    assert table.loc[1.0, ["distinct_1", "distinct_2", "distinct_3"]].tolist() == [0.2, 3 / 8, 0.5]


def test_what_is_missing_is_nan():
    rows = completions().iloc[[1]]
    assert math.isnan(with_repetition(rows).repetition.iloc[0])
    assert math.isnan(text_statistics(rows).repetition.iloc[0])
    empty = pd.DataFrame({"dose": [0.0], "token_ids": [[9]], "finish_reason": ["eos"], "num_tokens": [1]})
    assert math.isnan(text_statistics(empty).distinct_1.iloc[0])
    with pytest.raises(DataError, match="no completions"):
        text_statistics(rows.iloc[:0])
    with pytest.raises(DataError, match="token_ids"):
        text_statistics(rows.drop(columns="token_ids"))


# --- judge --------------------------------------------------------------------------------------------------------

TEXTS = pd.DataFrame({"prompt": ["a", "b"], "text": ["yes", "no no"], "dose": [0.0, 1.0]})


def test_a_number_becomes_a_column():
    assert judged(TEXTS, lambda prompt, text: len(text)).judge.tolist() == [3.0, 5.0]
    assert judged(TEXTS, lambda prompt, text: prompt == "a").judge.tolist() == [1.0, 0.0]
    assert "judge" not in TEXTS.columns


def test_several_numbers_become_several_columns():
    found = judged(TEXTS, lambda prompt, text: {"length": len(text), "words": len(text.split())})
    assert found[["judge_length", "judge_words"]].to_numpy().tolist() == [[3, 1], [5, 2]]


def test_a_failing_judge_names_the_row():
    def fails(prompt, text):
        if prompt == "b":
            raise KeyError("mood")
        return 1.0

    with pytest.raises(RewardError, match=r"row 1 \(prompt 'b', text 'no no'\): KeyError: 'mood'"):
        judged(TEXTS, fails)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "good", [1.0]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(RewardError, match="row 0"):
        judged(TEXTS, lambda prompt, text: value)


def test_nan_may_be_allowed_and_stays_nan():
    found = judged(TEXTS, lambda prompt, text: math.nan if prompt == "a" else 2.0, allow_nan=True)
    assert found.judge.isna().tolist() == [True, False]
    with pytest.raises(RewardError, match="inf"):
        judged(TEXTS, lambda prompt, text: math.inf, allow_nan=True)


def test_names_must_stay_the_same():
    with pytest.raises(RewardError, match="names must not change"):
        judged(TEXTS, lambda prompt, text: {prompt: 1.0})
    with pytest.raises(InputError, match="function"):
        judged(TEXTS, "gpt")


@pytest.mark.parametrize("given", [[], (), Path("neutral.txt")], ids=["a list", "a tuple", "a path"])
def test_what_is_no_neutral_text(given):
    with pytest.raises(PromptError, match=r"[Nn]eutral texts"):
        neutral_texts(given)
