"""Features of sparse autoencoders, against the encoders' definitions in plain torch on plain Hugging Face models."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.errors import InputError, PlanError, VectorFileError, VectorShapeError

WIDTH, FEATURES, LAYER = 64, 24, 1
POINT = f"blocks.{LAYER}.hook_resid_post"
PROMPT = "The ferry leaves the harbour at seven"
KINDS = ["relu", "relu, less b_dec", "jumprelu", "gated", "gemma scope"]


def weights(seed=0, width=WIDTH):
    """An autoencoder whose features are active at about half of the tokens."""
    rng = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=rng)

    return {
        "W_enc": some(width, FEATURES) / width**0.5,
        "W_dec": some(FEATURES, width) / 2,
        "b_enc": some(FEATURES) / 4,
        "b_dec": some(width) / 4,
        "threshold": some(FEATURES) / 4,
        "b_gate": some(FEATURES) / 4,
        "b_mag": some(FEATURES) / 4,
        "r_mag": some(FEATURES) / 4,
    }


NEEDED = {"relu": ["b_enc"], "jumprelu": ["b_enc", "threshold"], "gated": ["b_gate", "b_mag", "r_mag"]}


def saved(folder, kind, parts, **config):
    """An autoencoder in one of the layouts."""
    folder.mkdir(exist_ok=True)
    if kind == "gemma scope":
        names = ["W_enc", "W_dec", "b_dec", *NEEDED["jumprelu"]]
        np.savez(folder / "params.npz", **{name: parts[name].numpy() for name in names})
        return sl.import_sae(folder / "params.npz", hook_point=POINT)
    name = kind.partition(",")[0]
    held = {key: parts[key] for key in ["W_enc", "W_dec", "b_dec", *NEEDED.get(name, ["b_enc"])]}
    save_file({key: value.contiguous() for key, value in held.items()}, folder / "sae_weights.safetensors")
    stated = {"architecture": "standard" if name == "relu" else name, "apply_b_dec_to_input": kind != "relu"}
    stated |= {"d_in": len(parts["W_enc"]), "d_sae": FEATURES, "metadata": {"hook_name": POINT}}
    (folder / "cfg.json").write_text(json.dumps(stated | config))
    return sl.import_sae(folder)


def encoded(kind, parts, x):
    """All activations, by the definitions."""
    x = x if kind in ("relu", "gemma scope") else x - parts["b_dec"]
    if kind == "gated":
        active = (x @ parts["W_enc"] + parts["b_gate"] > 0).float()
        return active * torch.relu(x @ (parts["W_enc"] * parts["r_mag"].exp()) + parts["b_mag"])
    z = x @ parts["W_enc"] + parts["b_enc"]
    if kind in ("jumprelu", "gemma scope"):
        return torch.relu(z) * (z > parts["threshold"])
    return torch.relu(z)


@pytest.fixture(scope="module")
def plain(tiny_llama_path):
    return AutoModelForCausalLM.from_pretrained(
        tiny_llama_path, attn_implementation="eager", dtype=torch.float32
    ).eval()


def steered(plain, ids, change):
    """Logits of the plain model with a change of the stream after a layer at every token but the first."""

    def edit(module, args, output):
        stream = output[0] if isinstance(output, tuple) else output
        stream[:, 1:] += change(stream[:, 1:])

    handle = plain.model.layers[LAYER].register_forward_hook(edit)
    try:
        with torch.no_grad():
            return plain(torch.tensor([ids])).logits[0]
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_of_the_definition(tmp_path, tiny_llama_engine, kind):
    parts = weights()
    sae = saved(tmp_path / "sae", kind, parts)
    wanted = [5, 0, 23, 5]
    found = sae.activations(tiny_llama_engine, [PROMPT, "Nobody knew"], wanted)
    streams = tiny_llama_engine.capture([PROMPT, "Nobody knew"], layers=LAYER)
    expected = encoded(kind, parts, streams[LAYER])[:, wanted]
    torch.testing.assert_close(found.values, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.of(1), encoded(kind, parts, streams.of(1, LAYER))[:, wanted], atol=1e-4, rtol=1e-4)
    assert 0.1 < float((found.values > 0).float().mean()) < 0.9
    frame = found.to_frame()
    assert list(frame.columns[:4]) == ["prompt_index", "position", "token_id", "token"]
    assert "".join(frame.token[frame.prompt_index == 0]) == PROMPT


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_set_and_scaled_as_the_definition_says(tmp_path, tiny_llama_engine, plain, kind):
    parts, index = weights(1), 7
    sae = saved(tmp_path / "sae", kind, parts)
    row = parts["W_dec"][index]

    def f(x):
        return encoded(kind, parts, x)[..., [index]]

    cases = {
        "set": ({"set_to": 3.0}, lambda x: (3.0 - f(x)) * row),
        "off": ({"set_to": 0}, lambda x: -f(x) * row),
        "set where active": ({"set_to": 3.0, "only_if_active": True}, lambda x: (3.0 - f(x)) * (f(x) > 0) * row),
        "scaled": ({"scale_by": -2.0}, lambda x: -3.0 * f(x) * row),
    }
    ids = tiny_llama_engine.tokenizer(PROMPT)["input_ids"]
    before = steered(plain, ids, torch.zeros_like)
    for options, change in cases.values():
        plan = sl.Plan(sl.feature(sae, index, **options, where=~sl.where.index(0)))
        expected = steered(plain, ids, change)
        torch.testing.assert_close(tiny_llama_engine.logits(ids, plan=plan), expected, atol=2e-4, rtol=1e-4)
        assert (expected - before).abs().max() > 0.01
        assert torch.equal(tiny_llama_engine.logits(ids, plan=plan.scaled(0)), tiny_llama_engine.logits(ids))
        read = sl.Plan.from_json(json.loads(json.dumps(plan.to_json())))
        assert read.hash == plan.hash
        assert torch.equal(tiny_llama_engine.logits(ids, plan=read), tiny_llama_engine.logits(ids, plan=plan))


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from(KINDS[:4]))
def test_setting_a_feature_where_it_has_that_activation_changes_nothing(tmp_path_factory, seed, kind):
    parts = weights(seed, width=8)
    sae = saved(tmp_path_factory.mktemp("sae"), kind, parts)
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed + 1))
    for stream, now in zip(h, encoded(kind, parts, h)[:, 3], strict=True):
        edit = sl.feature(sae, 3, set_to=float(now))
        torch.testing.assert_close(edit.delta(stream), torch.zeros(8), atol=1e-5, rtol=0)


def test_worked_by_hand(tmp_path):
    """ReLU, one feature: reads 2·h₀ − 1, writes (0, 3)."""
    parts = {"W_enc": torch.tensor([[2.0], [0.0]]), "W_dec": torch.tensor([[0.0, 3.0]]), "b_enc": torch.tensor([-1.0])}
    save_file(parts | {"b_dec": torch.zeros(2)}, tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(json.dumps({"hook_name": POINT, "architecture": "standard"}))
    sae = sl.import_sae(tmp_path)
    streams = torch.tensor([[2.0, 5.0], [0.0, 5.0]])  # f = 3, and not active
    assert sae.encode(streams, [0]).tolist() == [[3.0], [0.0]]
    changes = {
        (("set_to", 4.0),): [[0.0, 3.0], [0.0, 12.0]],
        (("set_to", 4.0), ("only_if_active", True)): [[0.0, 3.0], [0.0, 0.0]],
        (("scale_by", 3.0),): [[0.0, 18.0], [0.0, 0.0]],
    }
    for options, expected in changes.items():
        assert sl.feature(sae, 0, **dict(options)).delta(streams).tolist() == expected


def test_topk_is_read_but_not_set(tmp_path, tiny_llama_engine):
    parts = weights(2)
    sae = saved(tmp_path / "sae", "topk", parts, k=4)
    stream = tiny_llama_engine.capture([PROMPT], layers=LAYER)[LAYER]
    z = (stream - parts["b_dec"]) @ parts["W_enc"] + parts["b_enc"]
    kept = torch.zeros_like(z).scatter(1, z.topk(4).indices, torch.relu(z.topk(4).values))
    torch.testing.assert_close(
        sae.activations(tiny_llama_engine, [PROMPT], range(FEATURES)).values, kept, atol=1e-4, rtol=1e-4
    )
    with pytest.raises(PlanError, match="TopK encoder: whether a feature is active depends on whether 4 others"):
        sl.feature(sae, 3, set_to=1.0)
    assert sae.vectors([3])[0].values.tolist() == parts["W_dec"][3].tolist()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architecture": "temporal"}, "a 'temporal'"),
        ({"normalize_activations": "layer_norm"}, "normalised by 'layer_norm'"),
        (
            {"metadata": {"hook_name": "blocks.1.hook_resid_pre", "hook_name_out": POINT}},
            "an edit reads where it writes",
        ),
        ({"activation_fn_str": "topk"}, "states no k"),
        ({"apply_b_dec_to_input": "yes"}, "apply_b_dec_to_input='yes'"),
    ],
)
def test_encoders_that_are_not_known_are_refused_with_the_reason(tmp_path, tiny_llama_engine, config, words):
    sae = saved(tmp_path / "sae", "relu", weights(), **config)
    assert len(sae.vectors([0, 1])) == 2
    for call in (lambda: sl.feature(sae, 0, set_to=1.0), lambda: sae.activations(tiny_llama_engine, [PROMPT], [0])):
        with pytest.raises(PlanError, match=words):
            call()


def test_weights_that_do_not_fit_are_refused(tmp_path):
    parts = weights()
    short = parts | {"b_enc": parts["b_enc"][:-1]}
    with pytest.raises(VectorFileError, match=r"b_enc \[23\]; due is \[24\]"):
        sl.feature(saved(tmp_path / "short", "relu", short), 0, set_to=1.0)
    narrow = parts | {"W_enc": parts["W_enc"][:-1]}
    with pytest.raises(VectorFileError, match="W_enc for width 63; W_dec is for 64"):
        sl.feature(saved(tmp_path / "narrow", "relu", narrow, d_in=64), 0, set_to=1.0)
    with pytest.raises(VectorFileError, match="NaN"):
        sl.feature(saved(tmp_path / "nan", "relu", parts | {"b_enc": parts["b_enc"] * torch.nan}), 0, set_to=1.0)
    np.savez(tmp_path / "params.npz", W_dec=parts["W_dec"].numpy())
    with pytest.raises(VectorFileError, match="no encoder W_enc"):
        sl.feature(sl.import_sae(tmp_path / "params.npz", hook_point=POINT), 0, set_to=1.0)
    with pytest.raises(VectorFileError, match="there is no feature 24"):
        sl.feature(saved(tmp_path / "sae", "relu", parts), 24, set_to=1.0)


@pytest.mark.usefixtures("unchecked_types")
def test_arguments_that_say_nothing_or_too_much(tmp_path, tiny_llama_engine):
    sae = saved(tmp_path / "sae", "relu", weights())
    for options in ({}, {"set_to": 1.0, "scale_by": 2.0}):
        with pytest.raises(PlanError, match="either set"):
            sl.feature(sae, 0, **options)
    with pytest.raises(PlanError, match="set_to of a feature"):
        sl.feature(sae, 0, set_to=float("inf"))
    with pytest.raises(PlanError, match=r"what sl\.import_sae\(path\) gives, got list"):
        sl.feature(sae.vectors([0]), 0, set_to=1.0)
    with pytest.raises(InputError, match="list of indices"):
        sl.feature(sae, -1, set_to=1.0)
    with pytest.raises(VectorShapeError, match="width 64, got 8"):
        sae.encode(torch.zeros(2, 8), [0])
    with pytest.raises(PlanError, match="leaves the finite range"):
        tiny_llama_engine.logits(PROMPT, plan=sl.Plan(sl.feature(sae, 0, scale_by=1e30)))
