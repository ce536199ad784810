import io
import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from steerlab.core.errors import InputError, VectorFileError
from steerlab.steering.formats.sae import import_sae

DECODER = torch.arange(24.0).reshape(6, 4) / 8  # exact in bfloat16 too
POINT = "blocks.2.hook_resid_pre"
CONFIG = {"d_in": 4, "d_sae": 6, "hook_name": POINT, "model_name": "gpt2-small", "normalize_activations": "none"}


def folder(tmp_path, config=CONFIG, decoder=DECODER, name="W_dec"):
    path = tmp_path / "sae"
    path.mkdir(exist_ok=True)
    (path / "cfg.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({"W_enc": torch.zeros(4, 6), name: decoder.contiguous()}, path / "sae_weights.safetensors")
    return path


def npz(tmp_path, array=None, name="W_dec", save=np.savez):
    array = DECODER.numpy() if array is None else array
    save(tmp_path / "params.npz", **{"b_dec": np.zeros(4), name: array})
    return tmp_path / "params.npz"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saelens_rows_are_vectors_at_its_hook_point(tmp_path, dtype):
    first, second = import_sae(folder(tmp_path, decoder=DECODER.to(dtype)), [5, 0])
    assert (first.values.tolist(), second.values.tolist()) == ([2.5, 2.625, 2.75, 2.875], [0.0, 0.125, 0.25, 0.375])
    assert first.hook_point.name == POINT
    card = first.card
    assert (card.name, card.method, card.model, card.extracted_at) == (
        "feature 5",
        "sae_decoder_row",
        "gpt2-small",
        POINT,
    )


def test_newer_configurations_keep_these_under_metadata(tmp_path):
    config = {"d_in": 4, "d_sae": 6, "metadata": {"hook_name": POINT, "model_name": "m"}}
    (v,) = import_sae(folder(tmp_path, config), [1])
    assert (v.hook_point.name, v.card.model) == (POINT, "m")


def test_a_transcoder_writes_elsewhere_than_it_reads(tmp_path):
    config = CONFIG | {"hook_name": "blocks.3.ln2.hook_normalized", "hook_name_out": "blocks.3.hook_mlp_out", "d_in": 9}
    (v,) = import_sae(folder(tmp_path, config | {"d_out": 4}), [1])
    assert v.hook_point.name == "blocks.3.hook_mlp_out"


def test_a_normalised_space_is_named(tmp_path):
    config = CONFIG | {"normalize_activations": "expected_average_only_in"}
    assert "normalised by 'expected_average_only_in'" in import_sae(folder(tmp_path, config), [1])[0].card.notes


def test_what_is_passed_overrules_the_file(tmp_path):
    (v,) = import_sae(folder(tmp_path), [1], hook_point="blocks.7.hook_resid_post", model="other")
    assert (v.hook_point.name, v.card.model) == ("blocks.7.hook_resid_post", "other")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ">f4"])
def test_gemma_scope_rows_are_read(tmp_path, save, dtype):
    path = npz(tmp_path, DECODER.numpy().astype(dtype), save=save)
    rows = import_sae(path, [5, 0, 5], hook_point="blocks.20.hook_resid_post", model="gemma-2-2b")
    assert [v.values.tolist() for v in rows] == [DECODER[i].tolist() for i in (5, 0, 5)]
    assert {v.hook_point.name for v in rows} == {"blocks.20.hook_resid_post"}
    assert rows[0].card.model == "gemma-2-2b"


def test_gemma_scope_needs_a_hook_point(tmp_path):
    with pytest.raises(VectorFileError, match="pass hook_point"):
        import_sae(npz(tmp_path), [0])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("features", [[], 3, "3", [-1], [True], [1.5]])
def test_features_are_indices(tmp_path, features):
    with pytest.raises(InputError, match="list of indices"):
        import_sae(folder(tmp_path), features)


def test_a_feature_that_is_not_there(tmp_path):
    for path in (folder(tmp_path), npz(tmp_path)):
        with pytest.raises(VectorFileError, match="6 features, numbered from 0; there is no feature 6"):
            import_sae(path, [0, 6], hook_point=POINT)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "Cannot read"),
        ("[" * 100_000, "Cannot read"),
        ("[]", "list"),
        (CONFIG | {"d_sae": 7}, r"states \[7, 4\]"),
        (CONFIG | {"d_in": 5}, r"states \[6, 5\]"),
        (CONFIG | {"d_in": "4"}, "no whole number"),
        (CONFIG | {"hook_name": 5}, "no text"),
        (CONFIG | {"hook_name": "blocks.2.attn.hook_z"}, "hook_z"),
        (CONFIG | {"hook_name": "model.layers.2"}, r"model\.layers\.2"),
        ({}, "pass hook_point"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path, config, reason):
    with pytest.raises(VectorFileError, match=reason):
        import_sae(folder(tmp_path, config), [0])


@pytest.mark.parametrize(
    "options",
    [
        {"decoder": DECODER[0]},
        {"decoder": DECODER.to(torch.int32)},
        {"name": "decoder"},
        {"decoder": DECODER * float("nan")},
    ],
)
def test_weights_that_do_not_fit(tmp_path, options):
    with pytest.raises(VectorFileError):
        import_sae(folder(tmp_path, **options), [0])


@pytest.mark.parametrize(
    "array",
    [
        DECODER[0].numpy(),
        np.arange(24).reshape(6, 4),
        np.asfortranarray(DECODER.numpy()),
        np.full((6, 4), None, dtype=object),
        np.full((6, 4), np.inf),
        np.zeros((6, 4), dtype=complex),
        np.zeros((0, 4)),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, array):
    with pytest.raises(VectorFileError):
        import_sae(npz(tmp_path, array), [0], hook_point=POINT)


def test_missing_files(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path / "nowhere.npz"):
        with pytest.raises(VectorFileError):
            import_sae(path, [0], hook_point=POINT)
    with pytest.raises(VectorFileError, match="W_dec"):
        import_sae(npz(tmp_path, name="W_enc"), [0], hook_point=POINT)


def test_an_array_that_claims_more_than_there_is_is_not_made(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1 << 10)})
    with zipfile.ZipFile(tmp_path / "params.npz", "w") as archive:
        archive.writestr("W_dec.npy", header.getvalue() + bytes(64))
    with pytest.raises(VectorFileError, match="does not fill"):
        import_sae(tmp_path / "params.npz", [0], hook_point=POINT)
