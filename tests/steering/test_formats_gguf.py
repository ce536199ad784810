import struct

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from steerlab.core.errors import VectorFileError
from steerlab.steering.formats.gguf import export_gguf, import_gguf
from steerlab.steering.operators import ablate, add
from steerlab.steering.plan import Plan
from steerlab.steering.positions import condition, schedule, where
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet


def vector(layer=1, site="resid_post", values=(1.0, -2.0, 0.5, 3.0)):
    return SteeringVector.from_tensor(torch.tensor(values), layer=layer, site=site)


def written(tmp_path, tensors, *, architecture="controlvector", hint="llama"):
    """A file as another tool writes it."""
    writer = GGUFWriter(tmp_path / "theirs.gguf", architecture)
    if hint is not None:
        writer.add_string("controlvector.model_hint", hint)
    writer.add_array("a.list", ["one", "two"])
    writer.add_array("a.row", [1, 2, 3])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "theirs.gguf"


def test_the_gguf_package_reads_what_we_write(tmp_path):
    vectors = VectorSet((vector(3), vector(1, values=(0.0, 1.0, 0.0, 0.25))))
    reader = GGUFReader(vectors.to_gguf(tmp_path / "v.gguf", model_hint="llama"))
    assert {t.name: t.data.tolist() for t in reader.tensors} == {
        "direction.1": [0.0, 1.0, 0.0, 0.25],
        "direction.3": [1.0, -2.0, 0.5, 3.0],
    }
    assert {t.tensor_type.name for t in reader.tensors} == {"F32"}

    def text(key):
        return bytes(reader.fields[key].parts[-1]).decode()

    assert text("general.architecture") == "controlvector"
    assert text("controlvector.model_hint") == "llama"
    assert reader.fields["controlvector.layer_count"].parts[-1][0] == 2


def test_we_read_what_the_gguf_package_writes(tmp_path):
    rows = {f"direction.{n}": np.arange(5, dtype=np.float32) + n for n in (2, 1, 11)}
    vectors = import_gguf(written(tmp_path, rows))
    assert [v.hook_point.name for v in vectors.by_layer] == [f"blocks.{n}.hook_resid_post" for n in (1, 2, 11)]
    assert vectors[11].values.tolist() == [11.0, 12.0, 13.0, 14.0, 15.0]
    assert vectors[11].card.extracted_at == "blocks.11.hook_resid_post"
    assert vectors[11].card.model is None  # the hint is an architecture, not a model
    assert "'llama'" in vectors[11].card.notes


def test_round_trip(tmp_path):
    vectors = VectorSet((vector(1), vector(29)))
    assert VectorSet.from_gguf(vectors.to_gguf(tmp_path / "v.gguf", model_hint="llama")) == vectors


def test_bytes_are_stable(tmp_path):
    first = export_gguf(tmp_path / "a", vector(), model_hint="llama").read_bytes()
    assert export_gguf(tmp_path / "b", vector(), model_hint="llama").read_bytes() == first


def test_direction_0_is_read_and_never_written(tmp_path):
    path = written(tmp_path, {"direction.0": np.ones(4, dtype=np.float32)})
    assert import_gguf(path)[0].hook_point.name == "blocks.0.hook_resid_post"
    with pytest.raises(VectorFileError, match=r"begins at layer 1.*blocks\.0"):
        export_gguf(tmp_path / "v", vector(0), model_hint="llama")


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "attn_out", "mlp_out"])
def test_other_sites_cannot_be_stated(tmp_path, site):
    with pytest.raises(VectorFileError, match=f"hook_{site}"):
        VectorSet((vector(2, site),)).to_gguf(tmp_path / "v", model_hint="llama")
    assert not (tmp_path / "v").exists()


def test_a_plan_is_written_as_what_it_adds(tmp_path):
    v, w = vector(1), vector(2)
    plan = Plan(
        add(v, coef=2.0, where=where.all()),
        add(w, coef=1.0, where=where.all()),
        add(v, coef=0.5, where=where.all()),
    ).scaled(3.0)
    back = import_gguf(export_gguf(tmp_path / "v", plan, model_hint="llama"))
    torch.testing.assert_close(back[1].values, 7.5 * v.values)
    torch.testing.assert_close(back[2].values, 3.0 * w.values)


def test_a_resolved_dose_is_written_as_its_length(tmp_path):
    plan = Plan(add(vector(), dose=0.5, where=where.all()))
    with pytest.raises(VectorFileError, match="resolve"):
        export_gguf(tmp_path / "v", plan, model_hint="llama")
    back = import_gguf(export_gguf(tmp_path / "v", plan.resolved(lambda layer, site: 8.0), model_hint="llama"))
    assert back[1].norm == pytest.approx(4.0)
    assert back[1].cosine(vector()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda v: ablate(v, where=where.all()), "not an add"),
        (lambda v: add(v, coef=1.0), "some positions only"),
        (lambda v: add(v, coef=1.0, where=where.prompt()), "some positions only"),
        (lambda v: add(v, coef=1.0, where=where.all(), norm="keep"), "states more"),
        (lambda v: add(v, coef=1.0, where=where.all(), schedule=schedule.linear(1.0, 0.0, over=4)), "states more"),
        (lambda v: add(v, coef=1.0, where=where.all(), when=condition.when(v, above=0.0)), "states more"),
    ],
    ids=["another operator", "default positions", "the prompt", "kept norm", "schedule", "condition"],
)
def test_what_a_plan_states_and_the_format_cannot(tmp_path, edit, reason):
    with pytest.raises(VectorFileError, match=reason):
        export_gguf(tmp_path / "v", Plan(edit(vector())), model_hint="llama")
    assert not (tmp_path / "v").exists()


