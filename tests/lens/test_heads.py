"""Attention heads against plain Hugging Face models: what is read of them, and what a change of one does."""

import pytest
import torch

import steerlab as sl
from steerlab.engines.lens._heads import head_outputs
from steerlab.engines.lens._hooking import attached
from tests.tiny_models import FAMILIES, build_tiny_llama

NAMES = sorted(name for name in FAMILIES if not name.endswith("_narrow"))
NORM_AFTER_ATTENTION = ["gemma2", "gemma3", "olmo2"]
SUMS = [name for name in NAMES if name not in NORM_AFTER_ATTENTION]
PROMPTS = [[5, 60, 7, 90], [12, 200, 31, 44, 5, 66, 71]]
LAYER, HEAD = 1, 3  # the last of four query heads, of two key-value heads


def output_projection(plain, layer):
    """The module of a plain Hugging Face model that mixes the heads."""
    names = (".self_attn.o_proj", ".attn.c_proj", ".attention.dense")
    found = [module for name, module in plain.named_modules() if name.endswith(tuple(f".{layer}{n}" for n in names))]
    assert len(found) == 1
    return found[0]


def logits_with(plain, prompt, layer, change):
    """Logits and the heads' z [pos, head, d_head] of a plain model, after `change` acted on z."""
    seen = []

    def act(_, args):
        z = args[0].unflatten(-1, (4, -1)).clone()
        seen.append(z[0].clone())
        change(z)
        return (z.flatten(-2), *args[1:])

    handle = output_projection(plain, layer).register_forward_pre_hook(act)
    try:
        with torch.no_grad():
            logits = plain(torch.tensor([prompt])).logits[0]
    finally:
        handle.remove()
    return logits, seen[0]


@pytest.mark.parametrize("name", NAMES)
def test_z_is_what_the_plain_model_mixes(family, name):
    engine, plain = family(name)
    found = engine.capture(PROMPTS, layers=[LAYER, 2], site="z")
    assert found[LAYER].shape == (11, 4, 16)
    for index, prompt in enumerate(PROMPTS):
        for layer in found.layers:
            expected = logits_with(plain, prompt, layer, lambda z: None)[1]
            torch.testing.assert_close(found.of(index, layer), expected, atol=1e-5, rtol=1e-4)


def test_pooled_and_generated_z(family):
    engine, _ = family("llama")
    where = ~sl.where.index(0)
    each = engine.capture(PROMPTS, layers=LAYER, site="z", where=where)
    for pool, pooled in (("mean", lambda rows: rows.mean(dim=0)), ("last", lambda rows: rows[-1])):
        found = engine.capture(PROMPTS, layers=LAYER, site="z", where=where, pool=pool)
        assert found[LAYER].shape == (2, 4, 16)
        torch.testing.assert_close(found[LAYER], torch.stack([pooled(each.of(i, LAYER)) for i in (0, 1)]))
    grown = engine.capture(PROMPTS, layers=LAYER, site="z", max_new_tokens=4)
    whole = [[*p, *c[:-1]] for p, c in zip(PROMPTS, grown.completion_token_ids, strict=True)]
    torch.testing.assert_close(grown[LAYER], engine.capture(whole, layers=LAYER, site="z")[LAYER], atol=1e-5, rtol=1e-4)


def test_z_is_read_after_the_edits_of_a_plan(family):
    engine, plain = family("llama")
    vector = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(1)), layer=0)
    found = engine.capture(PROMPTS[:1], layers=LAYER, site="z", plan=sl.Plan(sl.add(vector, coef=2.0, where="all")))
    hook = plain.model.layers[0].register_forward_hook(lambda *call: call[2] + 2.0 * vector.values)
    expected = logits_with(plain, PROMPTS[0], LAYER, lambda z: None)[1]
    hook.remove()
    torch.testing.assert_close(found[LAYER], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SUMS)
