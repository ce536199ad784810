"""Our vectors and vector files against steering-vectors and repeng, to be run by `make test-peers`.

repeng needs another NumPy than steerlab, so it runs in an environment of its own and answers through files; see
`repeng_reference.py`. The pairs' prompts are read at their last token everywhere, by all three.
"""

import importlib.util
import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

import steerlab as sl
from tests.tiny_models import build_tiny_llama

REPENG = Path(__file__).resolve().parents[2] / ".venv-repeng" / "bin" / "python"
missing = [name for name in ("steering_vectors",) if importlib.util.find_spec(name) is None]
missing += [] if REPENG.exists() else ["repeng (.venv-repeng)"]
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError(f"not installed: {', '.join(missing)}")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not here; `make test-peers` sets them up"),
]

THINGS = ["film", "train ride"]
ENDS = ["", " today", " last week, to be honest"]  # other lengths, so that batches are padded
PAIRS = [
    (f"The {thing} was {good}{end}", f"The {thing} was {bad}{end}")
    for thing in THINGS
    for end in ENDS
    for good, bad in (("wonderful", "terrible"), ("a real pleasure", "a waste of time"))
]
TEXT = "The capital of France is Paris, and the weather there was"
LAYERS = {"smollm2": [3, 14, 28], "tiny": [1, 2, 3]}


def cosine(a, b) -> float:
    a, b = (torch.as_tensor(np.asarray(x)).double() for x in (a, b))
    return float(a @ b / (a.norm() * b.norm()))


