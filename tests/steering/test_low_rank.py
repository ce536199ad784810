"""Low-rank edits: matrices, operator, vector files."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError, VectorFileError, VectorShapeError, VectorValueError
from steerlab.experiment.measurements.controls import random_plan
from steerlab.steering.low_rank import LowRank
from steerlab.steering.operators import operator_from_json

POINT = HookPoint(1, "resid_post")


def low_rank(rank=2, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(width, rank, generator=generator)).Q.T
    return LowRank(rotation, torch.randn(rank, width, generator=generator), torch.randn(rank, generator=generator))


def vector(edit):
    return sl.SteeringVector(edit.bias @ edit.rotation, POINT, low_rank=edit)


def test_worked_by_hand():
    # R picks coordinate 0; W reads coordinate 1 twice; b = 3: the first coordinate becomes 2·h₁ + 3
    edit = LowRank(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), torch.tensor([3.0]))
    assert (torch.tensor([5.0, 4.0]) + edit.change(torch.tensor([5.0, 4.0]))).tolist() == [11.0, 4.0]


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 1000))
def test_the_operator_is_the_formula_and_sets_the_subspace(rank, seed):
    edit = low_rank(rank, seed=seed)
    h = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed + 1))
    made = sl.loreft(vector(edit))
    found = made.delta(h)
    torch.testing.assert_close(found, (h @ edit.weight.T + edit.bias - h @ edit.rotation.T) @ edit.rotation)
    torch.testing.assert_close((h + found) @ edit.rotation.T, h @ edit.weight.T + edit.bias, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.scaled(0.5).delta(h), found / 2)
    assert len(made.terms()) == rank


def test_a_plan_with_it_is_read_back():
    plan = sl.Plan(sl.loreft(vector(low_rank()), where="all"))
    back = sl.Plan.from_json(plan.to_json())
    assert back.hash == plan.hash
    h = torch.randn(4, 6)
    torch.testing.assert_close(back.edits[0].delta(h), plan.edits[0].delta(h))
    assert str(plan) == "loreft(rank 2) at blocks.1.hook_resid_post, all()"
    other = sl.Plan(sl.loreft(vector(low_rank(seed=5)), where="all"))
    assert other.hash != plan.hash


@pytest.mark.parametrize("data", [{"kind": "loreft"}, {"kind": "loreft", "rank": 0, "rotation": "", "weight": ""}])
def test_what_describes_no_edit_is_refused(data):
    with pytest.raises(PlanError):
        operator_from_json(data)


def test_rows_without_reading_add_a_constant():
    rotation = torch.eye(2, 4)
    edit = LowRank(rotation, rotation, torch.tensor([1.0, -2.0]))
    made = sl.loreft(vector(edit))
    assert all(term.gate.is_constant for term in made.terms())
    assert made.delta(torch.randn(5, 4))[0].tolist() == [1.0, -2.0, 0.0, 0.0]


@given(st.integers(1, 3), st.integers(0, 100), st.booleans())
@settings(max_examples=20)
def test_turning_keeps_everything_between_the_rows(rank, seed, start):
    edit = low_rank(rank, seed=seed)
    edit = LowRank(edit.rotation, edit.rotation, edit.bias) if start else edit
    turned = edit.turned(np.random.default_rng(seed))
    rows, others = (torch.cat([one.rotation, one.weight]) for one in (edit, turned))
    torch.testing.assert_close(others @ others.T, rows @ rows.T, atol=1e-4, rtol=1e-4)
    assert torch.equal(turned.bias, edit.bias)
    assert not torch.allclose(turned.rotation, edit.rotation, atol=1e-2)


def test_turned_rows_point_anywhere_alike():
    drawn = [low_rank(1, width=3).turned(np.random.default_rng(k)).rotation[0] for k in range(2000)]
    rows = torch.stack(drawn)
    assert rows.mean(dim=0).abs().max() < 0.06  # 4 standard errors of a mean of coordinates with variance 1/3
    torch.testing.assert_close(rows.T @ rows / len(rows), torch.eye(3) / 3, atol=0.03, rtol=0)


def test_random_controls_of_a_low_rank_edit_are_other_edits():
    plan = sl.Plan(sl.loreft(vector(low_rank())), sl.add(vector(low_rank()).scaled(1.0), coef=1.0))
    made = random_plan(plan, np.random.default_rng(0))
    h = torch.randn(50, 6)
    real, null = (edit.delta(h) for edit in (plan.edits[0], made.edits[0]))
    assert torch.nn.functional.cosine_similarity(real, null).abs().mean() < 0.9
    assert made.edits[1].vector != plan.edits[1].vector
    assert made.edits[1].operator == plan.edits[1].operator


# --- vectors and files --------------------------------------------------------------------------------------------


def test_files_keep_it(tmp_path):
    plain = sl.SteeringVector.from_tensor(torch.ones(6), layer=2)
    held = vector(low_rank())
    path = sl.VectorSet((held, plain)).save(tmp_path / "v.safetensors")
    back = sl.VectorSet.load(path)
    assert back[1] == held
    assert back[1].low_rank == held.low_rank
    assert back[2].low_rank is None
    assert b'\\"format\\": 2' in path.read_bytes()
    assert b'\\"format\\": 1' in plain.save(tmp_path / "plain.safetensors").read_bytes()


def test_it_counts_in_equality():
    a, b = vector(low_rank()), sl.SteeringVector(vector(low_rank()).values, POINT)
    assert a != b
    assert a == vector(low_rank())


def test_vectors_made_from_it_have_none():
    v = vector(low_rank())
    made = [-v, 2 * v, v + v, v.scaled(1.0), v.with_values(v.values, method="x"), sl.SteeringVector.mean([v, v])]
    assert all(one.low_rank is None for one in made)
    assert v.at(3).low_rank == v.low_rank
    with pytest.raises(PlanError, match="a vector with a low-rank edit"):
        sl.loreft(v.scaled(1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.1.hook_resid_post.low_rank.bias"), "has rotation, weight"),
        (lambda t: t.update({"blocks.1.hook_resid_post.low_rank.more": torch.ones(1)}), "has bias, more"),
        (lambda t: t.update({"blocks.9.hook_resid_post.low_rank.bias": torch.ones(1)}), "damaged"),
        (lambda t: t.update({"blocks.1.hook_resid_post.low_rank.weight": torch.ones(3, 6)}), "cannot be used"),
        (lambda t: t.update({"blocks.1.hook_resid_post.low_rank.rotation": torch.ones(2, 6)}), "not orthonormal"),
        (lambda t: t.update({"blocks.1.hook_resid_post.low_rank.bias": torch.ones(2).double()}), "in float32"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    from safetensors import safe_open

    path = vector(low_rank()).save(tmp_path / "v.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, tmp_path / "w.safetensors", metadata)
    with pytest.raises(VectorFileError, match=message):
        sl.SteeringVector.load(tmp_path / "w.safetensors")


def test_formats_that_cannot_state_it_refuse_it(tmp_path):
    vectors = sl.VectorSet((vector(low_rank()),))
    for write in (
        lambda: vectors.to_gguf(tmp_path / "v.gguf", model_hint="llama"),
        lambda: vectors.to_torch(tmp_path / "v.pt"),
        vectors.to_steering_vectors,
    ):
        with pytest.raises(VectorFileError, match="no low-rank edits"):
            write()


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((torch.eye(2, 4), torch.zeros(2, 3), torch.zeros(2)), VectorShapeError, "rank ≤ d_model"),
        ((torch.eye(4, 2), torch.zeros(4, 2), torch.zeros(4)), VectorShapeError, "rank ≤ d_model"),
        ((torch.eye(2, 4), torch.zeros(2, 4), torch.zeros(3)), VectorShapeError, "rank ≤ d_model"),
        ((torch.ones(2, 4), torch.zeros(2, 4), torch.zeros(2)), VectorValueError, "not orthonormal"),
        ((torch.eye(2, 4), torch.full((2, 4), math.nan), torch.zeros(2)), VectorValueError, "NaN"),
        ((torch.eye(2, 4).long(), torch.zeros(2, 4), torch.zeros(2)), VectorShapeError, "floating-point"),
    ],
)
def test_matrices_that_are_no_edit(parts, error, message):
    with pytest.raises(error, match=message):
        LowRank(*parts)


def test_widths_must_agree():
    with pytest.raises(VectorShapeError, match="has its width"):
        sl.SteeringVector(torch.ones(5), POINT, low_rank=low_rank())


@pytest.mark.parametrize("with_weight", [True, False])
def test_imported_interventions_become_plans(tmp_path, with_weight):
    edit = low_rank()
    tensors = {"R": edit.rotation, "b": edit.bias} | ({"W": edit.weight} if with_weight else {})
    save_file({name: part.contiguous() for name, part in tensors.items()}, tmp_path / "x.safetensors")
    found = sl.import_loreft(tmp_path / "x.safetensors", layer=1)
    h = torch.randn(3, 6)
    expected = h @ edit.weight.T * with_weight + edit.bias - h @ edit.rotation.T
    torch.testing.assert_close(sl.loreft(found.vector()).delta(h), expected @ edit.rotation, atol=1e-5, rtol=1e-5)
