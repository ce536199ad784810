"""`hooked_generate` and its two companions, on both ways through the model. G1 … G11 are the cases users ran into."""

import importlib

import jaxtyping
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import (
    ContextLengthError,
    HookPointError,
    InputError,
    PolicyError,
    PromptError,
    VectorShapeError,
    VectorValueError,
)
from steerlab.measures import policy_log_probs
from tests.lens.helpers import all_hooks, random_vector

PROMPTS = [[5, 60, 7, 90], [12, 200, 31, 44, 5, 66, 71], [300], [17, 18, 19, 120, 33, 250, 8, 9]]
POINT = "blocks.1.hook_resid_post"
GREEDY = {"do_sample": False, "stop_token_ids": ()}
ENGINES = ["fast", "bridge"]


@pytest.fixture
def bridge(tiny_llama_engine):
    return tiny_llama_engine.model


@pytest.fixture
def vector(tiny_llama_engine):
    return random_vector(tiny_llama_engine).values


def run(bridge, prompts, new, hook, *, point=POINT, **options):
    """New tokens of prompts of equal length."""
    ids = torch.tensor(prompts)
    out = sl.hooked_generate(bridge, ids, new, point, hook, **(GREEDY | options))
    assert torch.equal(out[:, : ids.shape[1]], ids)
    return out[:, ids.shape[1] :].tolist()


def padded(prompts, *, left, pad):
    """Ids and mask of prompts of different lengths."""
    width = max(map(len, prompts))
    fill = [[pad] * (width - len(prompt)) for prompt in prompts]
    ones = [[1] * len(prompt) for prompt in prompts]
    zeros = [[0] * len(row) for row in fill]
    sides = [(f + p, z + o) if left else (p + f, o + z) for p, f, o, z in zip(prompts, fill, ones, zeros, strict=True)]
    return torch.tensor([s[0] for s in sides]), torch.tensor([s[1] for s in sides])


def nothing(value, hook):
    return None


