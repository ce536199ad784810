import math

import pytest

from steerlab.sequences import BatchedSequences, RewardError, tag_reward
from steerlab.sequences.rewards import answer_in, as_number, rewards_of


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("<think>x</think><answer>12</answer>", "12", 1.0),
        ("<answer> 12.0\n</answer>", 12, 1.0),
        ("<answer>1,200</answer>", "1200", 1.0),
        ("<answer>$5</answer>", "5", 1.0),
        ("<answer>12", "12", 1.0),  # a stop string took the closing tag
        ("<answer>3</answer> no: <answer>12</answer>", "12", 1.0),
        ("<answer>12 apples</answer>", "12", 0.0),
        ("<answer>13</answer>", "12", 0.0),
        ("12", "12", 0.0),
        ("<answer></answer>", "12", 0.0),
        ("<answer>Paris</answer>", "paris", 1.0),
        ("<answer>-3</answer>", "-3", 1.0),
        ("<answer>0</answer>", 0, 1.0),
    ],
)
def test_tag_reward(response, answer, reward):
    assert tag_reward("", response, {"answer": answer}) == reward


@pytest.mark.parametrize("example", [{}, {"answer": None}, {"answer": " "}])
def test_no_gold_is_nan(example):
    assert math.isnan(tag_reward("", "<answer>1</answer>", example))


def test_parts():
    assert answer_in("none") is None
    assert as_number("12.") is None
    assert as_number("1,234.5%") == 1234.5


@pytest.mark.parametrize("value", ["high", None])
def test_a_reward_that_is_no_number_fails_with_its_row(value):
    sequences = BatchedSequences.from_ids([[1]], [[[2]]], responses_text=[["said"]])
    with pytest.raises(RewardError, match=r"prompt 0, sample 0 \(response 'said'\)") as caught:
        rewards_of(sequences, lambda *_: value)
    assert isinstance(caught.value.__cause__, ValueError | TypeError)
    assert math.isnan(rewards_of(sequences, None)[0][0])
    assert rewards_of(sequences, lambda prompt, response, example: len(response)) == [[4.0]]
