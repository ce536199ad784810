import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.engines.vllm._client.compiled_plan import compile_plan
from steerlab.engines.vllm._client.position_runs import Row, resolve
from steerlab.engines.vllm._client.requests import Request
from steerlab.engines.vllm._client.sampling import check_policy, request_seed, token_log_qs
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.packets import pack, unpack
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.engines.vllm._wire.runs import clip, merged, positions_in, runs_of, size
from steerlab.steering.positions._prompt_lookup import PromptContent

w = sl.where

masks = st.lists(st.booleans(), max_size=40)
runs = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda r: (r[0], r[0] + r[1])), max_size=6)


@given(masks)
def test_runs_hold_the_positions_of_a_mask(mask):
    found = runs_of(mask)
    assert positions_in(found) == [i for i, chosen in enumerate(mask) if chosen]
    assert size(found) == sum(mask)
    assert all(a[1] < b[0] for a, b in zip(found, found[1:], strict=False))  # noqa: RUF007


@given(masks, st.integers(0, 40), st.integers(0, 40))
def test_clipping_keeps_what_is_inside(mask, start, stop):
    inside = [i for i in positions_in(runs_of(mask)) if start <= i < stop]
    assert positions_in(clip(runs_of(mask), start, stop)) == inside


@given(runs)
def test_merging_keeps_every_position_once(found):
    assert positions_in(merged(found)) == sorted({p for first, last in found for p in range(first, last)})


class Params:
    """Stands for vLLM's sampling parameters: only `extra_args` is looked at."""

    def __init__(self, extra_args):
        self.extra_args = extra_args


def test_a_spec_survives_the_way_to_the_workers():
    for prefix, group in itertools.product((None, ("3", 40)), (None, ("7", 2))):
        spec = RequestSpec("7", "abc", (((0, 3), (5, 6)), ()), ((1, 2),), prefix=prefix, group=group)
        assert RequestSpec.of(Params(spec.to_args())) == spec
    assert RequestSpec.of(Params(None)) is None
    assert RequestSpec.of(Params({"other": 1})) is None
    assert RequestSpec.of(None) is None


def test_a_spec_is_told_from_what_others_put_there():
    for spec in (RequestSpec("7", "abc", (((0, 3), (5, 6)), ()), ((1, 2),)), RequestSpec("7", None, (), ((0, 1),))):
        ((key, text),) = spec.to_args().items()
        body = json.loads(text)

        def read(changed, key=key):
            return RequestSpec.of(Params({key: json.dumps(changed)}))

        assert read(body) == spec
        assert read(body | {"more": 1}) is None
        assert read(body | {"prefix": ["3", "40"]}) is None
        assert read(body | {"group": ["3"]}) is None
        assert all(read({**body, name: 1.5}) is None for name in body)
        assert all(read({n: body[n] for n in body if n != name}) is None for name in body)
        assert RequestSpec.of(Params({key: body})) is None
        assert RequestSpec.of(Params({key: "a ticket"})) is None


def test_a_block_is_named_by_the_edits_inside_it():
    spec = RequestSpec("7", "abc", (((40, 50),), ((60, 70),)))
    assert spec.key_between(0, 32) is None
    assert spec.key_between(32, 64) == RequestSpec("8", "abc", (((40, 50),), ((60, 64),))).key_between(32, 64)
    assert spec.key_between(32, 64) != RequestSpec("8", "abd", (((40, 50),), ((60, 70),))).key_between(32, 64)
    assert spec.key_between(32, 64) != RequestSpec("8", "abc", (((40, 51),), ((60, 70),))).key_between(32, 64)
    assert spec.key_between(32, 64) != RequestSpec("8", "abc", (((60, 70),), ((40, 50),))).key_between(32, 64)