# --- G1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("pad", ["pad", "eos", "bos", "token"])
def test_g1_padded_rows_equal_rows_alone_whatever_the_pad(bridge, vector, engine, left, pad):
    tokenizer = bridge.tokenizer
    pad_id = {"pad": 2, "eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id, "token": 77}[pad]
    hook = sl.create_steering_hook(vector, 2.0)
    ids, mask = padded(PROMPTS, left=left, pad=pad_id)
    out = sl.hooked_generate(bridge, ids, 6, POINT, hook, attention_mask=mask, engine=engine, **GREEDY)
    assert torch.equal(out[:, : ids.shape[1]], ids)
    alone = [run(bridge, [prompt], 6, hook, engine=engine)[0] for prompt in PROMPTS]
    assert out[:, ids.shape[1] :].tolist() == alone


def test_g1_ids_that_look_like_padding_are_tokens_without_a_mask(bridge):
    for special in (0, 1, 2):
        seen = []
        run(
            bridge, [[special, special, 40]], 1, lambda value, hook, seen=seen: seen.append(sl.current_step().positions)
        )
        assert seen[0].tolist() == [[0, 1, 2]]


def test_g1_a_mask_of_any_dtype_and_a_token_masked_in_the_middle(bridge, vector):
    hook = sl.create_steering_hook(vector, 2.0)
    expected = run(bridge, [[5, 7, 90]], 6, hook)
    for dtype in (torch.bool, torch.int32, torch.float32):
        mask = torch.tensor([[1, 0, 1, 1]], dtype=dtype)
        assert run(bridge, [[5, 60, 7, 90]], 6, hook, attention_mask=mask) == expected


# --- G2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_g2_a_hook_on_an_absolute_position_acts_there_once(bridge, vector, engine, use_cache):
    acted = []

    def at_position_five(value, hook):
        at_five = sl.current_step().positions == 5
        acted.append(at_five.sum(dim=1).tolist())
        return torch.where(at_five[..., None], value + 4 * vector, value)

    ids, mask = padded([[5, 60, 7], [11, 12, 13, 14, 15, 16, 17]], left=True, pad=0)
    options = {"engine": engine, "use_cache": use_cache, "attention_mask": mask}
    out = sl.hooked_generate(bridge, ids, 8, POINT, at_position_five, **options, **GREEDY)
    assert len(acted) == 8
    if use_cache:  # row 0 reaches position 5 with its third fed-back token; row 1 holds it in its prompt
        assert acted == [[0, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0, 0]]
    else:
        assert acted == [[0, 1]] * 3 + [[1, 1]] * 5

    for row, prompt in enumerate(([5, 60, 7], [11, 12, 13, 14, 15, 16, 17])):
        sequence = [*prompt, *out[row, 7:].tolist()]

        def directly(value, hook):
            changed = value.clone()
            changed[:, 5] += 4 * vector
            return changed

        logits = bridge.run_with_hooks(torch.tensor([sequence[:-1]]), fwd_hooks=[(POINT, directly)])
        late = max(len(prompt), 6) - 1  # up to here position 5 did not exist when the token was chosen
        assert logits[0, late:].argmax(-1).tolist() == sequence[late + 1 :]


def test_g2_the_step_tells_rows_masks_and_index(bridge):
    steps = []
    ids, mask = padded([[5], [6, 7, 8]], left=True, pad=0)
    sl.hooked_generate(
        bridge, ids, 3, POINT, lambda value, hook: steps.append(sl.current_step()), attention_mask=mask, **GREEDY
    )
    assert [step.index for step in steps] == [0, 1, 2]
    assert steps[0].positions.tolist() == [[-1, -1, 0], [0, 1, 2]]
    assert steps[0].prompt_mask.tolist() == [[False, False, True], [True] * 3]
    assert not steps[0].generated_mask.any()
    assert [step.positions.tolist() for step in steps[1:]] == [[[1], [3]], [[2], [4]]]
    assert steps[2].generated_mask.all()
    assert steps[2].live.tolist() == [True, True]
    assert steps[2].rows.tolist() == [0, 1]
    assert steps[2].prompt_lens.tolist() == [1, 3]
    with pytest.raises(InputError, match="nothing runs now"):
        sl.current_step()


# --- G3 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("new", [0, 2])
def test_g3_a_misspelt_name_is_an_error(bridge, engine, new):
    with pytest.raises(HookPointError, match=r"no hook point 'blocks\.1\.hook_resid_pots'.*Did you mean"):
        run(bridge, [[5, 6]], new, nothing, point="blocks.1.hook_resid_pots", engine=engine)
    with pytest.raises(HookPointError, match="no hook point"):
        sl.hooked_generate(bridge, torch.tensor([[5]]), new, [(POINT, nothing), ("blocks.4.hook_out", nothing)])


@pytest.mark.parametrize("engine", ENGINES)
def test_g3_a_name_that_never_fires_is_an_error(bridge, engine, monkeypatch):
    """A layer left out of the run, as some models do."""
    original = bridge.original_model.model.layers
    monkeypatch.setattr(bridge.original_model.model.config, "num_hidden_layers", 3)
    from steerlab.engines.lens._backends import unhooked_model_of

    monkeypatch.setattr(unhooked_model_of(bridge).model.model.config, "num_hidden_layers", 3)
    assert len(original) == 4
    before = all_hooks(bridge)
    with pytest.raises(HookPointError, match=r"never fired.*blocks\.3\.hook_out"):
        sl.hooked_generate(
            bridge, torch.tensor([[5]]), 2, [(POINT, nothing), ("blocks.3.hook_out", nothing)], engine=engine
        )
    assert all_hooks(bridge) == before


# --- G4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_g4_our_hooks_are_gone_after_an_error(bridge, vector, engine):
    from steerlab.engines.lens._backends import unhooked_model_of

    before, calls = all_hooks(bridge), []

    def failing(value, hook):
        calls.append(sl.current_step().index)
        if len(calls) == 3:
            raise RuntimeError("half way")
        return value + 9 * vector

    plain = run(bridge, [[5, 6]], 6, nothing, engine=engine)
    with pytest.raises(RuntimeError, match="half way"):
        run(bridge, [[5, 6]], 6, failing, engine=engine)
    assert calls == [0, 1, 2]
    assert all_hooks(bridge) == before
    modules = unhooked_model_of(bridge).model.modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert run(bridge, [[5, 6]], 6, nothing, engine=engine) == plain


def test_g4_with_a_users_hook_on_the_bridge_auto_runs_there(bridge, vector):
    calls = []

    def users(value, hook):
        calls.append(hook.name)
        return value + 3 * vector

    both = run(bridge, [[5, 6]], 6, sl.create_steering_hook(vector, 6.0))
    bridge.add_hook("blocks.1.hook_out", users)
    try:
        with_user = all_hooks(bridge)
        assert run(bridge, [[5, 6]], 6, sl.create_steering_hook(vector, 3.0)) == both
        assert len(calls) == 6
        assert all_hooks(bridge) == with_user
        with pytest.raises(InputError, match=r"hooks of yours.*engine='bridge'"):
            run(bridge, [[5, 6]], 6, nothing, engine="fast")

        def failing(value, hook):
            raise RuntimeError("ours")

        with pytest.raises(RuntimeError, match="ours"):
            run(bridge, [[5, 6]], 6, failing)
        assert all_hooks(bridge) == with_user
    finally:
        bridge.reset_hooks()


def test_g4_a_hook_by_torchs_own_call_is_a_users_hook_too(bridge, tiny_llama_engine):
    """It sits on the modules that the fast engine has copies of."""
    from steerlab._runtime.modules import unwrapped

    calls = []
    module = unwrapped(bridge.blocks[1].mlp)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *_: calls.append(1))
        try:
            out = tiny_llama_engine.generate([[5, 6]], max_new_tokens=3)
        finally:
            handle.remove()
        assert out.engine == "bridge"
    assert calls
    assert tiny_llama_engine.generate([[5, 6]], max_new_tokens=3).engine == "fast"


