"""Autoencoders that sparsify and dictionary_learning made and saved, read here, against their own encoders.

To be run by `make test-peers`. SAELens needs a TransformerLens before 4; see tests/legacy/test_sae_lens.py.
"""

import importlib.util
import json
import os
import sys
from types import ModuleType

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import PlanError, VectorFileError

missing = [name for name in ("sparsify", "dictionary_learning") if importlib.util.find_spec(name) is None]
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError(f"not installed: {', '.join(missing)}")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not here; `make test-peers` sets them up"),
]

WIDTH, FEATURES, LAYER = 16, 32, 5
POINT = f"blocks.{LAYER}.hook_resid_post"
SOME = [7, 0, 23, 7]
STREAMS = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(5))


def filled(autoencoder, **given):
    """The same, with random parameters; those that are named are filled with a number."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for values in autoencoder.parameters():
            size = {2: WIDTH**-0.5, 1: 0.25}[values.ndim]
            values.copy_(size * torch.randn(values.shape, generator=rng))
        for name, number in given.items():
            getattr(autoencoder, name).fill_(number)
    return autoencoder


def check(ours, rows, encode):
    """Rows, and activations of some and of all features."""
    assert (ours.hook_point.name, ours.d_sae, ours.d_in) == (POINT, FEATURES, WIDTH)
    assert torch.equal(torch.stack([v.values for v in ours.vectors(SOME)]), rows[SOME])
    with torch.no_grad():
        expected = encode(STREAMS)
    torch.testing.assert_close(ours.encode(STREAMS, range(FEATURES)), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.encode(STREAMS, SOME), expected[:, SOME], atol=1e-5, rtol=1e-5)
    assert 0.05 < float((expected > 0).float().mean()) < 0.95


# --- sparsify -----------------------------------------------------------------------------------------------------


def sparse_coder(folder, **options):
    """One of sparsify's autoencoders, which is saved in the folder."""
    from sparsify import SparseCoder, SparseCoderConfig

    coder = filled(SparseCoder(WIDTH, SparseCoderConfig(**{"num_latents": FEATURES, "k": 4, **options})))
    coder.save_to_disk(folder)
    return coder


def dense(coder):
    """Its encoder, with activations of all features: it gives those of the active ones."""

    def encode(streams):
        found = coder.encode(streams)
        return torch.zeros(len(streams), FEATURES).scatter(1, found.top_indices, found.top_acts)

    return encode


@pytest.mark.parametrize(
    "options",
    [{}, {"num_latents": 0, "expansion_factor": 2}, {"multi_topk": True, "normalize_decoder": False}, {"k": 30}],
    ids=["stated width", "expanded", "multi_topk", "some of the k are negative"],
)
def test_sparsify(tmp_path, options):
    folder = tmp_path / f"layers.{LAYER}"
    coder = sparse_coder(folder, **options)
    ours = sl.import_sae(folder)
    check(ours, coder.W_dec, dense(coder))
    with pytest.raises(PlanError, match=f"TopK encoder: whether a feature is active .* {coder.cfg.k} others"):
        sl.feature(ours, 0, set_to=1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "groupmax"}, "its activation is 'groupmax', and topk is what is known"),
        ({"transcode": True}, "states transcode"),
        ({"skip_connection": True}, "states skip_connection"),
    ],
)
def test_other_encoders_of_sparsify_are_vectors_and_no_more(tmp_path, options, words):
    coder = sparse_coder(tmp_path / f"layers.{LAYER}", **options)
    ours = sl.import_sae(tmp_path / f"layers.{LAYER}")
    assert torch.equal(torch.stack([v.values for v in ours.vectors(SOME)]), coder.W_dec[SOME])
    for call in (lambda: ours.encode(STREAMS, SOME), lambda: sl.feature(ours, 0, set_to=1.0)):
        with pytest.raises(PlanError, match=words):
            call()


