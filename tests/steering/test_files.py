import json
import os
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save as save_safetensors

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import InputError, VectorFileError
from steerlab.steering.files import load_vectors, save_vectors
from steerlab.steering.low_rank import LowRank
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet

NAME = "blocks.14.hook_resid_post"
CARD = VectorCard(
    name="joy — Freude", method="mean_diff", model="m", n_pairs=3, median_norm=2.5, versions={"torch": "2"}
)


def vector(layer=14, **kwargs):
    return SteeringVector(torch.arange(8.0) + 0.125, HookPoint(layer, **kwargs), CARD)


def file_of(tmp_path, tensors, metadata):
    path = tmp_path / "v.safetensors"
    path.write_bytes(save_safetensors(tensors, metadata=metadata))
    return path


def header(cards, version=1):
    return {"steerlab": json.dumps({"format": version, "cards": cards})}


def test_round_trip_keeps_values_place_and_card(tmp_path):
    v = vector()
    loaded = SteeringVector.load(v.save(tmp_path / "v.safetensors"))
    assert loaded == v
    assert loaded.card == v.card
    assert torch.equal(loaded.values, v.values)


def test_a_set_round_trips(tmp_path):
    vectors = VectorSet((vector(3), vector(14), vector(20)))
    assert VectorSet.load(vectors.save(tmp_path / "v.safetensors")) == vectors


def test_bytes_are_stable(tmp_path):
    first = vector().save(tmp_path / "a").read_bytes()
    assert vector().save(tmp_path / "b").read_bytes() == first
    assert SteeringVector.load(tmp_path / "a").save(tmp_path / "c").read_bytes() == first
    several = [VectorSet(tuple(map(vector, order))).save(tmp_path / "d").read_bytes() for order in ((3, 14), (14, 3))]
    assert several[0] == several[1]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = vector().save(tmp_path / "v")
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="disk full"):
        vector().scaled(2.0).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["v"]


def test_one_vector_per_place(tmp_path):
    with pytest.raises(VectorFileError, match="one vector per hook point"):
        save_vectors(tmp_path / "v", [vector(), vector()])
    with pytest.raises(VectorFileError, match="at least one"):
        save_vectors(tmp_path / "v", [])


def test_several_vectors_are_not_one(tmp_path):
    path = VectorSet((vector(3), vector(14))).save(tmp_path / "v")
    with pytest.raises(VectorFileError, match=r"VectorSet\.load"):
        SteeringVector.load(path)


def test_every_truncation_is_noticed(tmp_path):
    whole = vector().save(tmp_path / "v").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(VectorFileError):
            SteeringVector.load(tmp_path / "cut")


def test_a_changed_bit_of_a_value_is_noticed_by_its_hash(tmp_path):
    edit = LowRank(torch.eye(1, 8), torch.zeros(1, 8), torch.tensor([0.6875]))
    for saved, number in ((vector(), 7.125), (replace(vector(), low_rank=edit), 0.6875)):
        path = saved.save(tmp_path / "v")
        data = bytearray(path.read_bytes())
        data[data.rindex(struct.pack("<f", number))] ^= 1
        path.write_bytes(data)
        with pytest.raises(VectorFileError, match="another hash than stated"):
            SteeringVector.load(path)


def test_appended_bytes_are_noticed(tmp_path):
    path = vector().save(tmp_path / "v")
    path.write_bytes(path.read_bytes() + b"\0\0\0\0")
    with pytest.raises(VectorFileError):
        SteeringVector.load(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04" + b"\0" * 100,
        b"\xff" * 64,
        (10).to_bytes(8, "little") + b"[[[[[[[[[[",
        (4).to_bytes(8, "little") + b"null",
        (2).to_bytes(8, "little") + b"[]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (2).to_bytes(8, "little") + b"\xc3\x28",
    ],
    ids=["empty", "zip", "huge length", "half a list", "null", "list", "deep nesting", "not utf-8"],
)
def test_what_is_no_vector_file_is_refused(tmp_path, data):
    path = tmp_path / "v"
    path.write_bytes(data)
    with pytest.raises(VectorFileError, match="not a steerlab vector file"):
        SteeringVector.load(path)