@pytest.mark.parametrize("call", ["generate", "stream", "hooked_generate"])
def test_what_a_users_hook_keeps_can_be_trained_on(bridge, tiny_llama_engine, call):
    kept = []
    with bridge.hooks(fwd_hooks=[(POINT, lambda value, hook: kept.append(value))]):
        if call == "generate":
            tiny_llama_engine.generate([[5, 6]], max_new_tokens=3)
        elif call == "stream":
            list(tiny_llama_engine.stream([5, 6], max_new_tokens=3))
        else:
            run(bridge, [[5, 6]], 3, nothing)
    probe = torch.nn.Linear(64, 1)
    probe(torch.cat(kept, dim=1)).sum().backward()
    assert probe.weight.grad is not None


def test_a_plan_that_generated_can_be_differentiated_through(bridge, tiny_llama_engine, vector):
    v = sl.SteeringVector.from_tensor(vector, layer=1)
    anywhere = {"where": sl.where.all()}
    plan = sl.Plan(sl.add(v, coef=2.0, **anywhere), sl.ablate(v, **anywhere), sl.clamp(v, hi=0.1, **anywhere))
    tiny_llama_engine.generate([[5, 6]], plan=plan, max_new_tokens=3)
    leaf = torch.zeros(64, requires_grad=True)
    hooks = [("blocks.0.hook_out", lambda value, hook: value + leaf), *plan.hooks(tiny_llama_engine)]
    bridge.run_with_hooks(torch.tensor([[5, 6, 7]]), fwd_hooks=hooks).logsumexp(-1).sum().backward()
    assert leaf.grad.abs().sum() > 0


# --- G5 -----------------------------------------------------------------------------------------------------------


def test_g5_one_bos_and_the_ids_that_ran(tiny_llama_engine):
    engine, bos = tiny_llama_engine, tiny_llama_engine.tokenizer.bos_token_id
    seen = []

    def ran(prompt, **options):
        seen.clear()
        with engine.model.hooks(fwd_hooks=[("embed.hook_in", lambda value, hook: seen.append(value.clone()))]):
            out = engine.generate(prompt, max_new_tokens=1, **options)
        assert tuple(seen[0][0].tolist()) == out.prompt_token_ids[0]
        return out.prompt_token_ids[0]

    text = engine.tokenizer.bos_token
    assert ran(f"{text}Hi").count(bos) == 1
    assert ran(f"{text}{text}Hi").count(bos) == 1
    assert ran("Hi", chat=True).count(bos) == 1
    assert ran("") == (bos,)
    assert ran(f"{text}Hi", chat=True)[:1] == (bos,)
    assert ran([bos, bos, 20]) == (bos, bos, 20)  # ids are taken as they are


