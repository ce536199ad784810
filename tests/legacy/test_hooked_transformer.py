"""hooked_generate on HookedTransformer, to be run by `make test-legacy` in its own environment."""

import importlib.metadata
import os
from typing import Any

import pytest
import torch

import steerlab as sl
from tests.tiny_models import build_tiny_tokenizer

VERSION = importlib.metadata.version("transformer-lens")
if int(VERSION.split(".")[0]) >= 4:
    reason = f"TransformerLens {VERSION} has no HookedTransformer; `make test-legacy` makes an environment with one"
    if os.environ.get("STEERLAB_REQUIRE_LEGACY"):
        raise ImportError(reason)
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.legacy

D_MODEL, LENGTHS, NEW = 64, (9, 3, 6), 12
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 16, "rotary_adjacent_pairs": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"positional_embedding_type": "standard"},
    "llama": ROTARY | {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu", "n_key_value_heads": 2},
    "alibi": {"positional_embedding_type": "alibi"},
    "local": {"use_local_attn": True, "attn_types": ["global", "local"] * 2, "window_size": 4},
}
POINT = "blocks.2.hook_resid_post"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """With tensors this small, threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    build_tiny_tokenizer(chat=False).save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def build(tokenizer, family="gpt2", **settings):
    """A random model with room for the longest prompt and its continuation, and for no more."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    defaults = {"n_layers": 4, "d_model": D_MODEL, "d_head": 16, "n_ctx": max(LENGTHS) + NEW, "act_fn": "gelu"}
    defaults |= {"d_vocab": 384, "device": "cpu", "seed": 0, "initializer_range": 0.3}
    return HookedTransformer(HookedTransformerConfig(**defaults | FAMILIES[family] | settings), tokenizer=tokenizer)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tokenizer):
    return build(tokenizer, request.param)


@pytest.fixture(scope="module")
def gpt2(tokenizer):
    return build(tokenizer)


def prompts(pad: int) -> list[torch.Tensor]:
    """Prompts of unequal length; the second begins and the third ends with the id that the tokenizer pads with."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 384, (length,), generator=generator) for length in LENGTHS]
    rows[1][0] = rows[2][-1] = pad
    return rows


def batch_of(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask."""
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((width - len(row),), 5), row]) for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def vector(seed=0) -> torch.Tensor:
    return torch.randn(D_MODEL, generator=torch.Generator().manual_seed(seed))


def steer(alpha=6.0):
    return sl.create_steering_hook(vector(), alpha)


def only_at(position: int):
    """A hook that adds the vector at one absolute position."""

    def hook(value, hook):
        here = sl.current_step().positions == position
        return torch.where(here[..., None], value + 6 * vector(), value)

    return hook


def by_hand(model, prompt, hooks, n=NEW) -> list[int]:
    """Greedy tokens from whole passes over one prompt, by the library's own means."""
    ids = prompt[None]
    for _ in range(n):
        with torch.no_grad():
            logits = model.run_with_hooks(ids, fwd_hooks=hooks, attention_mask=torch.ones_like(ids))
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


