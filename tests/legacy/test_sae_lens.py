"""Autoencoders that SAELens made and saved, read here, against SAELens itself.

To be run by `make test-legacy`: SAELens takes HookedTransformer from TransformerLens, which version 4 does not have.
Our engine wants version 4, so plans steer a plain Hugging Face model here, and SAELens its own.
"""

import importlib
import importlib.metadata
import importlib.util
import os
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.errors import PlanError, VectorFileError
from tests.steering import test_sae_layouts as layouts

VERSION = importlib.metadata.version("transformer-lens")
if not VERSION.startswith("3.") or importlib.util.find_spec("sae_lens") is None:
    reason = f"SAELens is not here, or TransformerLens {VERSION} is not 3; `make test-legacy` makes an environment"
    if os.environ.get("STEERLAB_REQUIRE_LEGACY") and VERSION.startswith("3."):
        raise ImportError(reason)
    pytest.skip(reason, allow_module_level=True)

sae_lens = importlib.import_module("sae_lens")
loaders = importlib.import_module("sae_lens.loading.pretrained_sae_loaders")
registry = importlib.import_module("sae_lens.registry")

pytestmark = pytest.mark.legacy

WIDTH, FEATURES, LAYER = 64, 24, 1
POINT = f"blocks.{LAYER}.hook_resid_post"
SOME = [7, 0, 23, 7]
STREAMS = torch.randn(4, 9, WIDTH, generator=torch.Generator().manual_seed(5))


def random_sae(architecture, training=False, hooks=None, **options):
    """One of SAELens's autoencoders, all of whose parameters are random, thresholds of either sign included."""
    classes = registry.SAE_TRAINING_CLASS_REGISTRY if training else registry.SAE_CLASS_REGISTRY
    made, config = classes[architecture]
    metadata = sae_lens.saes.sae.SAEMetadata(**{"model_name": "tiny", "hook_name": POINT, **(hooks or {})})
    sae = made(config(d_in=WIDTH, d_sae=FEATURES, metadata=metadata, **options))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, values in sae.named_parameters():
            size = {"W_enc": WIDTH**-0.5, "W_dec": 0.5}.get(name, 0.25)
            values.copy_(size * torch.randn(values.shape, generator=rng))
        if hasattr(sae, "topk_threshold"):
            sae.topk_threshold.fill_(0.4)
    return sae


def check_activations(ours, theirs, streams):
    """Those of all features, which SAELens gives too."""
    with torch.no_grad():
        expected = theirs.encode(streams)
    torch.testing.assert_close(ours.encode(streams, range(ours.d_sae)), expected, atol=1e-5, rtol=1e-5)
    return expected


def check(folder):
    """Rows and activations of some and of all features are those of the autoencoder that SAELens reads there."""
    theirs = sae_lens.SAE.load_from_disk(folder)
    ours = sl.import_sae(folder)
    assert (ours.hook_point.name, ours.model, ours.d_sae, ours.d_in) == (POINT, "tiny", FEATURES, WIDTH)
    assert torch.equal(torch.stack([v.values for v in ours.vectors(SOME)]), theirs.W_dec[SOME])
    expected = check_activations(ours, theirs, STREAMS)
    torch.testing.assert_close(ours.encode(STREAMS, SOME), expected[..., SOME], atol=1e-5, rtol=1e-5)
    assert 0.05 < float((expected > 0).float().mean()) < 0.95
    return ours


# --- what is read -------------------------------------------------------------------------------------------------

