"""The experiment's measurements on real vLLM, against the TransformerLens engine: one engine start for all."""

import numpy as np
import pytest

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.experiment.measurements.entropy import entropy_change
from steerlab.experiment.measurements.parity import parity
from steerlab.experiment.measurements.selfcheck import selfcheck

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXTS = ["The ferry leaves the harbour at seven.", "Nobody knew why the old clock had stopped, nor when."]


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    with start(tiny_path, layers=[1, 2], max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def plan(vector):
    return sl.Plan(sl.add(vector(1), dose=1.0), sl.ablate(vector(2)))


def test_selfcheck_passes(engine):
    found = selfcheck(engine)
    assert found.passed, str(found)
    assert "blocks.1" in found.plan
    assert "blocks.2" in found.plan


@pytest.mark.parametrize("given", [{"texts": TEXTS}, {"prompts": ["The ferry", "She opened the window because"]}])
def test_parity_with_the_lens_engine(lens, engine, plan, given):
    found = parity(lens, engine, plan, **given)
    assert found.passed, str(found)
    assert found.tolerance < 1e-3
    assert found.steering_size > 0.1
    assert found.receipts["equal"].all()
    assert len(found.receipts) == 2 * 2


def test_another_plan_is_no_parity(lens, engine, plan):
    class Stronger:
        """The vLLM engine, with every plan a thousandth stronger."""

        def __getattr__(self, name):
            return getattr(engine, name)

        def score(self, prompts, targets, *, plan=None):
            return engine.score(prompts, targets, plan=None if plan is None else plan.scaled(1.001))

    assert not parity(lens, Stronger(), plan, texts=TEXTS).passed


def test_entropies_and_divergences_agree(lens, engine, plan):
    policy = sl.SamplingPolicy(temperature=0.7, top_p=0.9)
    resolved = plan.resolved(lens.median_norm, lens.info.weights_hash)
    ours, theirs = (entropy_change(one, resolved, TEXTS, policy) for one in (engine, lens))
    assert ours[["text", "position", "token_id"]].equals(theirs[["text", "position", "token_id"]])
    for name in ("base", "steered", "raw_base", "raw_steered", "log_prob_base", "log_prob_steered", "kl"):
        assert ours[name].to_numpy() == pytest.approx(theirs[name].to_numpy(), abs=1e-3)
    assert np.abs(ours.jaccard - theirs.jaccard).max() < 0.05  # a token on a nucleus's edge may fall either way
    with pytest.raises(InputError, match="raise logit_bytes"):
        entropy_change(engine, resolved, TEXTS, policy, logit_bytes=8 * engine.info.d_vocab * 3)
