"""Judges, baselines and protocols on real vLLM agree with the TransformerLens engine: one engine start for all."""

import warnings

import numpy as np
import pytest

import steerlab as sl
from steerlab.protocols import Concept, axbench, caa, cast, iti, refusal, steerability
from tests.experiment.data import TARGETS, TEXTS
from tests.protocols.data import BEGUN, ITEMS, THINGS, TRUTH

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    with start(tiny_path, layers="all", sites=["resid_mid", "resid_post", "attn_out"], max_model_len=512) as engine:
        yield engine


def both(lens, engine, measure):
    """The same measurement on both engines."""
    return [measure(sl.Experiment("run", one, root=None)) for one in (lens, engine)]


def assert_same(one, other, columns):
    for column in columns:
        assert one[column].to_numpy(dtype=float) == pytest.approx(other[column].to_numpy(dtype=float), abs=2e-3), column


def test_a_judge(lens, engine):
    rubrics = {"kind": "{text} Kind? Rating:", "short": "{text} Short? Rating:"}
    one, other = (sl.judge(e, rubrics, ("1", "2", "10")).rate(["the cat ran", "a dog sat"]) for e in (lens, engine))
    assert_same(one.rows, other.rows, ["p_1", "p_2", "p_10", "mass"])
    assert one.ratings == pytest.approx(other.ratings, abs=1e-3)
    assert one.judge.hash != other.judge.hash  # another engine is another judge
    assert one.judge.rubric_hash == other.judge.rubric_hash


def test_baselines(lens, engine, vector):
    arms = [sl.prompting(["the bird came back"]), sl.few_shot(["the cat ran home", "a dog sat"])]

    def measure(exp):
        effect = exp.effect(
            sl.Plan(sl.add(vector(1), dose=1.0)),
            TARGETS,
            [0, 0.3, 0.6],
            controls=sl.Controls(random=0),
            neutral=TEXTS,
            max_ppl_ratio=np.inf,
        )
        return exp.baselines(effect, arms).points

    assert_same(*both(lens, engine, measure), ["strength", "ppl_ratio", "change"])


def test_steerability_and_caa(lens, engine):
    measured = both(lens, engine, lambda exp: steerability(exp, {"runs": ITEMS}, layers=1, multipliers=[-1, 0, 1]))
    assert_same(*(found.rows for found in measured), ["slope", "propensity"])
    measured = both(lens, engine, lambda exp: caa(exp, {"runs": ITEMS}, layers=[1, 2], multipliers=[0, 1]))
    assert_same(*(found.rows for found in measured), ["a_prob", "b_prob", "p_matching"])


def test_refusal(lens, engine):
    harmful, harmless = ([f"{word} the {thing}" for thing in THINGS[:4]] for word in ("Hurt", "Feed"))
    options = {"positions": 1, "layers": [1], "max_kl": 50, "least_induced": -50, "late": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = both(lens, engine, lambda exp: refusal(exp, harmful, harmless, **options))
    assert_same(*(found.rows for found in measured), ["bypass", "induce", "kl"])
    assert_same(*(found.table for found in measured), ["harmful_ablated", "harmless_added"])


def test_iti(lens, engine):
    options = {"heads": [1, 3], "alphas": [4.0], "folds": 2, "texts": TEXTS, "reader": lens}
    measured = both(lens, engine, lambda exp: iti(exp, TRUTH, **options))
    assert_same(*(found.rows for found in measured), ["mc1", "mc2"])
    assert_same(*(found.table for found in measured), ["mc2_change", "ce", "kl"])
    assert measured[1].table.kl[1:].min() > 1e-3  # the heads were shifted
    with pytest.raises(sl.InputError, match="Heads are read"):
        iti(sl.Experiment("run", engine, root=None), TRUTH, heads=[1], alphas=[4.0], folds=2)


def test_cast(lens, engine):
    target, other = ([f"{word} the {thing}" for thing in THINGS] for word in ("Hurt", "Feed"))
    options = {"layers": [1, 2], "condition_layers": [0, 1], "strength": 2.0}
    measured = both(lens, engine, lambda exp: cast(exp, target, other, BEGUN, **options))
    assert_same(*(found.rows for found in measured), ["reading", "steered", "log_odds"])
    by_arm = measured[1].rows.pivot(index="prompt", columns="arm", values="log_odds")
    steered = measured[1].rows[measured[1].rows.arm == "conditional"].set_index("prompt").steered
    assert steered.nunique() == 2
    assert by_arm.conditional[steered].to_numpy() == pytest.approx(by_arm.always[steered].to_numpy(), abs=1e-4)
    assert by_arm.conditional[~steered].to_numpy() == pytest.approx(by_arm.unsteered[~steered].to_numpy(), abs=1e-4)


@pytest.mark.filterwarnings("ignore:reft_r1. the held-out loss is")  # two steps teach little
def test_axbench_is_the_same_on_both_engines(engine, lens, tmp_path):
    asked = ["Where?", "Who?", "Why?"]
    concept = Concept(
        "joy", tuple((one, "a happy day") for one in asked), tuple((one, "the bread was stale") for one in asked)
    )
    options = {"layer": 1, "factors": [0.5, 1.0], "max_new_tokens": 4, "methods": ["prompting", "diff_mean", "reft_r1"]}
    options |= {"training": {"steps": 2, "validation": 0.4}, "trainer": lens, "judge": engine}
    runs = [sl.Experiment(name, one, root=tmp_path) for name, one in (("vllm", engine), ("lens", lens))]
    ours, theirs = (
        axbench(run, [concept], ["Two plus two equals four", "Nobody knew"], **options).rows for run in runs
    )
    assert ours.text.tolist() == theirs.text.tolist()
    assert ours.score.tolist() == pytest.approx(theirs.score.tolist(), abs=1e-3)


def test_a_dose_inside_a_layer_is_measured_there(engine, lens):
    for site in ("attn_out", "resid_mid"):
        assert engine.median_norm(1, site) == pytest.approx(lens.median_norm(1, site), rel=1e-4)