READ = {
    "standard": ("standard", {}),
    "standard, b_dec not subtracted": ("standard", {"apply_b_dec_to_input": False}),
    "jumprelu": ("jumprelu", {}),
    "jumprelu, b_dec not subtracted": ("jumprelu", {"apply_b_dec_to_input": False}),
    "gated": ("gated", {}),
    "gated, b_dec not subtracted": ("gated", {"apply_b_dec_to_input": False}),
    "topk": ("topk", {"k": 5}),
    "topk, b_dec not subtracted": ("topk", {"k": 5, "apply_b_dec_to_input": False}),
    "topk by the norms of rows": ("topk", {"k": 5, "rescale_acts_by_decoder_norm": True}),
}
TRAINED = {
    "standard": ("standard", {}),
    "gated": ("gated", {}),
    "jumprelu": ("jumprelu", {}),
    "topk": ("topk", {"k": 5}),
    "topk, plain": ("topk", {"k": 5, "rescale_acts_by_decoder_norm": False}),
    "batchtopk": ("batchtopk", {"k": 5}),
    "batchtopk, plain": ("batchtopk", {"k": 5, "rescale_acts_by_decoder_norm": False}),
    "matryoshka": ("matryoshka_batchtopk", {"k": 5, "matryoshka_widths": [6, FEATURES]}),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_saved_is_read(tmp_path, case):
    architecture, options = READ[case]
    random_sae(architecture, **options).save_model(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("case", TRAINED)
def test_what_is_saved_after_training_is_read(tmp_path, case):
    architecture, options = TRAINED[case]
    random_sae(architecture, training=True, **options).save_inference_model(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu", "topk"])
def test_a_checkpoint_of_training_is_read(tmp_path, architecture):
    random_sae(architecture, True, **({"k": 5} if architecture == "topk" else {})).save_model(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("folded", ["scale", "whitening", "norms of rows"])
def test_a_normalisation_that_was_folded_into_the_weights(tmp_path, folded):
    """How an autoencoder of a normalised stream becomes one whose features can be set."""
    kind = {"scale": "expected_average_only_in", "whitening": "covariance_whitening"}.get(folded, "none")
    sae = random_sae("jumprelu", normalize_activations=kind)
    if folded == "scale":
        sae.fold_activation_norm_scaling_factor(0.7)
    elif folded == "whitening":
        matrix = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))).Q * 1.5
        sae.fold_activation_whitening(STREAMS.flatten(0, 1).mean(0), matrix, torch.linalg.inv(matrix))
    else:
        sae.fold_W_dec_norm()
    sae.save_model(tmp_path)
    check(tmp_path).readings(SOME)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path, dtype):
    """Weights are read as they are; SAELens computes in their dtype, so a copy in float32 is asked instead."""
    random_sae("jumprelu").to(dtype=getattr(torch, dtype)).save_model(tmp_path)
    theirs = sae_lens.SAE.load_from_disk(tmp_path, dtype="float32")
    ours = sl.import_sae(tmp_path)
    assert torch.equal(torch.stack([v.values for v in ours.vectors(SOME)]), theirs.W_dec[SOME])
    check_activations(ours, theirs, STREAMS)


@pytest.mark.parametrize("case", layouts.OF_SAELENS)
def test_files_of_earlier_versions_mean_the_same_to_saelens(tmp_path, case):
    """The files of tests/steering/test_sae_layouts.py, which are written as versions from before 3 to 6 write them."""
    config, tensors, expected = layouts.OF_SAELENS[case]
    layouts.written(tmp_path, config | {"device": "cpu"}, tensors, layouts.SAELENS)
    theirs = sae_lens.SAE.load_from_disk(tmp_path, dtype="float32")
    found = check_activations(sl.import_sae(tmp_path), theirs, layouts.X)
    torch.testing.assert_close(found, expected(), atol=1e-5, rtol=1e-5)


# --- of publishers without a library, as SAELens reads them -------------------------------------------------------


@pytest.fixture
def on_disk(monkeypatch, tmp_path):
    """A folder in which SAELens's readers find what they would fetch."""

    def found(repo_id, filename, subfolder="", force_download=False):
        return str(tmp_path / subfolder / filename)

    def shapes(repo_id, filename):
        return {name: list(value.shape) for name, value in load_file(tmp_path / filename).items()}

    monkeypatch.setattr(loaders, "hf_hub_download", found)
    monkeypatch.setattr(loaders, "get_safetensors_tensor_shapes", shapes)
    return tmp_path


def as_saelens_reads(publisher, repository, name):
    """The autoencoder that SAELens makes of a folder of files."""
    options = {"d_in": layouts.WIDTH, "d_sae": layouts.FEATURES, "dtype": "float32"}
    config, weights, _ = loaders.NAMED_PRETRAINED_SAE_LOADERS[publisher](repository, name, cfg_overrides=options)
    sae = sae_lens.SAE.from_dict(loaders.handle_config_defaulting(config))
    sae.load_state_dict(weights)
    return sae