def test_g5_a_steered_response_runs_one_bos(bridge, tiny_llama_engine, vector, monkeypatch):
    seen = []
    with bridge.hooks(fwd_hooks=[("embed.hook_in", lambda value, hook: seen.append(value.clone()))]):
        sl.generate_steered_response(bridge, tiny_llama_engine.tokenizer, "Hi", POINT, vector, 1.0, max_tokens=1)
    bos = tiny_llama_engine.tokenizer.bos_token_id
    assert seen[0][0].tolist().count(bos) == 1
    assert seen[0][0, 0] == bos


# --- G6 -----------------------------------------------------------------------------------------------------------


def test_g6_the_result_is_on_the_ids_device_and_keeps_their_dtype(bridge, vector):
    for dtype in (torch.int64, torch.int32):
        ids = torch.tensor([[5, 6]], dtype=dtype)
        out = sl.hooked_generate(bridge, ids, 3, POINT, sl.create_steering_hook(vector, 1.0), **GREEDY)
        assert out.dtype == dtype
        assert out.device == ids.device
        assert out.shape == (1, 5)


def test_g6_a_vector_is_copied_once_per_device_and_dtype(bridge, vector):
    hook = sl.create_steering_hook(vector.double(), 2.0)
    run(bridge, [[5, 6]], 5, hook)
    (copy,) = hook._copies.values()
    run(bridge, [[5, 6, 7]], 5, hook)
    assert next(iter(hook._copies.values())) is copy
    assert (copy.dtype, copy.device.type) == (torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_g6_ids_and_vector_on_the_cpu_with_the_model_on_a_gpu(tiny_llama_path, bridge, vector):
    with sl.load(tiny_llama_path, device="cuda") as engine:
        hook = sl.create_steering_hook(vector, 2.0)
        assert run(engine.model, [[5, 6]], 8, hook) == run(bridge, [[5, 6]], 8, hook)


# --- G7 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def half_engine(request, tiny_llama_path):
    with sl.load(tiny_llama_path, dtype=request.param, device="cpu") as engine:
        yield engine


@pytest.mark.parametrize("engine", ENGINES)
def test_g7_a_float32_vector_in_a_half_precision_model(half_engine, vector, engine):
    dtype, seen = getattr(torch, half_engine.info.dtype), []
    hooks = [
        (POINT, sl.create_steering_hook(vector, 2.0)),
        ("blocks.2.hook_resid_pre", lambda value, hook: value.float() + vector),  # a careless hook
        ("blocks.3.hook_resid_pre", lambda value, hook: seen.append(value.dtype)),
    ]
    out = sl.hooked_generate(half_engine.model, torch.tensor([[5, 6]]), 4, hooks, engine=engine, **GREEDY)
    assert out.shape == (1, 6)
    assert set(seen) == {dtype}


@pytest.mark.parametrize("engine", ENGINES)
def test_g7_a_vector_of_the_wrong_width_is_a_shape_error(bridge, vector, engine):
    hook = sl.create_steering_hook(torch.ones(32), 1.0)
    with pytest.raises(VectorShapeError, match=r"\(32,\).*\(1, 2, 64\)"):
        run(bridge, [[5, 6]], 2, hook, engine=engine)


@pytest.mark.parametrize("wrong", [torch.tensor(3.0), torch.ones(1), torch.ones(1, 64), [1.0, 2.0]])
def test_g7_a_vector_that_is_no_row_is_a_shape_error(wrong):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(VectorShapeError, match=r"shape \[d_model\], got"):
            sl.create_steering_hook(wrong, 1.0)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_values_out_of_range_are_errors(bridge, vector):
    for values, alpha in ((vector.clone().fill_(torch.nan), 1.0), (vector, float("inf")), (vector, float("nan"))):
        with pytest.raises(VectorValueError, match="finite"):
            sl.create_steering_hook(values, alpha)
    for factor in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="NaN"):
            run(bridge, [[5, 6]], 3, lambda value, hook, factor=factor: value * factor)


# --- G8 -----------------------------------------------------------------------------------------------------------


def test_g8_no_new_tokens_returns_the_prompt(bridge):
    ids = torch.tensor([[5, 6]])
    out = sl.hooked_generate(bridge, ids, 0, POINT, nothing)
    assert torch.equal(out, ids)
    assert out is not ids


