import pytest
import torch
from safetensors.torch import save_file

from steerlab.core.errors import HookPointError, PlanError, VectorFileError
from steerlab.steering.formats.loreft import import_loreft

R = torch.tensor([[0.6, 0.8, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
B = torch.tensor([2.0, -1.0])
W = torch.tensor([[0.1, 0.0, 0.0, 0.0], [0.0, 0.2, 0.0, 0.0]])


def saved(tmp_path, tensors, suffix):
    path = tmp_path / f"reft{suffix}"
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize(
    "names", [("R", "b", R), ("rotate_layer", "bias", R.T), ("rotate_layer", "learned_source", R.T)]
)
def test_rows_and_values(tmp_path, suffix, names):
    rotation, bias, values = names
    found = import_loreft(saved(tmp_path, {rotation: values, bias: B}, suffix), layer=7, model="m")
    assert [v.values.tolist() for v in found.directions] == R.tolist()
    assert {v.hook_point.name for v in found.directions} == {"blocks.7.hook_resid_post"}
    assert found.values == (2.0, -1.0)
    assert found.weight is None
    assert found.settings() == list(zip(found.directions, (2.0, -1.0), strict=True))
    card = found.directions[0].card
    assert (card.method, card.model, card.extracted_at) == ("loreft", "m", "blocks.7.hook_resid_post")


def test_setting_each_projection_in_turn_is_the_intervention(tmp_path):
    found = import_loreft(saved(tmp_path, {"R": R, "b": B}, ".bin"), layer=0)
    h = torch.tensor([1.0, -2.0, 0.5, 3.0])
    edited = h.clone()
    for direction, value in found.settings():
        edited = edited + (value - edited @ direction.unit) * direction.unit
    torch.testing.assert_close(edited, h + R.T @ (B - R @ h))


@pytest.mark.parametrize("name", ["W", "weight"])
def test_targets_that_follow_the_stream_are_kept_and_no_settings(tmp_path, name):
    found = import_loreft(saved(tmp_path, {"R": R, "b": B, name: W}, ".safetensors"), layer=0)
    assert found.weight is not None
    assert found.weight.tolist() == W.tolist()
    with pytest.raises(PlanError, match="follow the stream"):
        found.settings()


def test_rows_that_are_not_orthonormal_are_refused_with_the_error(tmp_path):
    skew = R.clone()
    skew[1, 0] = 0.5  # R Rᵀ = [[1, 0.3], [0.3, 1.25]]
    with pytest.raises(VectorFileError, match=r"up to 0\.3 from the identity"):
        import_loreft(saved(tmp_path, {"R": skew, "b": B}, ".bin"), layer=0)
    with pytest.raises(VectorFileError, match=r"up to 3 from the identity"):
        import_loreft(saved(tmp_path, {"R": 2 * R, "b": B}, ".bin"), layer=0)


def test_rounding_to_bfloat16_is_no_error(tmp_path):
    rows = torch.linalg.qr(torch.randn(512, 8, generator=torch.Generator().manual_seed(0))).Q.T
    path = saved(tmp_path, {"R": rows.bfloat16(), "b": torch.zeros(8).bfloat16()}, ".bin")
    assert len(import_loreft(path, layer=0).directions) == 8


@pytest.mark.parametrize(
    "tensors",
    [
        {"R": R},
        {"b": B},
        {"R": R, "b": B, "extra": B},
        {"R": R, "rotate_layer": R.T, "b": B},
        {"R": R, "b": B, "bias": B},
        {"R": R, "b": B[:1]},
        {"R": R, "b": B[:, None]},
        {"R": R[0], "b": B[:1]},
        {"R": R.T, "b": torch.zeros(4)},
        {"R": R, "b": B, "W": W.T},
        {"R": R, "b": B * float("nan")},
        {"R": R * float("nan"), "b": B},
        {"R": R, "b": B, "W": W * float("inf")},
        {"R": R.int(), "b": B},
        {"R": torch.zeros(0, 4), "b": torch.zeros(0)},
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_what_is_no_intervention_is_refused(tmp_path, tensors, suffix):
    with pytest.raises(VectorFileError):
        import_loreft(saved(tmp_path, tensors, suffix), layer=0)


def test_other_files_and_places(tmp_path):
    path = saved(tmp_path, {"R": R, "b": B}, ".bin")
    with pytest.raises(HookPointError, match="site"):
        import_loreft(path, layer=0, site="post")
    (tmp_path / "text").write_text("R = 1")
    for wrong in (tmp_path / "text", tmp_path / "missing", tmp_path):
        with pytest.raises(VectorFileError):
            import_loreft(wrong, layer=0)