def check_small(ours, theirs):
    assert ours.hook_point.name == theirs.cfg.metadata.hook_name == layouts.POINT
    assert torch.equal(torch.stack([v.values for v in ours.vectors([3, 0])]), theirs.W_dec[[3, 0]])


@pytest.mark.parametrize("lower", [False, True])
def test_gemma_scope(on_disk, lower):
    name = "layer_5/width_16k/average_l0_71"
    folder = layouts.gemma_2(on_disk / name, lower)
    theirs = as_saelens_reads("gemma_2", "google/gemma-scope-2b-pt-res", name)
    ours = sl.import_sae(folder, hook_point=layouts.POINT)
    check_small(ours, theirs)
    check_activations(ours, theirs, layouts.X)


def test_gemma_scope_2(on_disk):
    name = "resid_post/layer_5_width_16k_l0_medium"
    folder = layouts.gemma_3(on_disk / name)
    theirs = as_saelens_reads("gemma_3", "google/gemma-scope-2-1b-pt", name)
    ours = sl.import_sae(folder)
    check_small(ours, theirs)
    check_activations(ours, theirs, layouts.X)
    assert ours.model == theirs.cfg.metadata.model_name


def test_llama_scope(on_disk):
    """Its rows; SAELens encodes with a norm of the data set, which is not in the weights."""
    name = "Llama3_1-8B-Base-L5R-8x"
    folder = layouts.llama_scope(on_disk / name)
    theirs = as_saelens_reads("llama_scope", "fnlp/Llama3_1-8B-Base-LXR-8x", name)
    check_small(sl.import_sae(folder), theirs)
    assert theirs.cfg.normalize_activations == "expected_average_only_in"


# --- what is refused ----------------------------------------------------------------------------------------------

OUT = {"hook_name": f"blocks.{LAYER}.hook_resid_mid", "hook_name_out": f"blocks.{LAYER}.hook_mlp_out"}
ACROSS = {"hooks": OUT, "d_out": WIDTH, "apply_b_dec_to_input": False}
REFUSED = {
    "abstopk": ({"k": 5}, "its encoder is a 'abstopk'"),
    "matching_pursuit": ({}, "its encoder is a 'matching_pursuit'"),
    "temporal": ({"n_heads": 2, "bottleneck_factor": 3}, "its encoder is a 'temporal'"),
    "transcoder": (ACROSS, "its encoder is a 'transcoder'"),
    "skip_transcoder": (ACROSS, "its encoder is a 'skip_transcoder'"),
    "jumprelu_transcoder": (ACROSS, "its encoder is a 'jumprelu_transcoder'"),
    "jumprelu_skip_transcoder": (ACROSS, "its encoder is a 'jumprelu_skip_transcoder'"),
}


def check_refused(sae, folder, words):
    """Its rows are vectors; its features are not encoded, and not set."""
    ours = sl.import_sae(folder)
    assert torch.equal(torch.stack([v.values for v in ours.vectors(SOME)]), sae.W_dec[SOME])
    for call in (lambda: ours.encode(STREAMS, SOME), lambda: sl.feature(ours, 0, set_to=1.0)):
        with pytest.raises(PlanError, match=words):
            call()
    return ours


@pytest.mark.parametrize("architecture", REFUSED)
def test_other_architectures_are_vectors_and_no_more(tmp_path, architecture):
    options, words = REFUSED[architecture]
    sae = random_sae(architecture, **options)
    sae.save_model(tmp_path)
    ours = check_refused(sae, tmp_path, words)
    assert ours.hook_point.name == (OUT["hook_name_out"] if "d_out" in options else POINT)


def test_every_architecture_of_saelens_is_read_or_refused():
    assert {architecture for architecture, _ in READ.values()} | set(REFUSED) == set(registry.SAE_CLASS_REGISTRY)
    trained = {architecture for architecture, _ in TRAINED.values()}
    assert trained | {"abstopk", "matching_pursuit"} == set(registry.SAE_TRAINING_CLASS_REGISTRY)


