"""What callers of `SequenceProb` may pass, and what they get, on an engine that starts in a second.

It asks nothing of an engine but `score`; tests/vllm/test_scoring.py runs it inside vLLM.
"""

import math

import pytest

import steerlab as sl
from steerlab.core.errors import TargetError

pytestmark = pytest.mark.vllm

PROMPTS = ["Two plus two equals", "She opened the window, because"]


@pytest.fixture
def get_log_prob(lens):
    from steerlab.vllm import SequenceProb

    return SequenceProb(lens).get_log_prob


def test_one_list_serves_every_prompt_and_nested_lists_one_each(get_log_prob, lens):
    both = get_log_prob(PROMPTS, [" four", " the room"])
    assert [row["sequence"] for row in both] == [" four", " the room"] * 2
    nested = get_log_prob(PROMPTS, [[" four", " the room"], [" four", " the room"]])
    assert nested == both
    uneven = get_log_prob(PROMPTS, [[" four"], [" the room", " four"]])
    assert uneven == [both[0], both[3], both[2]]
    assert [row["log_prob"] for row in both] == list(lens.score(PROMPTS, [[" four", " the room"]] * 2).log_prob)


def test_a_bare_prompt_takes_a_bare_list(get_log_prob):
    (row,) = get_log_prob(PROMPTS[0], [" four"])
    assert row == get_log_prob(PROMPTS[:1], [" four"])[0]
    assert row["prob"] == pytest.approx(math.exp(row["log_prob"]))
    assert row["perplexity"] == pytest.approx(math.exp(-row["log_prob"] / row["num_tokens"]))


def test_token_ids_are_sequences_too(get_log_prob):
    rows = get_log_prob([[5, 6, 7], [8, 9]], [[20], [21, 22]])
    assert [row["sequence"] for row in rows] == [[20], [21, 22]] * 2
    assert [row["num_tokens"] for row in rows] == [1, 2, 1, 2]


def test_variants_are_strings_of_their_own_and_all_reported(get_log_prob):
    rows = get_log_prob(PROMPTS[:1], ["four", "seven"], variants=("", " "))
    assert [row["sequence"] for row in rows] == ["four", " four", "seven", " seven"]
    assert rows == get_log_prob(PROMPTS[:1], ["four", " four", "seven", " seven"])
    assert len({row["log_prob"] for row in rows}) == 4


def test_a_plan_and_a_boundary_are_handed_on(get_log_prob, lens, vector):
    plan = sl.Plan(sl.add(vector(1), coef=3.0))
    plain = get_log_prob(PROMPTS, [" four"])
    steered = get_log_prob(PROMPTS, [" four"], plan=[plan, None])
    assert steered[0]["log_prob"] != pytest.approx(plain[0]["log_prob"], abs=1e-3)
    assert steered[1]["log_prob"] == pytest.approx(plain[1]["log_prob"], abs=1e-4)
    separate = get_log_prob(["She opened t"], ["he window"], boundary="separate")
    joint = get_log_prob(["She opened t"], ["he window"])
    assert (separate[0]["boundary"], joint[0]["boundary"]) == ("clean", "merged")


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        (" four", {}, "target_sequences is a list"),
        ([[" four"]], {}, "2 prompts and 1 lists"),
        ([[" four"], " five"], {}, r"Prompt 1 has ' five' where a list"),
        ([[20], [21]], {"variants": (" ",)}, "cannot be put before token ids"),
    ],
)
def test_what_is_no_list_of_sequences_is_refused(get_log_prob, sequences, options, message):
    with pytest.raises(TargetError, match=message):
        get_log_prob(PROMPTS, sequences, **options)
