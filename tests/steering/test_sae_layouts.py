"""Autoencoders written as their publishers write them, against their own encoders' definitions.

Names, shapes and configurations are those of SAELens up to 6, google/gemma-scope and gemma-scope-2, EleutherAI's
sparsify, saprmarks/dictionary_learning and fnlp's Llama Scope.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from steerlab.core.errors import PlanError, VectorFileError
from steerlab.steering.formats.sae import import_sae

WIDTH, FEATURES = 8, 12
WANTED = [3, 0, 11]
POINT = "blocks.5.hook_resid_post"
RNG = torch.Generator().manual_seed(0)
X = torch.randn(20, WIDTH, generator=RNG)


def some(*shape):
    return torch.randn(*shape, generator=RNG)


W_ENC, W_DEC, B_ENC, B_DEC = some(WIDTH, FEATURES), some(FEATURES, WIDTH), some(FEATURES) / 4, some(WIDTH)
THRESHOLD, GATE, MAG, R_MAG = some(FEATURES).abs() / 4, some(FEATURES) / 4, some(FEATURES) / 4, some(FEATURES) / 4
OURS = {"W_enc": W_ENC, "W_dec": W_DEC, "b_enc": B_ENC, "b_dec": B_DEC}


def relu(x=X - B_DEC, threshold=0.0):
    """Activations of all features; those that are not above the threshold are 0."""
    z = x @ W_ENC + B_ENC
    return torch.relu(z) * (z > threshold)


def topk(k, norms=1.0):
    z = relu() * norms
    return torch.zeros_like(z).scatter(1, z.topk(k).indices, z.topk(k).values)


def gated():
    z = (X - B_DEC) @ W_ENC
    return (z + GATE > 0) * torch.relu(R_MAG.exp() * z + MAG)


def written(folder, config, tensors, names):
    """A folder with a configuration and safetensors."""
    (folder / names[0]).parent.mkdir(parents=True, exist_ok=True)
    (folder / names[1]).parent.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / names[1])
    return folder


def check(sae, expected):
    """Rows and activations; the encoder is read in parts and, by TopK, as a whole."""
    assert sae.hook_point.name == POINT
    assert (sae.d_sae, sae.d_in) == (FEATURES, WIDTH)
    torch.testing.assert_close(torch.stack([v.values for v in sae.vectors(WANTED)]), W_DEC[WANTED])
    torch.testing.assert_close(sae.encode(X, WANTED), expected[:, WANTED], atol=1e-5, rtol=1e-5)
    assert 0.05 < float((expected > 0).float().mean()) < 0.95


# --- SAELens ------------------------------------------------------------------------------------------------------

SAELENS = ("cfg.json", "sae_weights.safetensors")
OLD = {
    "model_name": "gpt2-small",
    "hook_point": POINT,
    "hook_point_layer": 5,
    "hook_point_head_index": None,
    "dataset_path": "Skylion007/openwebtext",
    "d_in": WIDTH,
    "d_sae": FEATURES,
    "dtype": "torch.float32",
    "device": "cuda",
}
V3 = {
    "architecture": "standard",
    "d_in": WIDTH,
    "d_sae": FEATURES,
    "activation_fn_str": "relu",
    "apply_b_dec_to_input": True,
    "finetuning_scaling_factor": False,
    "context_size": 128,
    "model_name": "gemma-2b",
    "hook_name": POINT,
    "hook_layer": 5,
    "hook_head_index": None,
    "prepend_bos": True,
    "dataset_path": "HuggingFaceFW/fineweb",
    "dataset_trust_remote_code": True,
    "normalize_activations": "none",
    "dtype": "float32",
    "device": "cpu",
    "sae_lens_training_version": "3.22.0",
    "activation_fn_kwargs": {},
    "neuronpedia_id": None,
    "model_from_pretrained_kwargs": {},
    "seqpos_slice": [None],
}
V6 = {
    "d_in": WIDTH,
    "d_sae": FEATURES,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {
        "sae_lens_version": "6.5.0",
        "model_name": "gemma-2b",
        "hook_name": POINT,
        "hook_head_index": None,
        "hook_name_out": None,
        "prepend_bos": True,
    },
}
GATED = {"W_enc": W_ENC, "W_dec": W_DEC, "b_dec": B_DEC, "b_gate": GATE, "b_mag": MAG, "r_mag": R_MAG}
OF_SAELENS = {
    "oldest": (OLD, OURS, relu),
    "oldest, switched off": ({**OLD, "normalize_activations": False}, OURS, relu),
    "3": (V3, OURS, relu),
    "3 with ones": ({**V3, "normalize_activations": None}, {**OURS, "scaling_factor": torch.ones(FEATURES)}, relu),
    "3 topk": ({**V3, "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}}, OURS, lambda: topk(3)),
    "5 jumprelu": (
        {**V3, "architecture": "jumprelu", "apply_b_dec_to_input": False},
        {**OURS, "threshold": THRESHOLD},
        lambda: relu(X, THRESHOLD),
    ),
    "5 gated": ({**V3, "architecture": "gated"}, GATED, gated),
    "6 standard": ({**V6, "architecture": "standard"}, OURS, relu),
    "6 jumprelu": (
        {**V6, "architecture": "jumprelu"},
        {**OURS, "threshold": THRESHOLD},
        lambda: relu(threshold=THRESHOLD),
    ),
    "6 topk by norms": (
        {**V6, "architecture": "topk", "k": 4, "rescale_acts_by_decoder_norm": True},
        OURS,
        lambda: topk(4, W_DEC.norm(dim=1)),
    ),
    "6 topk": ({**V6, "architecture": "topk", "k": 4, "rescale_acts_by_decoder_norm": False}, OURS, lambda: topk(4)),
    "6 gated": ({**V6, "architecture": "gated"}, GATED, gated),
}


@pytest.mark.parametrize("case", OF_SAELENS)
def test_saelens(tmp_path, case):
    config, tensors, expected = OF_SAELENS[case]
    sae = import_sae(written(tmp_path, config, tensors, SAELENS))
    check(sae, expected())
    assert sae.model == ("gpt2-small" if config.get("hook_point") else "gemma-2b")


@pytest.mark.parametrize(
    ("change", "tensors", "words"),
    [
        ({"normalize_activations": True}, {}, "normalised by 'expected_average_only_in'"),
        ({}, {"scaling_factor": torch.full((FEATURES,), 1.5)}, "multiplied by a scaling_factor"),
        ({"activation_fn_str": "tanh-relu"}, {}, "'tanh-relu'"),
        ({"architecture": "jumprelu_transcoder"}, {"threshold": THRESHOLD}, "'jumprelu_transcoder'"),
        ({"reshape_activations": "hook_z"}, {}, r"outputs of heads side by side \('hook_z'\)"),
    ],
)
def test_saelens_encoders_that_are_not_known(tmp_path, change, tensors, words):
    sae = import_sae(written(tmp_path, {**V3, **change}, {**OURS, **tensors}, SAELENS))
    assert len(sae.vectors([0])) == 1
    with pytest.raises(PlanError, match=words):
        sae.encode(X, [0])


def test_topk_by_norms_says_what_its_scale_is_and_refuses_nan(tmp_path):
    config, tensors, _ = OF_SAELENS["6 topk by norms"]
    sae = import_sae(written(tmp_path / "sae", config, tensors, SAELENS))
    assert sae.notes == "scaled as in the file; an activation of 1 writes the row divided by its norm"
    broken = {**tensors, "W_dec": W_DEC.index_fill(0, torch.tensor([2]), torch.nan)}
    with pytest.raises(VectorFileError, match="NaN or infinite"):
        import_sae(written(tmp_path / "broken", config, broken, SAELENS)).encode(X, [0])


# --- Gemma Scope --------------------------------------------------------------------------------------------------


def gemma_2(folder, lower=False):
    held = {**OURS, "threshold": THRESHOLD}
    folder.mkdir(parents=True)
    named = {name.replace("W", "w") if lower else name: value.numpy() for name, value in held.items()}
    np.savez(folder / "params.npz", **named)
    return folder


@pytest.mark.parametrize("lower", [False, True])
def test_gemma_scope(tmp_path, lower):
    folder = gemma_2(tmp_path / "layer_5" / "width_16k" / "average_l0_71", lower)
    for path in (folder, folder / "params.npz"):
        check(import_sae(path, hook_point=POINT), relu(X, THRESHOLD))


OF_GEMMA_3 = {
    "hf_hook_point_in": "model.layers.5.output",
    "hf_hook_point_out": "model.layers.5.output",
    "width": FEATURES,
    "model_name": "google/gemma-3-1b-pt",
    "architecture": "jump_relu",
    "l0": 60,
    "affine_connection": False,
    "type": "sae",
}


def gemma_3(tmp_path, **change):
    tensors = {"w_enc": W_ENC, "w_dec": W_DEC, "b_enc": B_ENC, "b_dec": B_DEC, "threshold": THRESHOLD}
    return written(tmp_path, {**OF_GEMMA_3, **change}, tensors, ("config.json", "params.safetensors"))


def test_gemma_scope_2(tmp_path):
    sae = import_sae(gemma_3(tmp_path))
    check(sae, relu(X, THRESHOLD))
    assert sae.model == "google/gemma-3-1b-pt"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hf_hook_point_in": "model.layers.5.pre_feedforward_layernorm.output"}, "an edit reads where it writes"),
        ({"affine_connection": True}, "affine connection"),
        ({"architecture": "topk"}, "a 'topk', and jump_relu"),
    ],
)
def test_gemma_scope_2_encoders_that_are_not_known(tmp_path, change, words):
    with pytest.raises(PlanError, match=words):
        import_sae(gemma_3(tmp_path, **change)).encode(X, [0])


def test_module_paths_that_are_no_layers_output_need_a_hook_point(tmp_path):
    inner = "model.layers.5.self_attn.o_proj.input"
    with pytest.raises(VectorFileError, match="pass hook_point"):
        import_sae(gemma_3(tmp_path, hf_hook_point_in=inner, hf_hook_point_out=inner))


# --- sparsify -----------------------------------------------------------------------------------------------------

SPARSIFY = {
    "activation": "topk",
    "expansion_factor": 32,
    "normalize_decoder": True,
    "num_latents": FEATURES,
    "k": 4,
    "multi_topk": False,
    "skip_connection": False,
    "transcode": False,
    "d_in": WIDTH,
}


def sparsify(tmp_path, name="layers.5", **change):
    tensors = {"encoder.weight": W_ENC.T, "encoder.bias": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}
    return written(tmp_path / name, {**SPARSIFY, **change}, tensors, ("cfg.json", "sae.safetensors"))


def test_sparsify_is_read_but_not_set(tmp_path):
    sae = import_sae(sparsify(tmp_path))
    check(sae, topk(4))
    with pytest.raises(PlanError, match="TopK encoder: whether a feature is active depends on whether 4 others"):
        sae.readings([0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "groupmax"}, "'groupmax'"),
        ({"skip_connection": True}, "skip_connection"),
        ({"transcode": True}, "transcode"),
        ({"signed": True}, "signed"),
    ],
)
def test_sparsify_encoders_that_are_not_known(tmp_path, change, words):
    with pytest.raises(PlanError, match=words):
        import_sae(sparsify(tmp_path, **change)).encode(X, [0])


def test_sparsify_of_another_module_needs_a_hook_point(tmp_path):
    with pytest.raises(VectorFileError, match="pass hook_point"):
        import_sae(sparsify(tmp_path, "layers.5.mlp"))


# --- dictionary_learning ------------------------------------------------------------------------------------------

LINEAR = {"encoder.weight": W_ENC.T, "encoder.bias": B_ENC, "decoder.weight": W_DEC.T}
K = {"k": torch.tensor(4, dtype=torch.int32), "threshold": torch.tensor(0.3)}
GATED_LINEAR = {
    "decoder_bias": B_DEC,
    "r_mag": R_MAG,
    "gate_bias": GATE,
    "mag_bias": MAG,
    "encoder.weight": W_ENC.T,
    "decoder.weight": W_DEC.T,
}
OF_CLASSES = {
    "AutoEncoder": ({**LINEAR, "bias": B_DEC}, relu),
    "AutoEncoderNew": ({**LINEAR, "decoder.bias": B_DEC}, lambda: relu(X)),
    "GatedAutoEncoder": (GATED_LINEAR, gated),
    "AutoEncoderTopK": ({**LINEAR, "b_dec": B_DEC, **K}, lambda: topk(4)),
    "BatchTopKSAE": ({**LINEAR, "b_dec": B_DEC, **K}, lambda: relu(threshold=0.3)),
    "MatryoshkaBatchTopKSAE": (
        {**OURS, **K, "group_sizes": torch.tensor([4, 8])},
        lambda: relu(threshold=0.3),
    ),
    "JumpReluAutoEncoder": ({**OURS, "threshold": THRESHOLD}, lambda: relu(X, THRESHOLD)),
}


def dictionary(tmp_path, name, tensors, **change):
    trainer = {
        "trainer_class": "SomeTrainer",
        "dict_class": name,
        "activation_dim": WIDTH,
        "dict_size": FEATURES,
        "k": 4,
        "device": "cuda:0",
        "layer": 5,
        "lm_name": "EleutherAI/pythia-70m-deduped",
        "submodule_name": "resid_post_layer_5",
    }
    buffer = {"d_submodule": WIDTH, "io": "out", "ctx_len": 1024, "device": "cuda:0"}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {**trainer, **change}, "buffer": buffer}))
    torch.save({key: value.clone() for key, value in tensors.items()}, tmp_path / "ae.pt")
    return tmp_path


@pytest.mark.parametrize("name", OF_CLASSES)
def test_dictionary_learning(tmp_path, name):
    tensors, expected = OF_CLASSES[name]
    sae = import_sae(dictionary(tmp_path, name, tensors))
    check(sae, expected())
    assert sae.model == "EleutherAI/pythia-70m-deduped"


def test_dictionary_learning_says_what_it_lacks(tmp_path):
    tensors = OF_CLASSES["AutoEncoder"][0]
    with pytest.raises(VectorFileError, match="dict_class 'IdentityDict'; of dictionary_learning these are read"):
        import_sae(dictionary(tmp_path, "IdentityDict", tensors))
    with pytest.raises(VectorFileError, match="pass hook_point"):
        import_sae(dictionary(tmp_path, "AutoEncoder", tensors, submodule_name=None))
    with pytest.raises(VectorFileError, match=r"holds W_dec \[12, 8\], its configuration states \[13, 8\]"):
        import_sae(dictionary(tmp_path, "AutoEncoder", tensors, dict_size=13))
    del tensors["decoder.weight"]
    with pytest.raises(VectorFileError, match=r"ae\.pt holds no decoder\.weight; it holds bias, encoder\.bias"):
        import_sae(dictionary(tmp_path, "AutoEncoder", tensors))
    torch.save({"W_dec": W_DEC, "run": print}, tmp_path / "ae.pt")
    with pytest.raises(VectorFileError, match="refers to tensors and nothing else"):
        import_sae(tmp_path)


# --- Llama Scope --------------------------------------------------------------------------------------------------


LLAMA_SCOPE = {
    "act_fn": "jumprelu",
    "apply_decoder_bias_to_pre_encoder": False,
    "d_model": WIDTH,
    "d_sae": FEATURES,
    "dataset_average_activation_norm": {"in": 17.125, "out": 17.125},
    "dtype": "torch.bfloat16",
    "expansion_factor": 8,
    "hook_point_in": POINT,
    "hook_point_out": POINT,
    "jump_relu_threshold": 0.52734375,
    "norm_activation": "dataset-wise",
    "sparsity_include_decoder_norm": True,
    "top_k": 50,
    "use_decoder_bias": True,
}


def llama_scope(folder):
    names = ("hyperparams.json", "checkpoints/final.safetensors")
    return written(folder, LLAMA_SCOPE, {**LINEAR, "decoder.bias": B_DEC}, names)


def test_llama_scope(tmp_path):
    sae = import_sae(llama_scope(tmp_path / "Llama3_1-8B-Base-L5R-8x"))
    assert sae.hook_point.name == POINT
    torch.testing.assert_close(torch.stack([v.values for v in sae.vectors(WANTED)]), W_DEC[WANTED])
    assert "normalised by 'dataset-wise'" in sae.vectors([0])[0].card.notes
    with pytest.raises(
        PlanError, match="normalised by 'dataset-wise', and its threshold counts the decoders' norms in"
    ):
        sae.encode(X, [0])


def test_a_folder_without_an_autoencoder_names_what_is_read(tmp_path):
    with pytest.raises(VectorFileError, match=r"holds none of: cfg\.json and sae_weights\.safetensors; cfg\.json and"):
        import_sae(tmp_path)