@pytest.fixture(scope="module")
def models(tmp_path_factory, smollm2_path):
    """Per model its directory, and ours on it."""
    paths = {"smollm2": smollm2_path, "tiny": build_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")}
    with ExitStack() as stack:
        yield {name: (path, stack.enter_context(sl.load(str(path), dtype="float32"))) for name, path in paths.items()}


@pytest.fixture(scope="module", params=list(LAYERS))
def case(request, models):
    """A model's name, its directory, and ours on it."""
    return request.param, *models[request.param]


@pytest.fixture(scope="module")
def pairs() -> sl.ContrastPairs:
    return sl.ContrastPairs.from_lists([p for p, _ in PAIRS], [n for _, n in PAIRS])


@pytest.fixture(scope="module")
def plain(case):
    """The bare model and its tokenizer, for the other packages."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, path, _ = case
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def extracted(engine, pairs, method, layers, site="resid_post"):
    return sl.extract(engine, pairs, method, site, layers, sl.where.last_prompt())


def steered_logits(engine, plan):
    """Logits of TEXT under a plan, from the model itself."""
    ids = torch.tensor([engine.tokenizer(TEXT).input_ids])
    with torch.no_grad(), engine.model.hooks(fwd_hooks=plan.hooks(engine)):
        return engine.model(ids)[0]


# --- steering-vectors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "site"), [("decoder_block", "resid_post"), ("self_attn", "attn_out"), ("mlp", "mlp_out")]
)
def test_steering_vectors_mean(case, plain, pairs, kind, site):
    """Its mean of differences at layer N of a type is ours at layer N of the site: the same numbers, not scaled."""
    from steering_vectors import train_steering_vector

    name, _, engine = case
    model, tokenizer = plain
    theirs = sl.VectorSet.from_steering_vectors(
        train_steering_vector(model, tokenizer, PAIRS, layers=LAYERS[name], layer_type=kind, batch_size=12)
    )
    ours = extracted(engine, pairs, "mean_diff", LAYERS[name], site)
    assert list(theirs) == list(ours) == LAYERS[name]
    assert theirs.by_layer[0].site == site
    for layer in ours:
        assert cosine(ours[layer].values, theirs[layer].values) > 0.9999
        assert theirs[layer].norm == pytest.approx(ours[layer].norm, rel=1e-3)


def test_steering_vectors_pca(case, plain, pairs):
    """Its PCA runs over the differences and their negatives, which is the uncentred PCA of the differences."""
    from steering_vectors import pca_aggregator, train_steering_vector

    name, _, engine = case
    model, tokenizer = plain
    theirs = train_steering_vector(
        model, tokenizer, PAIRS, layers=LAYERS[name], aggregator=pca_aggregator(), batch_size=12
    )
    ours = extracted(engine, pairs, "pca_uncentred", LAYERS[name])
    for layer in ours:
        assert abs(cosine(ours[layer].values, theirs.layer_activations[layer])) > 0.999


def test_our_vectors_steer_in_steering_vectors_as_here(case, plain, pairs):
    from steering_vectors import SteeringVector

    name, _, engine = case
    model, tokenizer = plain
    ours = extracted(engine, pairs, "mean_diff", LAYERS[name])
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        unsteered = model(ids).logits[0]
        with SteeringVector(**ours.to_steering_vectors()).apply(model):
            theirs = model(ids).logits[0]
    plan = sl.Plan(*(sl.add(v, coef=1.0, where=sl.where.all()) for v in ours.by_layer))
    torch.testing.assert_close(steered_logits(engine, plan), theirs, rtol=1e-3, atol=2e-3)
    assert (theirs - unsteered).abs().max() > 0.05


# --- repeng --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_by_repeng(models, pairs, tmp_path_factory):
    """Per model the folder with what repeng, run once, made of the pairs and of a control vector of ours."""
    root = tmp_path_factory.mktemp("repeng")
    (root / "pairs.json").write_text(json.dumps({"pairs": PAIRS, "text": TEXT}))
    command = [REPENG, "-W", "ignore", Path(__file__).with_name("repeng_reference.py"), root / "pairs.json"]
    for name, (path, engine) in models.items():
        (root / name).mkdir()
        ours = extracted(engine, pairs, "mean_diff", LAYERS[name])
        command += [path, ours.to_gguf(root / name / "ours.gguf", model_hint="llama"), root / name]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(command, check=True, env=environment)
    return {name: root / name for name in models}


@pytest.fixture(scope="module")
def repeng(case, made_by_repeng):
    """The folder with what repeng made on the model, and its arrays."""
    out = made_by_repeng[case[0]]
    return out, np.load(out / "arrays.npz", allow_pickle=False)


def inner_layers(engine):
    """The layers that repeng trains on (it leaves out layer 0), without the last one."""
    return list(range(1, engine.info.n_layers - 1))


def test_repeng_layers_are_layer_outputs(case, repeng):
    """What it calls the hidden state of layer N is the stream after block N, counted from 0 as here."""
    _, _, engine = case
    texts = [text for pair in PAIRS for text in pair]
    layers = [0, *inner_layers(engine)]
    ours = engine.capture(texts, layers=layers, site="resid_post", where=sl.where.last_prompt(), pool="last")
    for layer in layers:
        np.testing.assert_allclose(ours[layer].numpy(), repeng[1][f"hidden.{layer}"], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("theirs", "ours"), [("pca_diff", "pca_centred"), ("pca_center", "pca_uncentred")])
def test_repeng_pca(case, pairs, repeng, theirs, ours):
    """Its `pca_diff` centres the differences: our pca_centred. Its `pca_center` does not.

    `pca_center` takes each prompt's distance from the middle of its pair, ± half the difference; their mean is 0, so
    that scikit-learn's centring changes nothing and the first axis is that of mean(d dᵀ): our pca_uncentred. Its
    sign is a vote of the pairs, ours that of the mean; they may differ. Its **last** layer is not the last block's
    output but that after the final norm, where no control vector is ever added; it is left out here.
    """
    _, _, engine = case
    vectors = extracted(engine, pairs, ours, inner_layers(engine))
    cosines = {layer: abs(cosine(v.values, repeng[1][f"{theirs}.{layer}"])) for layer, v in vectors.items()}
    assert min(cosines.values()) > 0.999, cosines


def test_repeng_reads_its_last_layer_after_the_final_norm(case, plain, repeng):
    """The exception of the test above, pinned: norm(resid_post) of the last layer is what it takes for that layer."""
    _, _, engine = case
    last = engine.info.n_layers - 1
    texts = [text for pair in PAIRS for text in pair]
    rows = engine.capture(texts, layers=[last], site="resid_post", where=sl.where.last_prompt(), pool="last")
    with torch.no_grad():
        normed = plain[0].model.norm(rows[last])
    np.testing.assert_allclose(normed.numpy(), repeng[1][f"hidden.{last}"], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("method", ["pca_diff", "pca_center"])
def test_repeng_files_open_here(case, repeng, method):
    _, _, engine = case
    out, arrays = repeng
    vectors = sl.VectorSet.from_gguf(out / f"{method}.gguf")
    assert list(vectors) == list(range(1, engine.info.n_layers))
    for layer, vector in vectors.items():
        assert vector.hook_point.name == f"blocks.{layer}.hook_resid_post"
        assert np.array_equal(vector.values.numpy(), arrays[f"{method}.{layer}"])


def test_our_files_open_in_repeng_and_in_the_gguf_reader(case, repeng):
    name, _, _ = case
    out, arrays = repeng
    ours = sl.VectorSet.from_gguf(out / "ours.gguf")
    assert str(arrays["ours.model_hint"]) == "llama"
    assert sorted(key for key in arrays if key.startswith("ours.") and key != "ours.model_hint") == sorted(
        f"ours.{layer}" for layer in LAYERS[name]
    )
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(out / "ours.gguf").tensors}
    for layer, vector in ours.items():
        assert np.array_equal(vector.values.numpy(), arrays[f"ours.{layer}"])
        assert np.array_equal(vector.values.numpy(), tensors[f"direction.{layer}"])


def test_our_vectors_steer_in_repeng_as_here(case, repeng):
    """The layer base, by its effect: `direction.N` in repeng is an addition to our blocks.N.hook_resid_post."""
    _, _, engine = case
    out, arrays = repeng
    ours = sl.VectorSet.from_gguf(out / "ours.gguf")

    def plan(shift):
        return sl.Plan(*(sl.add(v.at(v.layer + shift), coef=1.0, where=sl.where.all()) for v in ours.by_layer))

    theirs = torch.from_numpy(arrays["logits.steered"])
    torch.testing.assert_close(steered_logits(engine, plan(0)), theirs, rtol=1e-3, atol=2e-3)
    with pytest.warns(UserWarning, match="extracted at"):
        off_by_one = steered_logits(engine, plan(-1))
    assert (off_by_one - theirs).abs().max() > 0.05
    assert (torch.from_numpy(arrays["logits.plain"]) - theirs).abs().max() > 0.05
