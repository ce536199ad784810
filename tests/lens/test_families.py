"""Every family that runs on the fast engine, on tiny random models: against plain Hugging Face and against the bridge.

For families with sliding windows there are two models: one whose window is wider than any prompt here, one narrower.
"""

import itertools
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, PhiConfig

import steerlab as sl
from steerlab._runtime.families import CHECKED_FAMILIES
from steerlab._runtime.rows import Rows, left_padded
from steerlab.core._hook_points import SITES
from steerlab.core.errors import InputError
from steerlab.engines.lens import _backends as backends
from steerlab.engines.lens import _capture_task as capture_task
from steerlab.engines.lens import _generating as generating
from steerlab.engines.lens._backends import FastBackend, plain_points
from steerlab.steering._run import PlanRun
from steerlab.steering.positions.where import RowPositions
from tests.lens.helpers import random_vector
from tests.tiny_families import build_family
from tests.tiny_models import FAMILIES, build_tiny_family, save_tiny

GREEDY = sl.SamplingPolicy.greedy()
SHORT, LONG = [5, 60, 7, 90], [12, 200, 31, 44, 5, 66, 71, 80, 99, 140, 11]
PROMPTS = [SHORT, LONG, [300], [17, 18, 19, 120, 33, 250, 8]]
NEW = 10

NAMES = sorted(FAMILIES)
ONE_PER_FAMILY = [name for name in NAMES if not name.endswith("_narrow")]


def test_every_checked_family_is_here(family):
    types = {family(name)[1].config.get_text_config().model_type for name in NAMES}
    assert types == CHECKED_FAMILIES


def sites_of(engine, layer):
    return [site for site in SITES if f"blocks.{layer}.hook_{site}" in engine.model.hook_dict]


def adding(engine, layer, site="resid_post", coef=2.0, **options):
    return sl.Plan(sl.add(random_vector(engine, layer=layer, site=site, seed=layer), coef=coef, **options))


# --- against plain Hugging Face -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_unsteered_logits_are_plain_huggingfaces_to_the_bit_at_every_step(family, name, prompt):
    engine, plain = family(name)
    expected = plain.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = expected.sequences[0, len(prompt) :]
    backend = FastBackend(engine.model)
    rows = Rows(backend.model, PlanRun(sl.Plan(), 1), [len(prompt)])
    with torch.no_grad(), backend.attached([]):
        found = [rows.extend(*left_padded([prompt]), keep=1)[:, -1]]
        found += [rows.step(token[None])[:, -1] for token in tokens[:-1]]
    assert len(found) == len(expected.logits) > 1
    for ours, theirs in zip(found, expected.logits, strict=True):
        assert torch.equal(ours, theirs)
    out = engine.generate([prompt], policy=GREEDY, max_new_tokens=NEW, engine="fast")
    assert out.engine == "fast"
    assert out[0].token_ids == tokens.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_models_are_far_from_uniform_and_care_about_their_context(family, name):
    """Otherwise equality would prove little."""
    _, plain = family(name)
    with torch.no_grad():
        p = plain(torch.tensor([LONG])).logits[0].softmax(-1)
        other = plain(torch.tensor([[13, *LONG[1:]]])).logits[0].softmax(-1)
    assert p.max(-1).values.mean() > 10 / p.shape[-1]
    assert (p - other)[1:].abs().sum(-1).mean() > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_programs_give_what_fast_does_beyond_any_window(family, name):
    engine, _ = family(name)
    plan = adding(engine, 1, where=sl.where.all())
    fast, ours = (
        engine.generate([SHORT, LONG], plan=plan, policy=GREEDY, max_new_tokens=NEW, engine=way)
        for way in ("fast", "graph")
    )
    assert ours.engine == "graph"
    assert [row.token_ids for row in ours] == [row.token_ids for row in fast]
    for found, wanted in zip(ours, fast, strict=True):
        assert found.token_log_probs == pytest.approx(wanted.token_log_probs, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_narrow")])
def test_narrow_windows_are_really_felt(family, name):
    """The same weights with a wide window say something else after a long prompt, and the same after a short one."""
    wide = {"qwen2_narrow": "qwen2", "phi3_narrow": "phi3"}.get(name, name.removesuffix("_narrow"))
    narrow_engine, _ = family(name)
    wide_engine, _ = family(wide)
    for prompt, same in ((SHORT, True), (LONG, False)):
        a, b = (engine.logits([*prompt])[-1] for engine in (narrow_engine, wide_engine))
        assert torch.allclose(a, b, atol=1e-4) == same


# --- against the bridge -------------------------------------------------------------------------------------------


def both_engines(engine, plan, prompts=PROMPTS[:2], new=5):
    """The same greedy generation on the fast engine and on the bridge."""
    found = [
        engine.generate(prompts, plan=plan, policy=GREEDY, max_new_tokens=new, engine=name)
        for name in ("fast", "bridge")
    ]
    assert [out.engine for out in found] == ["fast", "bridge"]
    return found


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_fast_equals_bridge_steered_at_every_site_and_layer(family, name):
    """Every site in the middle layer, an input and an output at each other one."""
    engine, _ = family(name)
    unsteered = engine.generate(PROMPTS[:2], policy=GREEDY, max_new_tokens=3, engine="fast")
    for layer in range(engine.info.n_layers):
        sites = sites_of(engine, layer)
        assert {"resid_pre", "resid_post", "attn_out", "mlp_out"} <= set(sites)
        assert len(sites) == len([p for p in plain_points(engine.model) if p.startswith(f"blocks.{layer}.")])
        for site in sites if layer == 1 else ("resid_pre", "mlp_out"):
            fast, bridge = both_engines(engine, adding(engine, layer, site), new=3)
            for ours, theirs, before in zip(fast, bridge, unsteered, strict=True):
                assert ours.token_ids == theirs.token_ids, (site, layer)
                assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-4), (site, layer)
                assert ours.token_log_probs != pytest.approx(before.token_log_probs, abs=1e-3), (site, layer)


