import json

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


# --- pyreft's other interventions, as torch's own state_dict keeps them -----------------------------------------------


class Rotation(torch.nn.Module):
    def __init__(self, width=6, rank=2):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.nn.init.orthogonal_(torch.empty(width, rank)))


class Intervention(torch.nn.Module):
    """Parameters and buffers named as pyreft's ConsReFT and LobiReFT name them; with `linear`, as its DiReFT does."""

    def __init__(self, linear=False):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("embed_dim", torch.tensor(6))
        self.register_buffer("interchange_dim", torch.tensor(6))
        self.rotate_layer = torch.nn.utils.parametrizations.orthogonal(Rotation())
        self.learned_source = torch.nn.Linear(6, 2) if linear else torch.nn.Parameter(torch.rand(2))
        with torch.no_grad():  # as training moves it
            self.rotate_layer.parametrizations.weight.original.add_(0.3 * torch.randn(6, 2).tril(-1))

    @property
    def rows(self):
        return self.rotate_layer.weight.detach().T


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_constant_loreft_is_read_where_its_kind_is_said(tmp_path, suffix):
    made = Intervention()
    found = import_loreft(saved(tmp_path, made.state_dict(), suffix), layer=3, kind="consreft")
    torch.testing.assert_close(torch.stack([v.values for v in found.directions]), made.rows)
    assert found.values == tuple(made.learned_source.tolist())
    assert (found.kind, found.directions[0].card.method) == ("consreft", "consreft")
    h = torch.randn(6)
    edited = h.clone()
    for direction, value in found.settings():
        edited = edited + (value - edited @ direction.unit) * direction.unit
    torch.testing.assert_close(edited, (h + made.rows.T @ (made.learned_source - made.rows @ h)).detach())


def test_a_lobireft_is_a_vector_that_is_added(tmp_path):
    made = Intervention()
    found = import_loreft(saved(tmp_path, made.state_dict(), ".bin"), layer=3, kind="lobireft")
    torch.testing.assert_close(found.addition().values, (made.rows.T @ made.learned_source).detach())
    assert found.addition().hook_point.name == "blocks.3.hook_resid_post"
    with pytest.raises(PlanError, match=r"take addition\(\)"):
        found.settings()


def test_kinds_of_the_same_names_are_not_guessed(tmp_path):
    path = saved(tmp_path, Intervention().state_dict(), ".bin")
    with pytest.raises(VectorFileError, match=r"consreft or a lobireft.*kind='consreft' or kind='lobireft'"):
        import_loreft(path, layer=3)
    found = import_loreft(path, layer=3, kind="consreft")
    with pytest.raises(PlanError, match="take settings"):
        found.addition()


@pytest.mark.parametrize("kind", ["consreft", "lobireft"])
def test_the_configuration_beside_the_file_says_which_it_is(tmp_path, kind):
    stated = f"<class 'pyreft.interventions.{kind.capitalize()}Intervention'>"
    (tmp_path / "config.json").write_text(json.dumps({"intervention_types": [stated, stated]}))
    assert import_loreft(saved(tmp_path, Intervention().state_dict(), ".bin"), layer=3).kind == kind


@pytest.mark.parametrize(
    "config",
    ["", "[]", '{"intervention_types": 3}', '{"intervention_types": ["a.Consreft", "Lobireft"]}'],
)
def test_a_configuration_that_says_nothing_decides_nothing(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(VectorFileError, match="consreft or a lobireft"):
        import_loreft(saved(tmp_path, Intervention().state_dict(), ".bin"), layer=3)


def test_a_direft_is_refused_by_name_and_a_loreft_of_the_same_names_is_read(tmp_path):
    made = Intervention(linear=True)
    path = saved(tmp_path, made.state_dict(), ".bin")
    with pytest.raises(VectorFileError, match=r"loreft or a direft.*kind='loreft'\. A direft adds"):
        import_loreft(path, layer=3)
    (tmp_path / "config.json").write_text('{"intervention_types": ["pyreft.interventions.DireftIntervention"]}')
    with pytest.raises(VectorFileError, match="a direft intervention"):
        import_loreft(path, layer=3)
    found = import_loreft(path, layer=3, kind="loreft")
    torch.testing.assert_close(found.weight, made.learned_source.weight.detach())


def test_a_noreft_is_refused_by_name(tmp_path):
    tensors = {"proj_layer.weight": R, "proj_layer.bias": B, "learned_source.weight": W, "learned_source.bias": B}
    with pytest.raises(VectorFileError, match="NoReFT"):
        import_loreft(saved(tmp_path, tensors, ".bin"), layer=3)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("kind", ["lobireft", "direft"])
def test_a_kind_that_the_names_contradict_is_refused(tmp_path, kind):
    with pytest.raises(VectorFileError, match=r"kind is one of|not lobireft"):
        import_loreft(saved(tmp_path, {"R": R, "b": B}, ".bin"), layer=3, kind=kind)


def test_a_parametrisation_without_its_base_is_refused(tmp_path):
    tensors = Intervention().state_dict()
    del tensors["rotate_layer.parametrizations.weight.0.base"]
    with pytest.raises(VectorFileError, match="its base as None"):
        import_loreft(saved(tmp_path, tensors, ".bin"), layer=3, kind="consreft")