def test_g8_past_the_context_says_by_how_much(bridge):
    ids = torch.full((1, 250), 5)
    with pytest.raises(ContextLengthError, match=r"250 tokens and 10 new ones need 4 tokens more.*context of 256"):
        sl.hooked_generate(bridge, ids, 10, POINT, nothing)
    assert sl.hooked_generate(bridge, ids, 6, POINT, nothing, stop_token_ids=()).shape == (1, 256)
    # the context counts tokens, not padding
    wide, mask = torch.full((1, 256), 5), torch.zeros(1, 256)
    mask[:, -2:] = 1
    assert sl.hooked_generate(bridge, wide, 4, POINT, nothing, attention_mask=mask, stop_token_ids=()).shape == (1, 260)


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, PromptError, "BOS"),
        (torch.zeros(0, 3, dtype=torch.long), {}, PromptError, "no rows"),
        (torch.tensor([[5], [6]]), {"attention_mask": torch.tensor([[1], [0]])}, PromptError, r"\[1\]"),
        (torch.tensor([[5]]), {"attention_mask": torch.tensor([[1, 1]])}, PromptError, r"\(1, 2\), input_ids \(1, 1\)"),
        (torch.tensor([5]), {}, PromptError, r"\[batch, prompt\], got \(1,\)"),
        (torch.tensor([[5.0]]), {}, PromptError, "integer tensor"),
        ([[5]], {}, PromptError, "got list"),
        (torch.tensor([[5, 384]]), {}, PromptError, "id 384, outside the model's vocabulary of 0 to 383"),
        (torch.tensor([[-1, 5]]), {}, PromptError, "id -1"),
        (torch.tensor([[5]]), {"max_tokens": -1}, InputError, "max_tokens"),
        (torch.tensor([[5]]), {"max_tokens": 1.5}, InputError, "max_tokens"),
        (torch.tensor([[5]]), {"seed": -1}, InputError, "seed"),
        (torch.tensor([[5]]), {"seed": 0.5}, InputError, "seed"),
        (torch.tensor([[5]]), {"stop_token_ids": 2}, InputError, r"\(2,\)"),
        (torch.tensor([[5]]), {"stop_token_ids": "</s>"}, InputError, "stop_token_ids"),
        (torch.tensor([[5]]), {"stop_token_ids": [1.5]}, InputError, "stop_token_ids"),
        (torch.tensor([[5]]), {"engine": "quick"}, InputError, "quick"),
        (torch.tensor([[5]]), {"engine": "compiled"}, InputError, "engine.generate"),
        (torch.tensor([[5]]), {"hook_fn": None}, InputError, "hook_fn is missing"),
        (torch.tensor([[5]]), {"layer_name": [(POINT, nothing)]}, InputError, "leave hook_fn=None"),
        (torch.tensor([[5]]), {"layer_name": [POINT], "hook_fn": None}, InputError, "pairs"),
    ],
)
def test_g8_input_that_cannot_run_is_refused_by_name(bridge, ids, options, error, message):
    arguments = {"max_tokens": 2, "layer_name": POINT, "hook_fn": nothing} | options
    with pytest.raises(error, match=message):
        sl.hooked_generate(bridge, ids, **arguments)


# --- G9 -----------------------------------------------------------------------------------------------------------


def test_g9_top_k_top_p_and_min_p_all_apply(bridge, tiny_llama_engine):
    ids = torch.tensor([[5, 60, 7]]).expand(400, 3)
    logits = tiny_llama_engine.logits([5, 60, 7])[-1:]

    def support(**options):
        policy = sl.SamplingPolicy(temperature=1.5, **options)
        found = sl.hooked_generate(
            bridge, ids, 1, POINT, nothing, temperature=1.5, seed=0, **({"top_p": 1.0} | options)
        )[:, -1]
        allowed = set(policy_log_probs(logits, policy)[0].isfinite().nonzero()[:, 0].tolist())
        assert set(found.tolist()) <= allowed
        counts = torch.bincount(found, minlength=logits.shape[-1]) / 400
        assert (counts - policy_log_probs(logits, policy)[0].exp()).abs().max() < 0.1
        return allowed

    k, p, m = support(top_k=40), support(top_p=0.5), support(min_p=0.2)
    together = support(top_k=40, top_p=0.5, min_p=0.2)
    assert len(support(top_k=40, top_p=0.05)) < 10
    assert support(top_k=40, top_p=0.5) < k & p  # the mass of top_p is that of the 40
    assert together <= k & p & m
    assert support(top_k=2, top_p=0.999) < support(top_p=0.999)


