"""Conditional activation steering on a tiny model: condition, threshold and refusal again by hand."""

import numpy as np
import pytest

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.protocols import cast
from steerlab.protocols._arguments import split_both
from steerlab.protocols._condition import best_threshold, scores
from steerlab.protocols.cast import READ, SHARES
from tests.protocols.data import BEGUN, THINGS

TARGET = [f"Hurt the {thing} now" for thing in THINGS]
OTHER = [f"Feed the {thing} today" for thing in THINGS]
OPTIONS = {"layers": [1, 2], "condition_layers": [0, 1], "strength": 2.0}


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine, tmp_path_factory):
    return sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=1)


@pytest.fixture(scope="module")
def found(experiment):
    return cast(experiment, TARGET, OTHER, BEGUN, **OPTIONS)


def test_threshold_by_hand():
    """0.1 and 0.2 against 0.5 and 0.9: the gap between them is the widest that separates all."""
    above = best_threshold(np.array([0.5, 0.9]), np.array([0.1, 0.2]))
    assert (above.value, above.above, above.f1, above.gap) == (pytest.approx(0.35), True, 1.0, pytest.approx(0.375))
    below = best_threshold(np.array([0.1, 0.2]), np.array([0.5, 0.9]))
    assert (below.value, below.above, below.f1) == (pytest.approx(0.35), False, 1.0)
    mixed = best_threshold(np.array([0.1, 0.6, 0.8]), np.array([0.0, 0.2]))  # all three pass, none of the other but 0.2
    assert (mixed.value, mixed.f1) == (pytest.approx(0.05), pytest.approx(6 / 7))
    with pytest.raises(DataError, match="same reading"):
        best_threshold(np.array([0.5]), np.array([0.5]))


def test_no_threshold_is_better():
    rng = np.random.default_rng(0)
    for _ in range(20):
        wanted, other = rng.normal(0.5, 1, 6), rng.normal(0, 1, 7)
        best = best_threshold(wanted, other)
        tried = np.sort(np.concatenate([wanted, other]))
        for value in (tried[1:] + tried[:-1]) / 2:
            for passes in (lambda x, v=value: x > v, lambda x, v=value: x < v):
                assert scores(passes(wanted), passes(other))["f1"] <= best.f1 + 1e-12


def test_scores_by_hand():
    told = scores(np.array([True, True, False, False]), np.array([True, False]))
    assert told == {"precision": pytest.approx(2 / 3), "recall": 0.5, "f1": pytest.approx(4 / 7)}
    assert np.isnan(scores(np.array([False]), np.array([False]))["precision"])


def test_rows_by_hand(found, tiny_llama_engine):
    """The condition is made again from captures; where it passes refusal is that of a plan without `when`."""
    engine = tiny_llama_engine
    parts = split_both({"target": TARGET, "other": OTHER}, SHARES, 1)
    pairs = sl.ContrastPairs.from_lists(parts[0][0], parts[1][0])
    probes = sl.extract(engine, pairs, method="pca_uncentred", layers=[0, 1], read=READ, chat=True)

    def cosines(texts, layer):
        read = engine.capture(texts, layers=[layer], where=sl.where.prompt(), chat=True)
        streams = [read.of(k, layer)[1:] for k in range(len(texts))]
        unit = probes[layer].values / probes[layer].norm
        return np.array([float((h @ unit / h.norm(dim=-1)).mean()) for h in streams])

    chosen = {layer: best_threshold(*(cosines(own[1], layer) for own in parts)) for layer in (0, 1)}
    layer = max(chosen, key=lambda k: (chosen[k].f1, chosen[k].gap))
    behaviour = sl.extract(engine, BEGUN, method="pca_uncentred", layers=[1, 2], chat=True)
    always = sl.Plan(*(sl.add(v, dose=2.0) for v in behaviour.values()))
    for kind, own in zip(("target", "other"), parts, strict=True):
        rows = found.rows[(found.rows.arm == "conditional") & (found.rows.kind == kind)]
        assert rows.prompt.tolist() == own[2]
        assert rows.reading.to_numpy() == pytest.approx(cosines(own[2], layer), abs=1e-5)
        passes = chosen[layer].passes(rows.reading.to_numpy())
        assert rows.steered.tolist() == passes.tolist()
        for text, passed, p_refusal in zip(rows.prompt, passes, rows.p_refusal, strict=True):
            plan = always if passed else None
            p = sum(np.exp(engine.score([text], [[word]], plan=plan, chat=True)[0].log_prob) for word in ("I", "As"))
            assert p_refusal == pytest.approx(p, rel=1e-3)
    assert found.rows[found.rows.arm == "conditional"].steered.nunique() == 2  # both cases were seen


def test_the_table_is_made_of_the_rows(found):
    table = found.table.set_index("arm")
    assert table.index.tolist() == ["unsteered", "always", "conditional"]
    means = found.rows.pivot_table(index="arm", columns="kind", values=["p_refusal", "log_odds"])
    for arm, row in table.iterrows():
        for kind in ("target", "other"):
            assert row[kind] == pytest.approx(means.loc[arm, ("p_refusal", kind)])
            assert row[f"{kind}_log_odds"] == pytest.approx(means.loc[arm, ("log_odds", kind)])
            assert row[f"{kind}_low"] <= row[kind] <= row[f"{kind}_high"]
    assert table.target_steered[["unsteered", "always"]].tolist() == [0, 1]
    own = table.loc["conditional"]
    assert own.recall == own.target_steered
    assert own.precision == pytest.approx(own.target_steered / (own.target_steered + own.other_steered))
    assert own.f1 == pytest.approx(2 * own.precision * own.recall / (own.precision + own.recall))
    assert table.f1[["unsteered", "always"]].isna().all()


def test_it_resumes_and_is_reported(experiment, found, tiny_llama_engine, tmp_path, monkeypatch):
    experiment.close()
    for name in ("score", "capture"):
        monkeypatch.setattr(type(tiny_llama_engine), name, lambda *_, **__: pytest.fail("it ran again"))
    again = sl.Experiment("run", tiny_llama_engine, root=experiment.path.parent, seed=1)
    assert cast(again, TARGET, OTHER, BEGUN, **OPTIONS).table.equals(found.table)
    report = again.report(tmp_path / "report.md").read_text()
    assert "Protocol: cast" in report
    assert "Lee et al. 2024" in report
    monkeypatch.undo()
    assert again.verify(n=100).ok
    again.close()


def test_bad_arguments_are_refused(tiny_llama_engine):
    exp = sl.Experiment("bad", tiny_llama_engine, root=None)
    with pytest.raises(InputError, match=r"read no later than the first of layers \[1, 2\]; got \[2\]"):
        cast(exp, TARGET, OTHER, BEGUN, **{**OPTIONS, "condition_layers": 2})
    with pytest.raises(InputError, match="behaviour is ContrastPairs"):
        cast(exp, TARGET, OTHER, TARGET, **OPTIONS)
    with pytest.raises(DataError, match="12 target and 11 other"):
        cast(exp, TARGET, OTHER[1:], BEGUN, **OPTIONS)
    with pytest.raises(DataError, match="too few"):
        cast(exp, TARGET[:2], OTHER[:2], BEGUN, **OPTIONS)