@pytest.mark.parametrize("architecture", ["batchtopk", "matryoshka_batchtopk"])
def test_a_checkpoint_whose_encoder_looks_at_the_batch_is_refused(tmp_path, architecture):
    options = {"matryoshka_widths": [6, FEATURES]} if architecture.startswith("matryoshka") else {}
    sae = random_sae(architecture, training=True, k=5, **options)
    sae.save_model(tmp_path)
    check_refused(sae, tmp_path, f"its encoder is a '{architecture}'")


@pytest.mark.parametrize(
    "kind", ["expected_average_only_in", "constant_norm_rescale", "layer_norm", "covariance_whitening"]
)
@pytest.mark.parametrize("architecture", ["standard", "topk"])
def test_normalised_streams_are_refused(tmp_path, architecture, kind):
    sae = random_sae(architecture, normalize_activations=kind, **({"k": 5} if architecture == "topk" else {}))
    sae.save_model(tmp_path)
    ours = check_refused(sae, tmp_path, f"normalised by '{kind}'")
    assert f"normalised by '{kind}'" in ours.vectors([0])[0].card.notes


def test_outputs_of_heads_are_refused(tmp_path):
    sae = random_sae("standard", reshape_activations="hook_z", hooks={"hook_name": f"blocks.{LAYER}.attn.hook_z"})
    sae.save_model(tmp_path)
    with pytest.raises(VectorFileError, match=r"sits at 'blocks\.1\.attn\.hook_z', no hook point here"):
        sl.import_sae(tmp_path)
    ours = sl.import_sae(tmp_path, hook_point=f"blocks.{LAYER}.hook_attn_out")
    with pytest.raises(PlanError, match="outputs of heads side by side"):
        ours.readings([0])


# --- what a feature does ------------------------------------------------------------------------------------------

EDITS = {
    "set": ({"set_to": 3.0}, lambda f: torch.full_like(f, 3.0)),
    "off": ({"set_to": 0.0}, torch.zeros_like),
    "set where active": ({"set_to": 3.0, "only_if_active": True}, lambda f: torch.where(f > 0, 3.0, f)),
    "scaled": ({"scale_by": -2.0}, lambda f: -2.0 * f),
}


@pytest.fixture(scope="module")
def bridge(tiny_llama_path):
    """SAELens's own model, which runs with autoencoders in it."""
    return sae_lens.SAETransformerBridge.boot_transformers(str(tiny_llama_path))


@pytest.fixture(scope="module")
def plain(tiny_llama_path):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32).eval()


def ran(plain, tokens, plan=None):
    """The stream after the layer, as the next one reads it, and the logits of the plain model, under a plan."""
    seen = []
    handle = plain.model.layers[LAYER + 1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        with torch.no_grad(), plan.applied(plain) if plan else nullcontext():
            logits = plain(tokens).logits
    finally:
        handle.remove()
    return seen[-1], logits


def changed(index, change):
    """A hook that changes one activation, at every position."""

    def hook(activations, hook):
        activations = activations.clone()
        activations[..., index] = change(activations[..., index])
        return activations

    return hook


@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "gated"])
@pytest.mark.parametrize("case", EDITS)
def test_a_feature_changes_the_model_as_in_saelens(tmp_path, plain, bridge, architecture, case):
    """Encoded, one activation changed, decoded, and what the reconstruction lacks added again."""
    sae = random_sae(architecture)
    sae.save_model(tmp_path)
    index, (options, change) = 7, EDITS[case]
    tokens = torch.randint(5, 380, (2, 12), generator=torch.Generator().manual_seed(2))
    stream, unchanged = ran(plain, tokens)
    read = sl.import_sae(tmp_path, model=plain.name_or_path)
    plan = sl.Plan(sl.feature(read, index, **options, where=sl.where.all()))
    edited, ours = ran(plain, tokens, plan)
    with torch.no_grad():
        before = sae.encode(stream)
        after = changed(index, change)(before, None)
        with bridge.saes([sae], use_error_term=True):
            hooks = [(bridge.get_sae_hook_name(sae), changed(index, change))]
            theirs = bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    assert 0 < int((before[..., index] > 0).sum()) < tokens.numel()
    torch.testing.assert_close(edited, stream + sae.decode(after) - sae.decode(before), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    assert (theirs - unchanged).abs().max() > 0.01