def test_g9_temperature_zero_is_greedy(bridge):
    greedy = run(bridge, [[5, 6], [7, 8]], 8, nothing)
    assert run(bridge, [[5, 6], [7, 8]], 8, nothing, do_sample=True, temperature=0.0, seed=3) == greedy
    assert run(bridge, [[5, 6], [7, 8]], 8, nothing, do_sample=True, top_k=1, seed=3) == greedy
    assert run(bridge, [[5, 6], [7, 8]], 8, nothing, do_sample=True, temperature=5.0, seed=3) != greedy


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"top_p": 1.1},
        {"top_k": 1.5},
        {"min_p": -0.1},
    ],
)
def test_g9_values_outside_their_range_are_errors(bridge, options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        sl.hooked_generate(bridge, torch.tensor([[5]]), 2, POINT, nothing, **options)


# --- G10 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_g10_the_same_seed_draws_the_same_in_any_batch(bridge, vector, engine):
    hook = sl.create_steering_hook(vector, 1.0)
    options = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "seed": 11, "engine": engine}
    alone = run(bridge, [[5, 6, 7]], 10, hook, **options)
    ids, mask = padded([[5, 6, 7], [1, 2, 3, 4, 5], [9]], left=False, pad=0)
    out = sl.hooked_generate(bridge, ids, 10, POINT, hook, attention_mask=mask, stop_token_ids=(), **options)
    assert out[:1, 5:].tolist() == alone
    assert run(bridge, [[5, 6, 7]], 10, hook, **(options | {"seed": 12})) != alone
    twice = run(bridge, [[5, 6, 7]] * 2, 10, hook, **options)
    assert twice[0] == alone[0] != twice[1]


def test_without_a_seed_torchs_generator_decides(bridge):
    options = {"do_sample": True, "temperature": 1.5}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = [run(bridge, [[5, 6]], 8, nothing, **options) for _ in range(2)]
        torch.manual_seed(5)
        second = [run(bridge, [[5, 6]], 8, nothing, **options) for _ in range(2)]
    assert first == second
    assert first[0] != first[1]


# --- G11 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("site", ["resid_pre", "resid_post", "attn_out", "mlp_out"])
def test_g11_the_change_is_alpha_v_once_at_every_position(bridge, vector, engine, site):
    """Measured by a second hook after the first, at the same point, in every pass."""
    before, after = [], []
    point = f"blocks.2.hook_{site}"
    hooks = [
        (point, lambda value, hook: before.append(value.clone())),
        (point, sl.create_steering_hook(vector, 2.5)),
        (point, lambda value, hook: after.append(value.clone())),
    ]
    sl.hooked_generate(bridge, torch.tensor([PROMPTS[0], PROMPTS[0][::-1]]), 5, hooks, engine=engine, **GREEDY)
    assert [value.shape[:2] for value in before] == [(2, 4), (2, 1), (2, 1), (2, 1), (2, 1)]
    for plain, steered in zip(before, after, strict=True):
        assert torch.equal(steered, plain + 2.5 * vector)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hook_is_a_plan_on_all_positions(bridge, tiny_llama_engine, vector, engine):
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(vector, layer=1), coef=2.0, where=sl.where.all()))
    options = {"policy": sl.SamplingPolicy.greedy(), "max_new_tokens": 8, "engine": engine}
    for prompt in PROMPTS:
        (by_plan,) = tiny_llama_engine.generate([prompt], plan=plan, **options)
        by_hook = run(bridge, [prompt], 8, sl.create_steering_hook(vector, 2.0), engine=engine, stop_token_ids=None)
        assert by_hook[0] == by_plan.token_ids