def test_a_head_vector_is_a_change_of_that_heads_z(family, name):
    """Every token but the first, as in generation, where a plan never reaches all of them."""
    engine, plain = family(name)
    check_exact(engine, plain)


def check_exact(engine, plain):
    values = torch.randn(16, generator=torch.Generator().manual_seed(2))

    def change(z):
        z[0, 1:, HEAD] += values

    v = sl.head_vector(engine, LAYER, HEAD, values)
    assert (v.site, v.layer, v.name) == ("attn_out", LAYER, f"head {LAYER}.{HEAD}")
    plan = sl.Plan(sl.add(v, coef=1.0, where=~sl.where.index(0)))
    for prompt in PROMPTS:
        steered = logits_with(plain, prompt, LAYER, change)[0]
        before = logits_with(plain, prompt, LAYER, lambda z: None)[0]
        torch.testing.assert_close(engine.logits(prompt, plan=plan), steered, atol=2e-4, rtol=1e-4)
        assert (steered - before)[1:].abs().max() > 0.01


def test_a_bias_of_the_output_projection_stays(tmp_path):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(build_tiny_llama(tmp_path / "plain", attention_bias=True)).eval()
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.o_proj.bias.normal_(generator=torch.Generator().manual_seed(3))
    plain.save_pretrained(tmp_path / "plain")
    with sl.load(tmp_path / "plain", device="cpu") as engine:
        check_exact(engine, plain)


@pytest.mark.parametrize("name", NORM_AFTER_ATTENTION)
def test_heads_before_a_norm_are_read_and_refused_as_vectors(family, name):
    engine, _ = family(name)
    with pytest.raises(sl.HookPointError, match="comes after a norm"):
        sl.head_vector(engine, LAYER, HEAD, torch.ones(16))


def test_the_probe_notices_a_sum_that_is_none(family):
    """Something that the structure does not show: here a user's own hook that doubles what attention puts out."""
    from steerlab._runtime.model_state import state_of

    engine, _ = family("mistral")
    state_of(engine.model).known.pop("heads of layer 2", None)
    with attached(engine.model, [("blocks.2.hook_attn_out", lambda value, hook: 2 * value)]):
        with pytest.raises(sl.HookPointError, match=r"off by 0\.5"):
            head_outputs(engine.model, 2)
        engine.model(torch.tensor(PROMPTS[:1]))
    assert head_outputs(engine.model, 2).shape == (4, 16, 64)


@pytest.mark.parametrize(
    ("layer", "head", "values", "error", "words"),
    [
        (9, 0, torch.ones(16), sl.HookPointError, "numbered 0 to 2"),
        (1, 4, torch.ones(16), sl.HookPointError, "4 heads, 0 to 3; got head 4"),
        (1, -1, torch.ones(16), sl.HookPointError, "got head -1"),
        (1, 0, torch.ones(64), sl.VectorShapeError, r"shape \(16,\), got \(64,\)"),
        (1, 0, torch.ones(1, 16), sl.VectorShapeError, r"got \(1, 16\)"),
        (1, 0, torch.full((16,), torch.nan), sl.VectorValueError, "NaN"),
    ],
)
def test_what_is_no_head_is_refused(family, layer, head, values, error, words):
    engine, _ = family("llama")
    with pytest.raises(error, match=words):
        sl.head_vector(engine, layer, head, values)


def test_z_is_no_site_to_edit(family):
    engine, _ = family("llama")
    for call in (
        lambda: sl.SteeringVector.from_tensor(torch.ones(64), layer=1, site="z"),
        lambda: sl.extract(engine, sl.ContrastPairs.from_lists(["a"], ["b"]), site="z"),
    ):
        with pytest.raises(sl.HookPointError, match=r"read only.*sl\.head_vector"):
            call()
    with pytest.raises(sl.InputError, match="weights at hand"):
        sl.head_vector(object(), 1, 0, torch.ones(16))