def test_a_block_edited_everywhere_is_named_alike_however_far_the_edits_reach():
    spec = RequestSpec("7", "abc", (((0, 128),), ((10, 96),)))
    assert spec.key_between(32, 64) == spec.key_between(64, 96) == "abc:everywhere"
    assert spec.key_between(32, 64) == RequestSpec("8", "abc", (((0, 64), (96, 128)), ((32, 64),))).key_between(32, 64)
    assert spec.key_between(96, 128) != spec.key_between(64, 96)
    assert spec.key_between(0, 32) != spec.key_between(32, 64)
    assert spec.key_between(0, 32) == RequestSpec("8", "abc", (((0, 32),), ((10, 40),))).key_between(0, 32)
    assert spec.key_between(128, 160) is None
    assert spec.key_between(32, 64) != RequestSpec("8", "abc", (((0, 128),), ())).key_between(32, 64)


def test_packets_carry_headers_and_arrays():
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([], dtype=np.int64)}
    header, found = unpack(pack({"x": [1, "y"]}, arrays))
    assert header == {"x": [1, "y"]}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert unpack(pack(None)) == (None, {})


def test_a_configuration_is_checked_and_sorted():
    assert SteeringConfig((3, 1)).layers == (1, 3)
    for wrong in ({"max_directions": 0}, {"max_runs": True}, {"capture_tokens": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            SteeringConfig((1,), **wrong)


def test_log_q_where_the_raw_log_probs_determine_it():
    assert token_log_qs(SamplingPolicy.greedy(), [-1.0, -2.0]) == [0.0, 0.0]
    assert token_log_qs(SamplingPolicy(), [-1.0]) == [-1.0]
    for policy in (SamplingPolicy(temperature=0.7), SamplingPolicy(top_k=3), SamplingPolicy(repetition_penalty=1.2)):
        assert np.isnan(token_log_qs(policy, [-1.0])).all()


def test_min_p_alone_is_sampled_exactly_and_greedy_ignores_filters():
    check_policy(SamplingPolicy(min_p=0.1))
    check_policy(SamplingPolicy(temperature=0.0, min_p=0.1, top_k=4))
    with pytest.raises(PolicyError):
        check_policy(SamplingPolicy(min_p=0.1, top_p=0.9))


def test_request_seeds_fit_vllm_and_depend_on_the_whole_key():
    seeds = {request_seed((s, p, n)) for s in range(4) for p in range(4) for n in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("where", "when", "shared"),
    [
        (w.all(), {"read": w.last_prompt()}, False),
        (w.index(2, 5), {"read": w.index(0, 3)}, False),
        (w.default(), {"read": w.last_prompt()}, True),
        (w.index(3), {"read": w.index(0, 3)}, True),
        (w.all(), {"read": w.index(0)}, True),
        (w.all(), None, True),
    ],
)
def test_blocks_that_may_be_written_before_an_answer_are_shared_with_nobody(where, when, shared):
    """An edit before the position that answers its condition acts only if one pass holds both."""
    vector, probe = (sl.SteeringVector.from_tensor(torch.eye(4)[k], layer=1) for k in (0, 1))
    asked = sl.add(vector, coef=1.0, where=where, when=None if when is None else sl.when(probe, above=0.0, **when))
    # of another edit, whose condition is answered in time, or that has none
    plan = sl.Plan(asked, sl.add(probe, coef=1.0, where=w.all(), when=sl.when(probe, above=0.0, read=w.index(0))))
    compiled = compile_plan(plan, SteeringConfig((1,), max_conditions=2))
    tokens = (5, 6, 7, 6, 5, 8)
    groups = resolve(compiled.selections, Row(tokens, 6, 9, PromptContent(0, 1, tokens)), 8)
    request = Request(0, 0, tokens, {}, None, compiled, groups, prefix=("3", 4))
    specs = [request.spec(row) for row in ("1", "2")]
    keys = {spec.key_between(0, 32) for spec in specs}
    assert len(keys) == (1 if shared else 2)
    assert {spec.prefix for spec in specs} == {("3", 4) if shared else None}
    assert RequestSpec.of(Params(specs[0].to_args())) == specs[0]
