"""A program whose kernels run, by Triton's interpreter: the same tokens and receipts as the fast engine."""

import pytest

from tests.interpreted import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed here")

CODE = """
import functools
import importlib
from pathlib import Path

import pytest
import torch

import steerlab as sl
from steerlab.engines.lens._program_rows import why_no_program
from tests.tiny_families import build_family
from tests.tiny_models import build_tiny_family

PLACES = ("_kernels.attention", "_kernels.editing", "_kernels.elementwise", "_kernels.linear", "_kernels.rotary")
USERS = ("_edit_buffers", "_fixed_cache", "_program")
launched = set()
torch.manual_seed(0)
engine = sl.load(build_tiny_family(Path("{folder}"), "llama"), device="cpu")
vectors = [sl.SteeringVector.from_tensor(torch.randn(engine.info.d_model), layer=layer) for layer in (0, 1)]
plan = sl.Plan(
    sl.add(vectors[0], coef=2.0, where=sl.where.all()),
    sl.clamp(vectors[1], hi=0.1, where=sl.where.generated(until=3)),
    sl.ablate(vectors[1], norm="keep"),
)
options = dict(plan=plan, max_new_tokens=6, policy=sl.SamplingPolicy(temperature=1.5), seed=3)
prompts = [[5, 60, 7], [12, 200, 31, 44]]
without_end = engine.generate(prompts, engine="fast", **options)
engine.model.original_model.generation_config.eos_token_id = without_end[0].token_ids[2]
wanted = engine.generate(prompts, engine="fast", **options)
assert why_no_program(engine.model, plan, is_compiled=False) is None  # compared while torch computes, which is faster
# their functions of Llama's name take one tensor, and angles of half the width
others = [sl.load(build_family(Path("{folder}") / name, name), device="cpu") for name in ("gemma4_text", "gpt_oss")]
assert all(why_no_program(other.model, sl.Plan(), is_compiled=False) is None for other in others)
for place in (*PLACES, *(f"engines.lens.{{name}}" for name in USERS), "_runtime.decoding"):
    module = importlib.import_module(f"steerlab.{{place}}")
    module.runs_kernels = lambda rows: rows.stride(-1) == 1
for place, names in (
    ("editing", ["edit"]), ("elementwise", ["add_and_norm", "rms_norm", "silu_gate", "write"]),
    ("rotary", ["rotate"]), ("feeding", ["feed"]), ("greedy", ["settle"]),
):
    module = importlib.import_module(f"steerlab._kernels.{{place}}")
    for name in names:
        def noting(*args, function=getattr(module, name), name=name):
            launched.add(name)
            return function(*args)
        setattr(module, name, noting)
found = engine.generate(prompts, engine="graph", **options)
assert launched == {{"edit", "add_and_norm", "rms_norm", "silu_gate", "write", "rotate", "feed", "settle"}}, launched
for ours, theirs in zip(found, wanted):
    assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
for ours, theirs in zip(found.receipts, wanted.receipts):
    for mine, other in zip(ours.edits, theirs.edits):
        assert mine.edited == other.edited
        assert mine.mean_relative_change == pytest.approx(other.mean_relative_change, rel=1e-3, nan_ok=True)
assert found[0].finish_reason == "eos" and len({{len(row.token_ids) for row in found}}) == 2, found.texts
for rotary in [m for m in engine.model.original_model.modules() if hasattr(m, "inv_freq")]:
    rotary.inv_freq.mul_(0.25)  # in place, which no table that was made of it has seen
options["max_new_tokens"] = 4
wanted, found = (engine.generate(prompts, engine=name, **options) for name in ("fast", "graph"))
for ours, theirs in zip(found, wanted):
    assert ours.token_ids == theirs.token_ids
    assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-4)
for other in others:
    wanted, found = (
        other.generate(prompts, engine=name, max_new_tokens=3, policy=sl.SamplingPolicy.greedy())
        for name in ("fast", "graph")
    )
    assert [row.token_ids for row in found] == [row.token_ids for row in wanted]
launched.clear()
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # all but the C++ that inductor would write
wanted, found = (engine.generate(prompts, engine=name, **options) for name in ("graph", "compiled"))
assert {{"edit", "add_and_norm", "rms_norm", "silu_gate", "write", "rotate"}} <= launched, launched
for ours, theirs in zip(found, wanted):
    assert ours.token_ids == theirs.token_ids
    assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-5)
for ours, theirs in zip(found.receipts, wanted.receipts):
    assert [edit.edited for edit in ours.edits] == [edit.edited for edit in theirs.edits]
"""


def test_a_program_by_kernels_equals_fast(tmp_path):
    run_interpreted(CODE.format(folder=tmp_path))
