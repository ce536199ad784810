import io
import pickle
import zipfile

import pytest
import torch

from steerlab.core.errors import HookPointError, VectorFileError
from steerlab.steering.formats.torch_files import export_torch, import_torch
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector, VectorSet

NAME = "blocks.3.hook_resid_post"


def vector(layer=3, site="resid_post"):
    return SteeringVector.from_tensor(torch.arange(4.0) + 0.5, layer=layer, site=site)


def saved(tmp_path, content, **options):
    torch.save(content, tmp_path / "v.pt", **options)
    return tmp_path / "v.pt"


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"])
def test_round_trip(tmp_path, site):
    vectors = VectorSet((vector(3, site), vector(0, site)))
    assert VectorSet.from_torch(vectors.to_torch(tmp_path / "v.pt")) == vectors


def test_torch_reads_what_we_write(tmp_path):
    loaded = torch.load(export_torch(tmp_path / "v.pt", vector()), weights_only=True)
    assert {key: value.tolist() for key, value in loaded.items()} == {NAME: [0.5, 1.5, 2.5, 3.5]}


def test_keys_may_be_other_names_of_hook_points(tmp_path):
    assert import_torch(saved(tmp_path, {"blocks.2.hook_in": torch.ones(4)}))[2].site == "resid_pre"


def test_layer_numbers_mean_the_site_that_is_stated(tmp_path):
    path = saved(tmp_path, {0: torch.ones(4), 7: torch.zeros(4)})
    assert [v.hook_point.name for v in import_torch(path).by_layer] == [
        "blocks.0.hook_resid_post",
        "blocks.7.hook_resid_post",
    ]
    assert import_torch(path, site="resid_pre")[7].hook_point.name == "blocks.7.hook_resid_pre"
    with pytest.raises(HookPointError, match="resid_pst"):
        import_torch(path, site="resid_pst")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_float_is_read(tmp_path, dtype):
    assert import_torch(saved(tmp_path, {1: torch.tensor([0.5, -2.0], dtype=dtype)}))[1].values.tolist() == [0.5, -2.0]


def test_a_view_and_a_parameter_are_read(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    content = {1: whole[1], 2: torch.nn.Parameter(whole[:, 1][:2].repeat(2))}
    vectors = import_torch(saved(tmp_path, content))
    assert vectors[1].values.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert vectors[2].values.tolist() == [1.0, 5.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "empty"),
        ([torch.ones(4)], "no dictionary"),
        (torch.ones(4), r"one tensor \[4\].*pass layer="),
        ({NAME: [1.0, 2.0]}, "list"),
        ({NAME: {1: torch.ones(4)}}, f"dict.* Save what is under '{NAME}' as a file of its own"),
        ({NAME: torch.ones(4, dtype=torch.int64)}, "torch.int64"),
        ({NAME: torch.ones(4, dtype=torch.bool)}, "BoolStorage"),
        ({NAME: torch.ones(4, dtype=torch.complex64)}, "ComplexFloatStorage"),
        ({NAME: torch.ones(4, 4).to_sparse()}, "refers to"),
        ({NAME: torch.ones(2, 4)}, r"\[2, 4\].*from_tensor"),
        ({NAME: torch.tensor([1.0, float("nan")])}, "NaN"),
        ({1.5: torch.ones(4)}, "type float"),
        ({True: torch.ones(4)}, "type bool"),
        ({-1: torch.ones(4)}, "no hook point.*from_tensor"),
        ({"-1": torch.ones(4)}, "got -1"),
        ({"layer 3": torch.ones(4)}, "no hook point"),
        ({NAME: torch.ones(4), "blocks.3.hook_out": torch.ones(4)}, "twice"),
        ({NAME: torch.ones(4), "blocks.2.hook_resid_pre": torch.ones(4)}, "one site"),
        ({1: torch.ones(4), 2: torch.ones(5)}, "widths"),
        ({1: torch.ones(1).expand(1 << 40)}, "more than the file"),
        ({1: bytearray(8)}, "refers to '__builtin__ bytearray'"),
    ],
)
def test_what_is_no_dictionary_of_rows_is_refused(tmp_path, content, reason):
    with pytest.raises(VectorFileError, match=reason):
        import_torch(saved(tmp_path, content))


def test_old_and_bare_pickles_are_refused(tmp_path):
    legacy = saved(tmp_path, {1: torch.ones(4)}, _use_new_zipfile_serialization=False).read_bytes()
    for data in (legacy, pickle.dumps({1: torch.ones(4)}), b"", b"PK\x03\x04" + bytes(50)):
        (tmp_path / "v").write_bytes(data)
        with pytest.raises(VectorFileError, match=r"PyTorch 1\.6 or newer"):
            import_torch(tmp_path / "v")


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """The same archive with other content in its members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))
    path.write_bytes(buffer.getvalue())
    return path


def test_a_rewritten_archive_is_still_read(tmp_path):
    path = rewritten(saved(tmp_path, {1: torch.arange(4.0)}), lambda _, data: data)
    assert import_torch(path)[1].values.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_storage_longer_than_its_record_is_refused(tmp_path):
    path = saved(tmp_path, {1: torch.arange(100.0)})
    cut = rewritten(path, lambda name, data: data[:40] if name.endswith("/data/0") else data)
    with pytest.raises(VectorFileError, match="differ in size"):
        import_torch(cut)


def test_a_compressed_archive_is_refused(tmp_path):
    path = rewritten(saved(tmp_path, {1: torch.ones(4)}), lambda _, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(VectorFileError, match="compressed"):
        import_torch(path)


@pytest.mark.usefixtures("unchecked_types")
def test_a_plan_is_no_dictionary(tmp_path):
    with pytest.raises(VectorFileError, match="not Plan"):
        export_torch(tmp_path / "v.pt", Plan(add(vector(), coef=1.0)))
    with pytest.raises(VectorFileError, match="at least one"):
        export_torch(tmp_path / "v.pt", VectorSet(()))
    assert not (tmp_path / "v.pt").exists()


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4)])
@pytest.mark.parametrize("key", [14, "14", "blocks.14.hook_resid_post"])
def test_rows_as_other_tools_keep_them(tmp_path, key, shape):
    torch.save({key: torch.arange(4.0).reshape(shape)}, tmp_path / "v.pt")
    found = import_torch(tmp_path / "v.pt")
    assert found[14].values.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4)])
def test_a_bare_tensor_is_read_at_the_layer_that_is_said(tmp_path, shape):
    torch.save(torch.arange(4.0).reshape(shape), tmp_path / "v.pt")
    found = VectorSet.from_torch(tmp_path / "v.pt", layer=14, site="mlp_out")
    assert [v.hook_point.name for v in found.by_layer] == ["blocks.14.hook_mlp_out"]
    assert found[14].values.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_several_rows_in_a_bare_tensor_are_refused(tmp_path):
    torch.save(torch.ones(3, 4), tmp_path / "v.pt")
    with pytest.raises(VectorFileError, match=r"\[3, 4\].*from_tensor"):
        import_torch(tmp_path / "v.pt", layer=14)


def test_a_layer_for_a_file_that_states_its_own_is_refused(tmp_path):
    torch.save({14: torch.ones(4)}, tmp_path / "v.pt")
    with pytest.raises(VectorFileError, match="leave layer= out"):
        import_torch(tmp_path / "v.pt", layer=3)


def test_one_layer_under_two_spellings_is_refused(tmp_path):
    torch.save({14: torch.ones(4), "14": torch.zeros(4)}, tmp_path / "v.pt")
    with pytest.raises(VectorFileError, match="twice"):
        import_torch(tmp_path / "v.pt")