def generate(model, rows, hooks, **options) -> list[list[int]]:
    ids, mask = batch_of(rows)
    options = {"do_sample": False, "stop_token_ids": (), **options}
    return sl.hooked_generate(model, ids, NEW, hooks, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()


def n_hooks(model) -> int:
    return sum(len(point.fwd_hooks) + len(point._forward_hooks) for point in model.hook_dict.values())


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_batch_of_unequal_prompts_is_each_alone_by_hand(model, tokenizer, use_cache, padding_side):
    rows = prompts(tokenizer.pad_token_id)
    model.tokenizer.padding_side = padding_side
    for hooks in ([], [(POINT, steer())]):
        wanted = [by_hand(model, row, hooks) for row in rows]
        assert generate(model, rows, hooks, use_cache=use_cache) == wanted
        assert len({tuple(row) for row in wanted}) == 3
        assert all(len(set(row)) > 3 for row in wanted), "the tokens would not show a wrong position"


def test_right_padding_is_left_padding(gpt2):
    rows = prompts(2)
    ids, mask = batch_of(rows)
    turned = torch.stack([torch.cat([row, row.new_zeros(ids.shape[1] - len(row))]) for row in rows])
    options = {"do_sample": False, "stop_token_ids": ()}
    found = sl.hooked_generate(gpt2, turned, NEW, POINT, steer(), attention_mask=mask.flip(-1), **options)
    assert found[:, ids.shape[1] :].tolist() == generate(gpt2, rows, [(POINT, steer())])


def test_an_unhooked_prompt_continues_as_the_library_continues_it(model):
    prompt = prompts(3)[0][None]
    wanted = model.generate(prompt, NEW, do_sample=False, stop_at_eos=False, prepend_bos=False, verbose=False)
    assert sl.hooked_generate(model, prompt, NEW, [], do_sample=False, stop_token_ids=()).tolist() == wanted.tolist()


def test_sampling_with_a_cache_is_sampling_without(model):
    hooks = [(POINT, steer(2.0))]
    options = {"do_sample": True, "temperature": 1.0, "seed": 4}
    cached, uncached = (generate(model, prompts(2), hooks, use_cache=use, **options) for use in (True, False))
    assert cached == uncached
    assert cached != generate(model, prompts(2), hooks, **options | {"seed": 5})


def test_half_precision_with_a_cache(tokenizer):
    model = build(tokenizer, "llama", dtype=torch.bfloat16)
    assert len(generate(model, prompts(2), [(POINT, steer())])[0]) == NEW


# --- hooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_hook_reaches_its_layer_and_no_other(gpt2, use_cache):
    rows = prompts(2)
    found = {}
    for layer in range(4):
        hooks = [(f"blocks.{layer}.hook_resid_post", steer())]
        found[layer] = generate(gpt2, rows, hooks, use_cache=use_cache)
        assert found[layer] == [by_hand(gpt2, row, hooks) for row in rows]
    assert all(found[layer] != found[layer + 1] for layer in range(3))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("position", [0, 2, 7, 10])
def test_a_hook_acts_at_an_absolute_position_of_each_row(model, position, use_cache):
    def at_position(value, hook):
        if value.shape[1] > position:
            value[:, position] += 6 * vector()
        return value

    point, rows = "blocks.0.hook_resid_post", prompts(2)
    found = generate(model, rows, [(point, only_at(position))], use_cache=use_cache)
    assert found == [by_hand(model, row, [(point, at_position)]) for row in rows]
    assert found != generate(model, rows, [(point, only_at(position + 1))], use_cache=use_cache)


@pytest.mark.parametrize("use_cache", [True, False])
def test_hooks_know_their_step(gpt2, use_cache):
    seen = []

    def watch(value, hook):
        step = sl.current_step()
        assert hook.name == POINT
        assert value.shape[:2] == step.positions.shape
        seen.append((step.index, step.positions[:, -1].tolist(), step.prompt_mask.sum(-1).tolist(), step.rows.tolist()))

    generate(gpt2, prompts(2), [(POINT, watch)], use_cache=use_cache)
    assert [index for index, *_ in seen] == list(range(NEW))
    assert [last for _, last, *_ in seen] == [[n - 1 + k for n in LENGTHS] for k in range(NEW)]
    assert seen[0][2:] == (list(LENGTHS), [0, 1, 2])


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_that_end_leave_the_others_as_they_were(gpt2, use_cache):
    rows, hooks = prompts(2), [(POINT, steer())]
    whole = generate(gpt2, rows, hooks)
    stops = [whole[0][1], whole[2][3]]
    ends = [next((k + 1 for k, token in enumerate(row) if token in stops), NEW) for row in whole]
    seen = []

    def watch(value, hook):
        step = sl.current_step()
        assert len(value) == len(step.rows)
        seen.append(step.rows[step.live].tolist())

    watched = [*hooks, (POINT, watch)]
    found = generate(gpt2, rows, watched, use_cache=use_cache, stop_token_ids=stops)
    for row, tokens, end in zip(whole, found, ends, strict=True):
        assert tokens[:end] == row[:end]
        assert set(tokens[end:]) <= {gpt2.tokenizer.pad_token_id}
    assert seen == [[row for row in range(3) if ends[row] > k or k == 0] for k in range(max(ends))]
    assert len({*map(len, seen)}) == 3, "rows end one after another, and are dropped"


def test_the_tokenizers_eos_ends_a_row(gpt2, monkeypatch):
    row = prompts(2)[0]
    tokens = by_hand(gpt2, row, [])
    end = tokens.index(tokens[2]) + 1
    for name, value in (("eos_token_id", tokens[2]), ("pad_token_id", 2)):
        monkeypatch.setattr(type(gpt2.tokenizer), name, value, raising=False)
    assert sl.hooked_generate(gpt2, row[None], NEW, [], do_sample=False)[0, len(row) :].tolist() == tokens[:end]


def test_what_a_hook_returns_keeps_dtype(gpt2):
    hooks = [(POINT, lambda value, hook: value.double() + 6 * vector().double())]
    assert generate(gpt2, prompts(2), hooks) == generate(gpt2, prompts(2), [(POINT, steer())])


def test_other_points_are_named_as_the_library_names_them(gpt2):
    names = ["hook_embed", "blocks.1.attn.hook_z", "blocks.3.mlp.hook_post", "ln_final.hook_normalized"]
    fired = []
    generate(gpt2, prompts(2), [(name, lambda value, hook: fired.append(hook.name)) for name in names])
    assert set(fired) == set(names)


def test_the_users_hooks_survive_and_work_and_ours_are_gone(gpt2):
    vector_there = [(POINT, steer())]
    wanted = generate(gpt2, prompts(2), vector_there)
    gpt2.add_hook(*vector_there[0])
    gpt2.add_perma_hook("blocks.0.hook_resid_pre", lambda value, hook: None)
    try:
        with gpt2.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda value, hook: None)]):
            before = n_hooks(gpt2)
            assert generate(gpt2, prompts(2), [("blocks.3.hook_mlp_out", lambda value, hook: None)]) == wanted
            with pytest.raises(ZeroDivisionError):
                generate(gpt2, prompts(2), [(POINT, lambda value, hook: 1 / 0)])
            assert n_hooks(gpt2) == before
        assert n_hooks(gpt2) == before - 2
    finally:
        gpt2.reset_hooks(including_permanent=True)
    assert n_hooks(gpt2) == 0