# --- cache, hooks, ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["tiny_llama_engine", "tiny_gpt2_engine"])
def test_cached_equals_uncached(request, vector, engine, name):
    bridge = request.getfixturevalue(name).model
    ids, mask = padded(PROMPTS, left=True, pad=0)
    options = {"attention_mask": mask, "engine": engine, "stop_token_ids": (25, 30), "do_sample": False}
    hook = sl.create_steering_hook(vector, 2.0)
    cached, uncached = (
        sl.hooked_generate(bridge, ids, 12, POINT, hook, use_cache=use, **options) for use in (True, False)
    )
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("site", ["resid_pre", "resid_post", "attn_out", "mlp_out"])
def test_editing_in_place_is_the_same_as_returning(bridge, vector, engine, site):
    def in_place(value, hook):
        value += 2 * vector

    def in_place_and_returned(value, hook):
        value += 2 * vector
        return value

    point = f"blocks.1.hook_{site}"
    expected = run(bridge, [PROMPTS[0]], 6, sl.create_steering_hook(vector, 2.0), point=point, engine=engine)
    for hook in (in_place, in_place_and_returned):
        assert run(bridge, [PROMPTS[0]], 6, hook, point=point, engine=engine) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hook_that_returns_none_leaves_everything(bridge, tiny_llama_engine, engine):
    (free,) = tiny_llama_engine.generate([PROMPTS[0]], policy=sl.SamplingPolicy.greedy(), max_new_tokens=8)
    assert run(bridge, [PROMPTS[0]], 8, nothing, engine=engine, stop_token_ids=None) == [free.token_ids]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrong", [lambda v: v[..., :32], lambda v: v[:, -1], lambda v: v.mean(), lambda v: 3.0])
def test_a_hook_that_returns_another_shape_is_an_error(bridge, engine, wrong):
    before = all_hooks(bridge)
    with pytest.raises(VectorShapeError, match=r"blocks\.1\.hook_out got an activation of shape \(1, 2, 64\)"):
        run(bridge, [[5, 6]], 2, lambda value, hook: wrong(value), engine=engine)
    assert all_hooks(bridge) == before


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_hook_may_return_another_dtype(bridge, vector, engine, dtype):
    seen = []
    hooks = [
        (POINT, lambda value, hook: (value + 2 * vector).to(dtype)),
        (POINT, lambda value, hook: seen.append(value.dtype)),
    ]
    out = sl.hooked_generate(bridge, torch.tensor([[5, 6]]), 4, hooks, engine=engine, **GREEDY)
    assert set(seen) == {torch.float32}
    if dtype == torch.float64:
        assert out[:, 2:].tolist() == run(bridge, [[5, 6]], 4, sl.create_steering_hook(vector, 2.0))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_list_of_pairs_runs_in_order_by_any_name(bridge, vector, engine):
    order = []
    hooks = [
        ("blocks.2.hook_resid_post", lambda value, hook: order.append(("late", hook.name))),
        ("blocks.0.hook_out", lambda value, hook: order.append(("a", hook.name))),
        ("blocks.0.hook_resid_post", lambda value, hook: order.append(("b", hook.name))),
    ]
    sl.hooked_generate(bridge, torch.tensor([[5, 6]]), 2, hooks, None, engine=engine, **GREEDY)
    once = [("a", "blocks.0.hook_out"), ("b", "blocks.0.hook_out"), ("late", "blocks.2.hook_out")]
    assert order == once * 2


def test_no_hooks_at_all_is_plain_generation(bridge, tiny_llama_engine):
    (free,) = tiny_llama_engine.generate([PROMPTS[0]], policy=sl.SamplingPolicy.greedy(), max_new_tokens=8)
    assert run(bridge, [PROMPTS[0]], 8, None, point=[], stop_token_ids=None) == [free.token_ids]