def test_other_safetensors_are_not_ours(tmp_path):
    for metadata in (
        None,
        {"format": "pt"},
        {"steerlab": "no json"},
        {"steerlab": "[]"},
        {"steerlab": '{"format": 1}'},
    ):
        with pytest.raises(VectorFileError, match="not a steerlab vector file"):
            SteeringVector.load(file_of(tmp_path, {NAME: torch.ones(4)}, metadata))


def test_missing_files_and_folders(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(VectorFileError, match="Cannot read"):
            SteeringVector.load(path)


def test_a_newer_format_says_so(tmp_path):
    with pytest.raises(VectorFileError, match="Update steerlab"):
        SteeringVector.load(file_of(tmp_path, {NAME: torch.ones(4)}, header({NAME: {}}, version=3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(VectorFileError, match="states float32"):
        SteeringVector.load(file_of(tmp_path, {NAME: torch.ones(4, dtype=dtype)}, header({NAME: {}})))


@pytest.mark.parametrize("values", [[1.0, float("nan")], [float("inf"), 1.0], [[1.0, 2.0]], [1.0], []])
def test_unusable_values_are_refused(tmp_path, values):
    with pytest.raises(VectorFileError, match="cannot be used"):
        SteeringVector.load(file_of(tmp_path, {NAME: torch.tensor(values)}, header({NAME: {}})))


@pytest.mark.parametrize(
    "card",
    [None, [], "card", 3, {"median_norm": float("nan")}, {"median_norm": -1}, {"median_norm": "7"}, {"versions": 3}],
)
@pytest.mark.usefixtures("unchecked_types")
def test_hostile_cards_are_refused(tmp_path, card):
    with pytest.raises(VectorFileError):
        SteeringVector.load(file_of(tmp_path, {NAME: torch.ones(4)}, header({NAME: card})))


@pytest.mark.parametrize("name", ["../../etc/passwd", "blocks.1.hook_q", "blocks.-1.hook_resid_post", "", "w"])
def test_hostile_names_are_refused(tmp_path, name):
    with pytest.raises(VectorFileError):
        SteeringVector.load(file_of(tmp_path, {name: torch.ones(4)}, header({name: {}})))


def test_tensors_and_cards_must_agree(tmp_path):
    with pytest.raises(VectorFileError, match="different hook points"):
        SteeringVector.load(file_of(tmp_path, {NAME: torch.ones(4)}, header({"blocks.1.hook_resid_post": {}})))
    with pytest.raises(VectorFileError, match="different hook points"):
        SteeringVector.load(file_of(tmp_path, {}, header({})))


def test_one_place_under_two_names_is_refused(tmp_path):
    names = [NAME, "blocks.14.hook_out"]
    path = file_of(tmp_path, {name: torch.ones(4) for name in names}, header({name: {} for name in names}))
    with pytest.raises(VectorFileError):
        load_vectors(path)
    with pytest.raises(VectorFileError):
        VectorSet.load(path)


def test_a_file_of_two_sites_is_no_set(tmp_path):
    path = save_vectors(tmp_path / "v", [vector(), vector(site="resid_pre")])
    assert len(load_vectors(path)) == 2
    with pytest.raises(VectorFileError):
        VectorSet.load(path)


def test_a_file_of_two_widths_is_no_set(tmp_path):
    narrow = SteeringVector(torch.ones(4), HookPoint(3), CARD)
    with pytest.raises(VectorFileError, match=r"widths \[4, 8\]"):
        VectorSet.load(save_vectors(tmp_path / "v", [vector(), narrow]))


@pytest.mark.parametrize("load", [SteeringVector.load, VectorSet.load, VectorSet.from_gguf, VectorSet.from_torch])
def test_what_is_far_too_large_is_not_read(tmp_path, load):
    path = tmp_path / "model"
    path.touch()
    os.truncate(path, (1 << 30) + 1)  # no byte of it is on the disk
    with pytest.raises(VectorFileError, match="Is it a model"):
        load(path)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("path", [None, 3.5, "a\0b"])
@pytest.mark.parametrize("load", [SteeringVector.load, VectorSet.load, VectorSet.from_gguf, VectorSet.from_torch])
def test_what_is_no_path_is_refused(load, path):
    with pytest.raises(VectorFileError, match="Cannot read"):
        load(path)
