"""Prompting and few-shot arms on the items of an effect, and the comparison at equal cost."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.experiment.measurements.baselines._measure import neutral_lead, text_nlls_after
from steerlab.measures.intervals import cluster_t_mean
from steerlab.scoring import text_nlls
from tests.experiment.data import TARGETS, TEXTS

ARMS = [
    sl.prompting(["0 1 2 3", "Please be happy now", "Be kind."]),
    sl.few_shot(["the cat ran home", "a fish swam by", "a dog sat down"], [1, 3], separator=" "),
]


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), dose=1.0))


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine, tmp_path_factory):
    return sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def effect(experiment, plan):
    options = {"controls": sl.Controls(random=0), "neutral": TEXTS, "max_ppl_ratio": math.inf}
    return experiment.effect(plan, TARGETS, [-0.3, 0, 0.3, 0.6, 1.0], **options)


@pytest.fixture(scope="module")
def found(experiment, effect):
    return experiment.baselines(effect, ARMS)


def margins(engine, before, plan=None):
    """Margins of every item after a text, without the package's measurement."""
    values = []
    for item in TARGETS:
        scores = engine.score([before + item.prompt], [item.targets], plan=plan).log_prob
        values.append(scores[:2].mean() - scores[2])
    return np.array(values)


def test_arms_are_the_same_items_with_text_before_them(found, tiny_llama_engine):
    base = margins(tiny_llama_engine, "")
    for arm in ARMS:
        for strength in arm.strengths:
            rows = found.rows[(found.rows.arm == arm.name) & (found.rows.strength == strength)]
            values = margins(tiny_llama_engine, arm.before(strength))
            assert rows.value.to_numpy() == pytest.approx(values, abs=1e-4)
            assert rows.change.to_numpy() == pytest.approx(values - base, abs=1e-4)
    start = found.rows[found.rows.strength == 0]
    assert start.change.to_numpy() == pytest.approx(np.zeros(12), abs=1e-4)


def test_the_vectors_side_is_that_of_its_positive_doses(found, effect):
    points = found.points[found.points.arm == "vector"]
    assert points.strength.tolist() == [0, 0.3, 0.6, 1.0]
    by_dose = effect.by_dose().set_index("dose")
    assert points.change.to_numpy() == pytest.approx(by_dose.value[points.strength] - by_dose.value[0], abs=1e-4)
    assert points.ppl_ratio.to_numpy() == pytest.approx(by_dose.ppl_ratio[points.strength])


def test_the_cost_of_words_is_what_they_do_to_the_same_tokens(found, tiny_llama_engine):
    engine, arm = tiny_llama_engine, ARMS[0]
    point = found.points[(found.points.arm == arm.name) & (found.points.strength == 2)].iloc[0]
    before, plain = text_nlls_after(engine, arm.before(2), TEXTS), text_nlls(engine, TEXTS)
    assert [len(text) for text in before] == [len(text) for text in plain]
    assert text_nlls_after(engine, "", TEXTS)[0] == pytest.approx(plain[0], abs=1e-5)
    stand_in = neutral_lead(engine, arm.before(2), arm.separator)
    neutral = text_nlls_after(engine, stand_in, TEXTS)
    whole = np.concatenate(before).mean() - np.concatenate(neutral).mean()
    assert point.ppl_ratio == pytest.approx(math.exp(whole), rel=1e-5)
    # one text by hand: all ids in a row, the words' and then the text's own without a second BOS
    tokenizer = engine.tokenizer
    lead, own = (tokenizer(t)["input_ids"] for t in (arm.before(2), TEXTS[0]))
    own = own[1:] if own[0] == tokenizer.bos_token_id else own
    scored = engine.score([lead], [[own]])[0].token_log_probs[-len(before[0]) :]
    assert before[0] == pytest.approx(-np.array(scored), abs=1e-5)


def test_neutral_prose_stands_in_for_words_token_by_token(tiny_llama_engine):
    tokenizer = tiny_llama_engine.tokenizer
    for text in ("the bird came back\n\n", "a dog stood up " * 400):
        separator = "\n\n" if text.endswith("\n") else ""
        found, wanted = neutral_lead(tiny_llama_engine, text, separator), tokenizer(text)["input_ids"]
        assert len(found) == len(wanted)
        prose = tokenizer(sl.shipped.reference_text())["input_ids"]
        end = tokenizer(separator, add_special_tokens=False)["input_ids"] if separator else []
        shared = min(len(prose), len(found) - len(end))
        assert found[:shared] == prose[:shared]
        assert found[len(found) - len(end) :] == end


