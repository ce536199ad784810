import gc
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

import steerlab as sl
from steerlab.core.errors import DataError, InputError, VectorShapeError
from steerlab.steering.extraction.diagnostics import projection_auc, split_half_cosines

TRAIN = sl.ContrastPairs.from_lists(
    ["What a wonderful day", "The soup was happy and warm", "She really liked it", "A happy street, a warm day"],
    ["What a terrible day", "The soup was sad and stale", "She never knew it", "A sad street, a stale day"],
)
DEV = sl.ContrastPairs.from_lists(
    ["The room was warm", "What a happy morning", "I liked the bread", "They were wonderful", "So happy"],
    ["The room was stale", "What a sad morning", "I stopped the bread", "They were terrible", "So sad"],
    groups=["a", "a", "b", "c", "d"],
)


@pytest.fixture
def engine(tiny_llama_engine):
    return tiny_llama_engine


# --- the parts ----------------------------------------------------------------------------------------------------


def test_auc_worked_by_hand():
    assert projection_auc(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0])) == 0.75
    assert projection_auc(torch.tensor([1.0]), torch.tensor([1.0])) == 0.5
    assert projection_auc(torch.tensor([1.0]), torch.tensor([2.0])) == 0.0


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=12), st.lists(st.integers(-5, 5), min_size=1, max_size=12))
def test_auc_is_the_rank_sum_statistic(positive, negative):
    found = projection_auc(torch.tensor(positive).float(), torch.tensor(negative).float())
    assert found == pytest.approx(mannwhitneyu(positive, negative).statistic / len(positive) / len(negative))