def test_sparsify_in_a_layer_needs_a_hook_point(tmp_path):
    coder = sparse_coder(tmp_path / f"layers.{LAYER}.mlp")
    with pytest.raises(VectorFileError, match="pass hook_point"):
        sl.import_sae(tmp_path / f"layers.{LAYER}.mlp")
    assert sl.import_sae(tmp_path / f"layers.{LAYER}.mlp", hook_point=POINT).d_sae == coder.num_latents


# --- dictionary_learning ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learning():
    """The package, with a module in the place of nnsight, which only what collects activations of a model needs."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("nnsight") is None:
            nnsight = ModuleType("nnsight")
            nnsight.LanguageModel = None
            patch.setitem(sys.modules, "nnsight", nnsight)
        import dictionary_learning.dictionary
        import dictionary_learning.trainers.matryoshka_batch_top_k
        import dictionary_learning.trainers.top_k
        import dictionary_learning.training
    return dictionary_learning


def trained(learning, folder, trainer, make, **options):
    """What the package's training writes at its end, after no step, and the autoencoder of which it writes it."""
    made = []

    def filled_one(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[0]

    stated = {"trainer": trainer, "dict_class": filled_one, "activation_dim": WIDTH, "dict_size": FEATURES}
    stated |= {"layer": LAYER, "lm_name": "tiny", "submodule_name": f"resid_post_layer_{LAYER}", "device": "cpu"}
    stated |= {"steps": 10_000, **options}
    stated = {key: value for key, value in stated.items() if value is not None}
    learning.training.trainSAE([], [stated], steps=0, save_dir=str(folder), device="cpu")
    return made[0], folder / "trainer_0"


def autoencoders(learning):
    """Per case the trainer, what makes its autoencoder, and its further options."""
    trainers, dictionary = learning.trainers, learning.dictionary
    top_k, matryoshka = trainers.top_k, trainers.matryoshka_batch_top_k
    fractions = {"k": 4, "group_fractions": [0.25, 0.75]}
    return {
        "AutoEncoder": (trainers.StandardTrainer, dictionary.AutoEncoder, {}, {}),
        "AutoEncoder of p-annealing": (trainers.PAnnealTrainer, dictionary.AutoEncoder, {}, {}),
        "GatedAutoEncoder": (trainers.GatedSAETrainer, dictionary.GatedAutoEncoder, {}, {}),
        "JumpReluAutoEncoder": (trainers.JumpReluTrainer, dictionary.JumpReluAutoEncoder, {}, {}),
        "AutoEncoderTopK": (trainers.TopKTrainer, top_k.AutoEncoderTopK, {"threshold": 0.3}, {"k": 4}),
        "BatchTopKSAE": (trainers.BatchTopKTrainer, trainers.BatchTopKSAE, {"threshold": 0.3}, {"k": 4}),
        "BatchTopKSAE without a threshold": (trainers.BatchTopKTrainer, trainers.BatchTopKSAE, {}, {"k": 4}),
        "MatryoshkaBatchTopKSAE": (
            matryoshka.MatryoshkaBatchTopKTrainer,
            matryoshka.MatryoshkaBatchTopKSAE,
            {"threshold": 0.3},
            fractions,
        ),
    }


def rows_of(autoencoder):
    """Decoder rows, one per feature."""
    return autoencoder.W_dec if hasattr(autoencoder, "W_dec") else autoencoder.decoder.weight.T


CASES = ["AutoEncoder", "AutoEncoder of p-annealing", "GatedAutoEncoder", "JumpReluAutoEncoder", "AutoEncoderTopK"]
CASES += ["BatchTopKSAE", "BatchTopKSAE without a threshold", "MatryoshkaBatchTopKSAE"]


@pytest.mark.parametrize("case", CASES)
def test_dictionary_learning(learning, tmp_path, case):
    trainer, kind, given, options = autoencoders(learning)[case]
    theirs, folder = trained(learning, tmp_path, trainer, lambda *a, **k: filled(kind(*a, **k), **given), **options)
    ours = sl.import_sae(folder)
    assert ours.model == "tiny"
    check(ours, rows_of(theirs), theirs.encode)
    if case == "AutoEncoderTopK":
        with pytest.raises(PlanError, match=r"TopK encoder: whether a feature is active .* 4 others"):
            sl.feature(ours, 0, set_to=1.0)
    else:
        assert sl.feature(ours, 0, set_to=1.0).delta(STREAMS[0]).shape == (WIDTH,)


def test_an_autoencoder_new_of_earlier_versions(learning, tmp_path):
    """The package still reads what it names AutoEncoderNew, and no longer has a trainer that writes the name."""
    theirs, folder = trained(
        learning,
        tmp_path,
        learning.trainers.standard.StandardTrainerAprilUpdate,
        lambda *args: filled(learning.dictionary.AutoEncoderNew(*args)),
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["trainer"]["dict_class"] == "AutoEncoder"
    with pytest.raises(VectorFileError, match="holds no b_dec, which a relu encoder needs"):
        sl.import_sae(folder).encode(STREAMS, SOME)
    config["trainer"]["dict_class"] = "AutoEncoderNew"
    (folder / "config.json").write_text(json.dumps(config))
    check(sl.import_sae(folder), rows_of(theirs), theirs.encode)


def test_a_trainer_that_names_no_module_needs_a_hook_point(learning, tmp_path):
    kind = learning.dictionary.GatedAutoEncoder
    theirs, folder = trained(
        learning,
        tmp_path,
        learning.trainers.GatedAnnealTrainer,
        lambda *args: filled(kind(*args)),
        steps=30_000,
        submodule_name=None,
    )
    with pytest.raises(VectorFileError, match="pass hook_point"):
        sl.import_sae(folder)
    check(sl.import_sae(folder, hook_point=POINT), rows_of(theirs), theirs.encode)


def test_a_trained_autoencoder_of_a_normalised_stream(learning, tmp_path):
    """The package divides the streams by one number while it trains, and writes biases for the streams as they are."""
    streams = 7 * torch.randn(100, 64, WIDTH, generator=torch.Generator().manual_seed(6))
    made = []

    def kept(*args):
        made.append(learning.trainers.BatchTopKSAE(*args))
        return made[0]

    stated = {"trainer": learning.trainers.BatchTopKTrainer, "dict_class": kept, "k": 4, "layer": LAYER}
    stated |= {"activation_dim": WIDTH, "dict_size": FEATURES, "lm_name": "tiny", "steps": 20, "lr": 0.01}
    stated |= {"submodule_name": f"resid_post_layer_{LAYER}", "warmup_steps": 2, "threshold_start_step": 4}
    stated |= {"threshold_beta": 0.5, "device": "cpu", "seed": 0}
    data = list(streams.clone())  # it divides them in place
    learning.training.trainSAE(
        data, [stated], steps=20, save_dir=str(tmp_path), device="cpu", normalize_activations=True
    )
    assert float(made[0].threshold) > 0.5
    ours = sl.import_sae(tmp_path / "trainer_0")
    with torch.no_grad():
        expected = made[0].encode(streams[0])
    torch.testing.assert_close(ours.encode(streams[0], range(FEATURES)), expected, atol=1e-4, rtol=1e-5)
    assert 0.05 < float((expected > 0).float().mean()) < 0.5


def test_the_package_rescales_an_autoencoder_when_it_loads_it(learning, tmp_path):
    """Unless it is told otherwise; what a feature writes is the same, counted in rows of norm 1."""
    kind = learning.dictionary.AutoEncoder
    _, folder = trained(learning, tmp_path, learning.trainers.StandardTrainer, lambda *args: filled(kind(*args)))
    theirs, ours = kind.from_pretrained(folder / "ae.pt"), sl.import_sae(folder)
    rows = torch.stack([v.values for v in ours.vectors(SOME)])
    with torch.no_grad():
        found = theirs.encode(STREAMS)[:, SOME]
    torch.testing.assert_close(ours.encode(STREAMS, SOME) * rows.norm(dim=1), found, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows / rows.norm(dim=1, keepdim=True), rows_of(theirs)[SOME])