@pytest.mark.parametrize("name", NAMES)
def test_fast_equals_bridge_for_a_plan_at_many_points(family, name):
    engine, _ = family(name)
    edits = [
        sl.clamp(random_vector(engine, layer=0, site="attn_out"), lo=-0.5, hi=0.5, where=sl.where.all()),
        sl.ablate(random_vector(engine, layer=1, seed=1), where=sl.where.generated(after=1)),
        sl.add(random_vector(engine, layer=1, seed=2), coef=1.0, where=sl.where.prompt()),
        sl.add(random_vector(engine, layer=2, site="resid_pre", seed=3), coef=-1.0),
    ]
    fast, bridge = both_engines(engine, sl.Plan(*edits), prompts=PROMPTS, new=NEW)
    counts = [r.edited for r in engine.receipts]
    assert all(counts)
    for ours, theirs in zip(fast, bridge, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=2e-4)
    engine.generate(PROMPTS, plan=sl.Plan(*edits), policy=GREEDY, max_new_tokens=NEW, engine="fast")
    assert [r.edited for r in engine.receipts] == counts


# --- the effect, measured -----------------------------------------------------------------------------------------


def check_effect_in_prompts(engine, layer):
    """The stream after `layer` changes by exactly coef·v at the edited positions; earlier layers do not change."""
    vector = random_vector(engine, layer=layer)
    where = sl.where.index(2) | sl.where.last_prompt()
    prompts = [SHORT, LONG, PROMPTS[3]]
    plain, steered = (
        engine.capture(prompts, layers="all", plan=plan)
        for plan in (None, sl.Plan(sl.add(vector, coef=2.5, where=where)))
    )
    for i, ids in enumerate(prompts):
        for earlier in range(layer):
            assert torch.equal(steered.of(i, earlier), plain.of(i, earlier))
        expected = plain.of(i, layer).clone()
        expected[[2, len(ids) - 1]] += 2.5 * vector.values
        assert torch.equal(steered.of(i, layer), expected)


def check_effect_in_generation(engine, layer):
    """The same in the very passes of a steered generation, whose edits begin at the last prompt token."""
    vector = random_vector(engine, layer=layer)
    steered = engine.capture(
        PROMPTS, layers="all", plan=sl.Plan(sl.add(vector, coef=2.5)), max_new_tokens=4, where=sl.where.all()
    )
    ran = [[*p, *c[:-1]] for p, c in zip(PROMPTS, steered.completion_token_ids, strict=True)]
    plain = engine.capture(ran, layers="all")
    for i, prompt in enumerate(PROMPTS):
        change = torch.zeros_like(plain.of(i, layer))
        change[len(prompt) - 1 :] = 2.5 * vector.values
        for earlier in range(layer):
            torch.testing.assert_close(steered.of(i, earlier), plain.of(i, earlier), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(steered.of(i, layer) - plain.of(i, layer), change, atol=1e-3, rtol=0)


CHECKS = [check_effect_in_prompts, check_effect_in_generation]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CHECKS)
def test_the_measured_effect_is_coef_times_v_where_it_was_asked_for(family, name, check):
    engine, _ = family(name)
    for layer in range(engine.info.n_layers):
        check(engine, layer)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