def test_at_equal_cost_every_arm_is_interpolated_by_hand(found):
    ratio = 1 + (found.points.groupby("arm").ppl_ratio.max().min() - 1) / 2
    assert ratio > 1, "the tiny model pays for words too"
    table = found.at(ratio).set_index("arm")
    for arm in table.index:
        part = found.points[found.points.arm == arm].sort_values("strength")
        costs = np.log(part.ppl_ratio.to_numpy())
        k = next(k for k in range(len(costs) - 1) if min(costs[k : k + 2]) <= math.log(ratio) <= max(costs[k : k + 2]))
        weight = (math.log(ratio) - costs[k]) / (costs[k + 1] - costs[k])
        change, strength = part.change.to_numpy(), part.strength.to_numpy()
        assert table.change[arm] == pytest.approx(change[k] * (1 - weight) + change[k + 1] * weight, abs=1e-6)
        assert table.strength[arm] == pytest.approx(strength[k] * (1 - weight) + strength[k + 1] * weight)
        assert table.change_low[arm] <= table.change[arm] <= table.change_high[arm]
    difference = table.change["vector"] - table.change["few-shot"]
    assert table.vector_less_arm["few-shot"] == pytest.approx(difference, abs=1e-9)
    assert table.vector_less_arm_low["few-shot"] <= difference <= table.vector_less_arm_high["few-shot"]
    assert math.isnan(table.vector_less_arm["vector"])


def test_nothing_is_extrapolated(found):
    table = found.at(1e6)
    assert table.change.isna().all()
    assert table.reason.str.contains("nothing is extrapolated").all()
    highest = found.points[found.points.arm == "vector"].ppl_ratio.max()
    assert f"to {highest:.4g} only" in table.reason[0]


def test_by_default_the_largest_common_cost_is_compared(found):
    reached = found.points.groupby("arm").ppl_ratio.max().min()
    assert found.equal_cost.ppl_ratio.unique().tolist() == [reached]
    assert (found.equal_cost.reason == "").all()
    assert len(found.sentences()) == 2


def test_it_is_kept_reported_and_not_measured_again(experiment, effect, found, tiny_llama_engine, tmp_path):
    measured = experiment._session.cells.measured
    assert len(experiment.baselines(effect, ARMS, ratios=[1.01]).equal_cost) == 3
    assert experiment._session.cells.measured == measured
    loaded = sl.Experiment.load(experiment.path).results.baselines[0]
    assert loaded.arms == tuple(ARMS)
    pd.testing.assert_frame_equal(loaded.at(1.01), found.at(1.01))
    report = experiment.report(tmp_path / "report.md").read_text()
    assert "Against prompting, at equal cost" in report
    assert "Please be happy now" in report
    assert experiment.verify(n=100).ok


def test_intervals_are_over_items_by_group(found):
    point = found.points[(found.points.arm == "few-shot") & (found.points.strength == 3)].iloc[0]
    rows = found.rows[(found.rows.arm == "few-shot") & (found.rows.strength == 3)]
    ends = cluster_t_mean(rows.change.to_numpy(), rows.group.tolist())
    assert (point.change_low, point.change_high) == pytest.approx((ends.low, ends.high))


def test_a_chat_takes_the_words_in_its_system_message():
    arm = sl.prompting({2: "Be kind."}, separator=" ")
    user = {"role": "user", "content": "Hi"}
    assert arm.applied([user], 2) == [{"role": "system", "content": "Be kind."}, user]
    with_system = [{"role": "system", "content": "You are a bot."}, user]
    assert arm.applied(with_system, 2)[0]["content"] == "Be kind. You are a bot."
    with pytest.raises(InputError, match="token ids"):
        arm.applied([1, 2], 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sl.prompting([]), "texts by strength"),
        (lambda: sl.prompting({0: "x"}), "all above 0"),
        (lambda: sl.prompting([" "]), "no text"),
        (lambda: sl.prompting(["x"], name="vector"), "other than 'vector'"),
        (lambda: sl.few_shot([]), "at least one"),
        (lambda: sl.few_shot(["a", "b"], [3]), "from 1 to 2"),
    ],
)
def test_bad_arms_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_bad_comparisons_are_refused(experiment, effect, plan, tiny_llama_engine):
    with pytest.raises(InputError, match=r"what exp\.effect"):
        experiment.baselines(plan, ARMS)
    with pytest.raises(InputError, match=r"made by sl\.prompting"):
        experiment.baselines(effect, ["be nice"])
    with pytest.raises(InputError, match="a name of its own"):
        experiment.baselines(effect, [ARMS[0], ARMS[0]])
    with pytest.raises(InputError, match="above 0"):
        experiment.baselines(effect, ARMS, ratios=-1)
    with pytest.raises(InputError, match="measured with log_prob_margin"):
        experiment.baselines(effect, ARMS, metric="choice_prob")
    with pytest.raises(InputError, match="another experiment"):
        sl.Experiment("other", tiny_llama_engine, root=None).baselines(effect, ARMS)
    long = "the cat ran home " * 200
    with pytest.raises(InputError, match="shorter texts"):
        text_nlls_after(tiny_llama_engine, long, [long])