def test_nothing_to_export(tmp_path):
    with pytest.raises(VectorFileError, match="nothing to export"):
        export_gguf(tmp_path / "v", Plan(), model_hint="llama")
    with pytest.raises(VectorFileError, match="one width"):
        export_gguf(tmp_path / "v", VectorSet((vector(1), vector(2, values=(1.0, 2.0)))), model_hint="llama")


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("what", "hint"), [(3, "llama"), (None, "llama"), (vector(), ""), (vector(), 3)])
def test_wrong_arguments(tmp_path, what, hint):
    with pytest.raises(VectorFileError):
        export_gguf(tmp_path / "v", what, model_hint=hint)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "no vector"),
        ({"direction.1": np.ones((2, 4), dtype=np.float32)}, "float32"),
        ({"direction.1": np.ones(4, dtype=np.float16)}, "F16"),
        ({"direction.1": np.ones(4, dtype=np.int32)}, "ggml type"),
        ({"direction.-1": np.ones(4, dtype=np.float32)}, "direction.N"),
        ({"direction.01": np.ones(4, dtype=np.float32)}, "direction.N"),
        ({"blk.1.weight": np.ones(4, dtype=np.float32)}, "direction.N"),
        ({"direction.1": np.array([1.0, np.nan], dtype=np.float32)}, "cannot be used"),
        ({"direction.1": np.ones(4, np.float32), "direction.2": np.ones(5, np.float32)}, "widths"),
    ],
)
def test_what_is_no_set_of_directions_is_refused(tmp_path, tensors, reason):
    with pytest.raises(VectorFileError, match=reason):
        import_gguf(written(tmp_path, tensors))


def test_a_model_is_no_control_vector(tmp_path):
    with pytest.raises(VectorFileError, match="'llama', not of 'controlvector'"):
        import_gguf(written(tmp_path, {"token_embd.weight": np.ones(4, dtype=np.float32)}, architecture="llama"))


def gguf(n_tensors=0, n_entries=0, rest=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries) + rest


def text(value):
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        gguf(version=1),
        gguf(version=0x03000000),
        gguf(n_tensors=1 << 63),
        gguf(n_entries=1 << 63),
        gguf(n_entries=1, rest=struct.pack("<Q", 1 << 62)),
        gguf(n_entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 0, 1 << 60)),
        gguf(n_entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60)),
        gguf(n_entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1 << 60)),
        gguf(n_entries=1, rest=text(b"k") + struct.pack("<I", 77)),
        gguf(n_entries=1, rest=text(b"\xff\xfe") + struct.pack("<II", 4, 1)),
        gguf(n_entries=2, rest=2 * (text(b"k") + struct.pack("<II", 4, 1))),
        gguf(n_entries=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        gguf(n_tensors=1, rest=text(b"direction.1") + struct.pack("<I", 1 << 31)),
        gguf(n_tensors=1, rest=text(b"direction.1") + struct.pack("<IQIQ", 1, 1 << 62, 0, 0)),
        gguf(n_tensors=1, rest=text(b"direction.1") + struct.pack("<IQIQ", 1, 2, 0, 1 << 63) + bytes(64)),
    ],
)
def test_absurd_counts_and_offsets_are_refused(tmp_path, data):
    (tmp_path / "v").write_bytes(data)
    with pytest.raises(VectorFileError):
        import_gguf(tmp_path / "v")


def test_a_moved_vector_warns_by_both_names(tiny_llama_engine, tmp_path):
    plain = SteeringVector.from_tensor(torch.ones(64), layer=1)
    v = import_gguf(export_gguf(tmp_path / "v", plain, model_hint="llama"))[1]
    with pytest.warns(UserWarning, match=r"blocks\.1\.hook_resid_post and is applied at blocks\.2\.hook_resid_mid"):
        Plan(add(v.at(2, "resid_mid"), coef=1.0)).check(tiny_llama_engine.info)
    assert v.card == VectorCard(extracted_at="blocks.1.hook_resid_post", notes=v.card.notes)


def without_metadata(tmp_path):
    """A whole file of one vector, and not a word about it."""
    name = b"direction.2"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 4, 0, 0)
    start = -(-len(head + info) // 32) * 32
    path = tmp_path / "bare.gguf"
    path.write_bytes((head + info).ljust(start, b"\0") + np.arange(4, dtype="<f4").tobytes())
    return path


def test_a_control_vector_without_metadata_is_read_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="states no architecture"):
        found = import_gguf(without_metadata(tmp_path))
    assert found[2].values.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_control_vector_under_a_models_architecture_is_read_with_a_warning(tmp_path):
    path = written(tmp_path, {"direction.1": np.arange(4, dtype=np.float32)}, architecture="llama", hint=None)
    with pytest.warns(UserWarning, match="states the architecture 'llama'"):
        assert VectorSet.from_gguf(path)[1].values.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_row_with_dimensions_of_one_is_a_row(tmp_path):
    found = import_gguf(written(tmp_path, {"direction.1": np.arange(4, dtype=np.float32).reshape(1, 1, 4)}))
    assert found[1].values.tolist() == [0.0, 1.0, 2.0, 3.0]