@pytest.mark.parametrize("check", CHECKS)
def test_a_layer_off_by_one_is_caught(family, name, check, monkeypatch):
    engine, _ = family(name)
    original = capture_task.plan_hooks

    def one_later(run):
        """A plan's hooks, each installed one layer too late."""
        return [(f"blocks.{1 + int(hook.split('.')[1])}.hook_resid_post", function) for hook, function in original(run)]

    for module in (capture_task, generating):
        monkeypatch.setattr(module, "plan_hooks", one_later)
    with pytest.raises(AssertionError):
        check(engine, 0)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
@pytest.mark.parametrize("check", CHECKS)
def test_a_position_off_by_one_is_caught(family, name, check, monkeypatch):
    engine, _ = family(name)
    original = PlanRun.begin

    def one_further(self, rows):
        """Tells a plan that every token stands one further than it does."""
        original(self, RowPositions(torch.where(rows.is_token, rows.positions + 1, -1), rows.prompt_lens))

    monkeypatch.setattr(PlanRun, "begin", one_further)
    caught = AssertionError if check is check_effect_in_prompts else (AssertionError, sl.ReceiptError)
    with pytest.raises(caught):
        check(engine, 1)


# --- batches, padding, caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_equals_single_rows(family, name):
    engine, _ = family(name)
    plan = adding(engine, 1)
    options = {"plan": plan, "policy": GREEDY, "max_new_tokens": NEW, "engine": "fast"}
    together = engine.generate(PROMPTS, **options)
    for prompt, row in zip(PROMPTS, together, strict=True):
        (alone,) = engine.generate([prompt], **options)
        assert row.token_ids == alone.token_ids
        assert row.token_log_probs == pytest.approx(alone.token_log_probs, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_either_side_and_no_cache_change_nothing(family, name):
    engine, _ = family(name)
    vector = random_vector(engine).values
    hook = sl.create_steering_hook(vector, 2.0)
    options = {"do_sample": False, "stop_token_ids": (), "engine": "fast"}
    width = len(LONG)
    alone = [
        sl.hooked_generate(engine.model, torch.tensor([p]), 8, "blocks.1.hook_out", hook, **options) for p in PROMPTS
    ]
    for left, use_cache in itertools.product((True, False), repeat=2):
        ids = torch.full((len(PROMPTS), width), 2)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(PROMPTS):
            part = slice(width - len(prompt), width) if left else slice(0, len(prompt))
            ids[row, part], mask[row, part] = torch.tensor(prompt), 1
        out = sl.hooked_generate(
            engine.model, ids, 8, "blocks.1.hook_out", hook, attention_mask=mask, use_cache=use_cache, **options
        )
        assert torch.equal(out[:, :width], ids)
        assert [row.tolist() for row in out[:, width:]] == [row[0, -8:].tolist() for row in alone]


# --- what cannot run fast -----------------------------------------------------------------------------------------


def _shifted(module):
    """A layer that adds something to what it puts out."""
    module.register_forward_hook(lambda _, __, output: output + 0.1)


def _deaf(module):
    """A layer that does not hear what hooks that come later change."""
    forward = module.forward
    module.forward = lambda hidden_states, *args, **kwargs: forward(hidden_states.detach().clone(), *args, **kwargs)
    module.register_forward_hook = lambda hook, **_: type(module).register_forward_hook(
        module, lambda m, given, output: (hook(m, given, output), None)[1]
    )


@pytest.fixture
def different(tmp_path):
    """A tiny model whose unhooked copy has a fault."""
    with sl.load(build_tiny_family(tmp_path, "llama"), device="cpu") as engine:
        _shifted(backends.unhooked_model_of(engine.model).of(engine.model.blocks[1]))
        yield engine


def test_a_model_that_differs_runs_on_the_bridge_and_says_so_once(different):
    plan = adding(different, 1)
    with pytest.warns(UserWarning, match=r"comparison on this model.*bridge in the unedited.*bridge engine") as caught:
        first = different.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=4)
    assert len(caught) == 1
    second = different.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=4)
    assert first.engine == second.engine == "bridge"
    for engine in ("fast", "graph"):
        with pytest.raises(InputError, match=rf"engine='{engine}' cannot run here: A short comparison on this model"):
            different.generate(PROMPTS, engine=engine, max_new_tokens=4)
    with pytest.raises(InputError, match="auto, bridge, fast, graph, compiled"):
        different.generate(PROMPTS, engine="quick", max_new_tokens=4)


def test_a_model_whose_hooks_never_fire_is_different(tmp_path):
    with sl.load(build_tiny_family(tmp_path, "openai-gpt"), device="cpu") as engine:
        assert "never fired on this model: blocks.0.hook_out" in (backends.fast_difference(engine.model) or "")