# --- errors -------------------------------------------------------------------------------------------------------


def test_an_unknown_hook_point(gpt2):
    with pytest.raises(sl.HookPointError, match=r"no hook point 'blocks.2.hook_resid_past'.*resid_post'"):
        generate(gpt2, prompts(2), [("blocks.2.hook_resid_past", steer())])


def test_a_hook_point_that_cannot_fire(gpt2):
    with pytest.raises(sl.HookPointError, match=r"'blocks.2.hook_mlp_in' cannot fire.*use_hook_mlp_in"):
        generate(gpt2, prompts(2), [("blocks.2.hook_mlp_in", steer())])


def test_a_hook_point_that_never_fired(tokenizer):
    model = build(tokenizer, attn_only=False)
    model.blocks[2].hook_resid_mid.forward = None  # a module that nobody calls
    model.blocks[2].forward = lambda value, **_: value
    with pytest.raises(sl.HookPointError, match=r"never fired.*blocks.2.hook_resid_mid"):
        generate(model, prompts(2), [("blocks.2.hook_resid_mid", steer())], use_cache=False)
    assert n_hooks(model) == 0


def test_a_hook_that_returns_another_shape(gpt2):
    with pytest.raises(sl.VectorShapeError, match="return the same shape"):
        generate(gpt2, prompts(2), [(POINT, lambda value, hook: value[:, -1])])


def test_more_tokens_than_the_context(gpt2):
    with pytest.raises(sl.ContextLengthError, match="1 tokens more than the model's context of 21"):
        sl.hooked_generate(gpt2, batch_of(prompts(2))[0], NEW + 1, [])


def test_an_engine_for_bridges(gpt2):
    with pytest.raises(sl.InputError, match="engine='fast' is for a TransformerBridge"):
        generate(gpt2, prompts(2), [], engine="fast")


def test_a_model_that_counts_padding(gpt2, monkeypatch):
    monkeypatch.setattr(gpt2.cfg, "use_logn_attn", True, raising=False)
    with pytest.raises(sl.PromptError, match="use_logn_attn"):
        generate(gpt2, prompts(2), [])
    assert len(generate(gpt2, prompts(2)[:1], [])[0]) == NEW


# --- text ---------------------------------------------------------------------------------------------------------


def test_generate_steered_response(gpt2, tokenizer):
    steered, plain = (
        sl.generate_steered_response(gpt2, tokenizer, "Two", POINT, vector(), alpha, NEW, do_sample=False)
        for alpha in (20.0, 0.0)
    )
    assert steered != plain
    tokens = by_hand(gpt2, torch.tensor(tokenizer.encode("Two")), [])
    tokens = tokens[: tokens.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in tokens else tokens
    assert plain == tokenizer.decode(tokens, skip_special_tokens=True).strip()