def test_halves_of_one_direction_agree_and_halves_of_noise_do_not():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 40, 64, generator=generator)
    groups = [str(i // 2) for i in range(40)]
    positive = noise + torch.tensor([3.0, 0.0])[:, None, None]
    clear, unclear = split_half_cosines("mean_diff", positive, noise * 0, groups, 8, 0)
    assert clear > 0.95
    assert abs(unclear) < 0.3


def test_a_group_stays_in_one_half():
    # the two pairs of a group cancel only if they are together
    positive = torch.tensor([[[1.0, 5.0], [1.0, -5.0], [1.0, 7.0], [1.0, -7.0]]])
    found = split_half_cosines("mean_diff", positive, torch.zeros_like(positive), ["a", "a", "b", "b"], 6, 0)
    assert found == pytest.approx([1.0])


def test_what_cannot_be_split_is_nan():
    rows = torch.ones(2, 4, 3)
    assert np.isnan(split_half_cosines("mean_diff", rows, rows * 0, ["a"] * 4, 2, 0)).all()
    assert np.isnan(split_half_cosines("bipo", rows, rows * 0, list("abcd"), 2, 0)).all()


# --- the whole ----------------------------------------------------------------------------------------------------


def test_a_row_per_layer_with_values_by_hand(engine):
    vectors = sl.extract(engine, TRAIN, layers=[1, 3], pool="last", read=sl.where.prompt())
    frame = vectors.diagnostics(DEV).to_frame()
    assert list(frame.columns) == [
        "layer",
        "norm",
        "relative_norm",
        "auc",
        "split_half_cosine",
        "cosine_to_mean_diff",
    ]
    assert frame.layer.tolist() == [1, 3]
    rows = engine.capture([*DEV.positives, *DEV.negatives], layers=[3], pool="last")[3]
    projections = rows.double() @ vectors[3].unit.double()
    wins = (projections[:5, None] > projections[None, 5:]).double().mean()
    difference = (rows[:5] - rows[5:]).mean(dim=0)
    last = frame.iloc[1]
    assert last.norm == pytest.approx(vectors[3].norm)
    assert last.relative_norm == pytest.approx(vectors[3].norm / engine.median_norm(3))
    assert last.auc == pytest.approx(float(wins))
    assert last.cosine_to_mean_diff == pytest.approx(
        float(torch.nn.functional.cosine_similarity(vectors[3].values, difference, dim=0)), abs=1e-5
    )
    assert -1 <= last.split_half_cosine <= 1


def test_a_loaded_set_needs_an_engine(engine, tmp_path):
    vectors = sl.extract(engine, TRAIN, layers=[2])
    loaded = sl.VectorSet.load(vectors.save(tmp_path / "v.safetensors"))
    with pytest.raises(InputError, match="pass engine="):
        loaded.diagnostics(DEV)
    expected = vectors.diagnostics(DEV).to_frame()
    assert loaded.diagnostics(DEV, engine).to_frame().equals(expected)


def test_an_engine_is_not_kept_alive(tiny_llama_path):
    engine = sl.load(tiny_llama_path, device="cpu")
    vectors = sl.extract(engine, TRAIN, layers=[2])
    engine.close()
    del engine
    gc.collect()
    with pytest.raises(InputError, match="remember no engine"):
        vectors.diagnostics(DEV)


def test_the_chat_of_the_extraction_is_kept(engine):
    vectors = sl.extract(engine, TRAIN, layers=[2], chat=True)
    as_chat = vectors.diagnostics(DEV).layers[0]
    assert as_chat == vectors.diagnostics(DEV, chat=True).layers[0]
    assert as_chat.cosine_to_mean_diff != vectors.diagnostics(DEV, chat=False).layers[0].cosine_to_mean_diff


def test_training_pairs_are_not_held_out(engine):
    vectors = sl.extract(engine, TRAIN, layers=[2])
    with pytest.warns(UserWarning, match="not a held-out one"):
        vectors.diagnostics(TRAIN)


def test_a_given_vector_has_no_split_halves(engine):
    given = sl.VectorSet((sl.SteeringVector.from_tensor(torch.ones(64), layer=1),))
    found = given.diagnostics(DEV, engine).layers[0]
    assert math.isnan(found.split_half_cosine)
    assert found.relative_norm == pytest.approx(8 / engine.median_norm(1))
    with pytest.raises(InputError, match="n_splits is an integer ≥ 1, got 0"):
        given.diagnostics(DEV, engine, n_splits=0)


def test_the_plot_shows_what_is_known(engine):
    from steerlab.experiment.plots.diagnostics import plot_diagnostics

    vectors = sl.extract(engine, TRAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = plot_diagnostics(vectors.diagnostics(DEV))
    frame = vectors.diagnostics(DEV).to_frame()
    drawn = {line.get_label(): line.get_ydata() for line in ax.get_lines()}
    np.testing.assert_allclose(drawn["AUC"], frame.auc)
    np.testing.assert_allclose(drawn["norm / median\nof the stream"], frame.relative_norm)
    assert ax.get_xlabel() == "layer (resid_post)"
    ax.figure.clear()


@pytest.mark.usefixtures("unchecked_types")
def test_a_plot_of_anything_else_is_refused():
    with pytest.raises(InputError, match=r"vectors.diagnostics\(dev\) gives; got SteeringVector"):
        sl.plot_diagnostics(sl.SteeringVector.from_tensor(torch.ones(64), layer=1))  # pyright: ignore[reportArgumentType]


def test_a_loaded_set_is_read_as_chat_if_it_was_extracted_so(engine, tmp_path):
    vectors = sl.extract(engine, TRAIN, layers=[2], chat=True)
    loaded = sl.VectorSet.load(vectors.save(tmp_path / "chat.safetensors"))
    assert loaded.diagnostics(DEV, engine).layers == vectors.diagnostics(DEV).layers
    assert loaded.diagnostics(DEV, engine, chat=False).layers != vectors.diagnostics(DEV).layers


def test_halves_of_one_pair_have_no_discriminant(engine):
    few = sl.ContrastPairs.from_lists(["So warm", "A happy day"], ["So stale", "A sad day"])
    (layer,) = sl.extract(engine, TRAIN, "lda", layers=2).diagnostics(few).layers
    assert math.isnan(layer.split_half_cosine)
    assert layer.auc >= 0


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_diagnosed_is_refused(engine):
    vectors = sl.VectorSet((sl.SteeringVector.from_tensor(torch.ones(64), layer=1),))
    with pytest.raises(DataError, match="ContrastPairs, got list"):
        vectors.diagnostics([("a", "b")], engine)
    with pytest.raises(InputError, match="read with an engine"):
        vectors.diagnostics(DEV, "smollm2-135m")
    wide = sl.VectorSet((sl.SteeringVector.from_tensor(torch.ones(65), layer=1),))
    with pytest.raises(VectorShapeError, match=r"\[65\].*\[64\]"):
        wide.diagnostics(DEV, engine)


def test_a_median_norm_of_other_weights_is_not_used(engine):
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    card = replace(vector.card, weights_hash="other", median_norm=1e6)
    (layer,) = sl.VectorSet((replace(vector, card=card),)).diagnostics(DEV, engine).layers
    assert layer.relative_norm == pytest.approx(8.0 / engine.median_norm(1))