@pytest.fixture
def elsewhere(tmp_path):
    """A tiny model of a family that is in no list."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = save_tiny(AutoModelForCausalLM.from_config, PhiConfig, tmp_path, context=64, **sizes)
    with sl.load(path, device="cpu") as engine:
        yield engine


def test_a_family_of_no_list_earns_the_fast_engine_and_programs(elsewhere):
    plan = adding(elsewhere, 1)
    fast, bridge = both_engines(elsewhere, plan)
    assert [row.token_ids for row in fast] == [row.token_ids for row in bridge]
    assert elsewhere.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=4).engine == "fast"
    ours = elsewhere.generate(PROMPTS[:2], plan=plan, policy=GREEDY, max_new_tokens=5, engine="graph")
    assert [row.token_ids for row in ours] == [row.token_ids for row in bridge]


def test_a_small_fault_in_half_precision_is_found(tmp_path):
    """An MLP that is 5 % too strong; GLM-4's own roundings, which its norms enlarge, are none."""
    path = build_tiny_family(tmp_path, "llama")
    with sl.load(path, device="cpu", dtype="bfloat16") as engine:
        unhooked = backends.unhooked_model_of(engine.model)
        unhooked.of(engine.model.blocks[1]).mlp.register_forward_hook(lambda module, args, output: 1.05 * output)
        assert "unedited blocks.1" in (backends.fast_difference(engine.model) or "")
    with sl.load(build_family(tmp_path / "glm4", "glm4"), device="cpu", dtype="bfloat16") as engine:
        assert backends.fast_difference(engine.model) is None


@pytest.mark.parametrize(
    ("fault", "where"), [(_shifted, "unedited blocks.1.hook_out"), (_deaf, "edited blocks.2.hook_in")]
)
def test_a_fault_in_the_unhooked_model_is_found(tmp_path, fault, where):
    with sl.load(build_tiny_family(tmp_path, "llama"), device="cpu") as engine:
        unhooked = backends.unhooked_model_of(engine.model)
        fault(unhooked.of(engine.model.blocks[1]))
        assert backends.fast_difference(engine.model) == f"the {where}"
        with pytest.warns(
            UserWarning, match=rf"differs from the bridge in the {where}\. Generation runs on the bridge"
        ):
            assert engine.generate([SHORT], policy=GREEDY, max_new_tokens=2).engine == "bridge"


def test_quantised_and_remote_models_run_on_the_bridge(family, monkeypatch):
    bridge = family("llama")[0].model
    names = ["blocks.1.hook_out"]
    assert isinstance(backends.choose_backend(bridge, names), FastBackend)
    with monkeypatch.context() as patch:
        patch.setattr(bridge.original_model.config, "quantization_config", {"bits": 4}, raising=False)
        with pytest.warns(UserWarning, match="quantised"):
            assert backends.choose_backend(bridge, names).name == "bridge"
        with pytest.raises(InputError, match="quantised"):
            backends.choose_backend(bridge, names, "fast")
    with monkeypatch.context() as patch:
        patch.setattr(type(bridge.original_model), "__module__", "transformers_modules.someone.model")
        with pytest.warns(UserWarning, match="code of its own"):
            assert backends.choose_backend(bridge, names).name == "bridge"


def test_a_hook_point_of_the_bridge_alone_runs_there_without_a_word(family):
    engine, _ = family("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose_backend(engine.model, ["blocks.1.attn.hook_pattern"]).name == "bridge"
    with pytest.raises(InputError, match=r"'blocks\.1\.attn\.hook_pattern' exists on the bridge only"):
        backends.choose_backend(engine.model, ["blocks.1.attn.hook_pattern"], "fast")


# --- the stream in the middle of a layer --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
@pytest.mark.parametrize("user_hooks", [False, True], ids=["fast", "bridge"])
def test_an_edit_in_the_middle_of_a_layer_stays_in_the_stream(family, name, user_hooks):
    """TransformerLens hooks resid_mid on the MLP's branch alone; a plan's edit must reach the layer's output too."""
    engine, _ = family(name)
    if "resid_mid" not in sites_of(engine, 0):
        pytest.skip("attention and MLP run in parallel here, so the stream has no middle")
    plan = adding(engine, 0, "resid_mid", where=sl.where.all())
    hooks = [("blocks.0.mlp.hook_in", lambda value, hook: None)] if user_hooks else []

    def read(site):
        with engine.model.hooks(fwd_hooks=hooks):
            return engine.capture([LONG], layers=[0], site=site, plan=plan)[0]

    middle, added, after = read("resid_mid"), read("mlp_out"), read("resid_post")
    torch.testing.assert_close(middle + added, after, atol=1e-4, rtol=1e-4)
    unsteered = engine.capture([LONG], layers=[0], site="resid_mid")[0]
    torch.testing.assert_close(
        middle - unsteered, (2.0 * plan.edits[0].vector.values).expand_as(middle), atol=1e-3, rtol=1e-3
    )