def test_any_hook_point_of_the_bridge_may_be_hooked(bridge):
    plain = run(bridge, [[5, 6, 7]], 6, nothing)
    shapes = []

    def first_key_only(value, hook):
        shapes.append(tuple(value.shape))
        pattern = torch.zeros_like(value)
        pattern[..., 0] = 1
        return pattern

    assert run(bridge, [[5, 6, 7]], 6, first_key_only, point="blocks.1.attn.hook_pattern") != plain
    assert shapes == [(1, 4, 3, 3), *((1, 4, 1, 3 + k) for k in range(1, 6))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("empty", [(), []])
def test_stop_token_ids_none_are_the_models_and_empty_is_never(bridge, engine, empty, monkeypatch):
    free = run(bridge, [PROMPTS[0], PROMPTS[0][::-1]], 8, nothing, engine=engine, stop_token_ids=empty)
    assert [len(row) for row in free] == [8, 8]
    third = free[0][2]
    monkeypatch.setattr(bridge.original_model.generation_config, "eos_token_id", [380, third])
    assert run(bridge, [PROMPTS[0], PROMPTS[0][::-1]], 8, nothing, engine=engine, stop_token_ids=empty) == free
    first = free[0].index(third)
    (stopped,) = run(bridge, [PROMPTS[0]], 8, nothing, engine=engine, stop_token_ids=None)
    assert stopped == free[0][: first + 1]


@pytest.mark.parametrize("ids", [list, tuple, set, torch.tensor])
def test_rows_that_end_early_are_right_padded(bridge, ids):
    free = run(bridge, [PROMPTS[0], PROMPTS[0][::-1], [9, 9, 9, 9]], 10, nothing)
    stop = free[0][1]
    found = run(bridge, [PROMPTS[0], PROMPTS[0][::-1], [9, 9, 9, 9]], 10, nothing, stop_token_ids=ids([stop]))
    ends = [row.index(stop) + 1 if stop in row else 10 for row in free]
    assert len(set(ends)) > 1
    pad = bridge.tokenizer.pad_token_id
    for row, before, end in zip(found, free, ends, strict=True):
        assert row == before[:end] + [pad] * (max(ends) - end)


def test_a_result_can_be_run_on(bridge, vector):
    """The output of one call, with a mask of its real tokens, is the input of the next."""
    hook = sl.create_steering_hook(vector, 1.0)
    whole = run(bridge, [PROMPTS[0]], 8, hook)
    half = sl.hooked_generate(bridge, torch.tensor([PROMPTS[0]]), 4, POINT, hook, **GREEDY)
    assert sl.hooked_generate(bridge, half, 4, POINT, hook, **GREEDY)[0, 4:].tolist() == whole[0]


# --- generate_steered_response ------------------------------------------------------------------------------------


def response(engine, vector, alpha, **options):
    options = {"max_tokens": 12, "do_sample": False} | options
    return sl.generate_steered_response(engine.model, engine.tokenizer, "Where is it?", POINT, vector, alpha, **options)


def test_a_response_uses_the_template_if_there_is_one(tiny_llama_engine, tiny_gpt2_engine, vector):
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(vector, layer=1), coef=2.0, where=sl.where.all()))
    for engine, chat in ((tiny_llama_engine, True), (tiny_gpt2_engine, False)):
        options = {"policy": sl.SamplingPolicy.greedy(), "max_new_tokens": 12, "chat": chat}
        (steered,) = engine.generate("Where is it?", plan=plan, **options)
        (plain,) = engine.generate("Where is it?", **options)
        assert response(engine, vector, 2.0) == steered.text.strip()
        assert response(engine, vector, 0.0) == plain.text.strip()
        assert steered.text.strip() != plain.text.strip()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_responses_vector_may_have_any_float_dtype(tiny_llama_engine, vector, dtype):
    rounded = vector.to(dtype)
    assert response(tiny_llama_engine, rounded, 2.0) == response(tiny_llama_engine, rounded.float(), 2.0)


def test_a_response_is_stripped_and_has_no_special_tokens(tiny_llama_engine, vector, monkeypatch):
    module = importlib.import_module("steerlab.engines.lens.hooked_generate")  # the name is also a function
    tokenizer = tiny_llama_engine.tokenizer
    answer = tokenizer("  a b ")["input_ids"]
    ids = [tokenizer.bos_token_id, *answer, tokenizer.pad_token_id, tokenizer.eos_token_id]

    def pretend(model, input_ids, *_):
        return torch.cat([input_ids, torch.tensor([ids])], dim=1)

    monkeypatch.setattr(module, "hooked_generate", pretend)
    assert response(tiny_llama_engine, vector, 1.0) == "a b"


def test_a_response_can_be_sampled(tiny_llama_engine, vector):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        a, b = (response(tiny_llama_engine, vector, 1.0, do_sample=True, temperature=2.0) for _ in range(2))
    assert a != b


def test_a_response_of_no_tokens_is_empty(tiny_llama_engine, vector):
    assert response(tiny_llama_engine, vector, 1.0, max_tokens=0) == ""
