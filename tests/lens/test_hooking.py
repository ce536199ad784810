import pytest
import torch

from steerlab.core.errors import HookPointError
from steerlab.engines.lens._hooking import attached, find_hook_point
from tests.lens.helpers import all_hooks


def nothing(value, hook):
    return None


def test_names_and_aliases_lead_to_one_point(tiny_llama_engine):
    bridge = tiny_llama_engine.model
    for ours, theirs in (("hook_resid_post", "hook_out"), ("hook_resid_pre", "hook_in")):
        assert find_hook_point(bridge, f"blocks.1.{ours}") is find_hook_point(bridge, f"blocks.1.{theirs}")


@pytest.mark.parametrize("name", ["blocks.1.hook_resid_pots", "blocks.99.hook_resid_post", "nonsense", ""])
def test_an_unknown_name_is_an_error_before_anything_runs(tiny_llama_engine, name):
    bridge = tiny_llama_engine.model
    before = all_hooks(bridge)
    with (
        pytest.raises(HookPointError, match=f"no hook point '{name}'"),
        attached(bridge, [("blocks.1.hook_out", nothing), (name, nothing)]),
    ):
        pytest.fail("the body ran")
    assert all_hooks(bridge) == before


def test_a_misspelt_name_is_told_the_nearest(tiny_llama_engine):
    with pytest.raises(HookPointError, match=r"Did you mean .*blocks\.1\.hook_resid_post"):
        find_hook_point(tiny_llama_engine.model, "blocks.1.hook_resid_pots")


def test_a_hook_that_never_fires_is_an_error(tiny_llama_engine):
    bridge = tiny_llama_engine.model
    with (
        pytest.raises(HookPointError, match=r"never fired.*blocks\.2\.hook_out"),
        attached(bridge, [("blocks.1.hook_out", nothing), ("blocks.2.hook_out", nothing)]),
    ):
        bridge.hook_dict["blocks.1.hook_out"](torch.ones(1, 1, 64))


def test_an_error_in_the_body_is_the_one_that_is_seen(tiny_llama_engine):
    bridge = tiny_llama_engine.model
    before = all_hooks(bridge)
    with pytest.raises(ZeroDivisionError), attached(bridge, [("blocks.1.hook_out", nothing)]):
        _ = 1 / 0
    assert all_hooks(bridge) == before


def test_hooks_run_in_the_order_given_after_the_users(tiny_llama_engine):
    bridge, order = tiny_llama_engine.model, []
    bridge.add_hook("blocks.1.hook_out", lambda value, hook: order.append("user"))
    try:
        hooks = [("blocks.1.hook_out", lambda value, hook, k=k: order.append(k)) for k in range(2)]
        with attached(bridge, hooks):
            tiny_llama_engine.logits("Hi")
        tiny_llama_engine.logits("Hi")
    finally:
        bridge.reset_hooks()
    assert order == ["user", 0, 1, "user"]


def test_no_hooks_at_all(tiny_llama_engine):
    with attached(tiny_llama_engine.model, []):
        pass
