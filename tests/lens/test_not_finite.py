"""Numbers that are no longer finite: one row's end, nobody else's change, and one sentence that says why."""

import json
import logging
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.core.errors import NonFiniteError
from tests.tiny_models import build_tiny_family

PROMPTS = [[5, 60, 7, 90], [12, 200], [17, 18, 19, 120, 33, 250, 8]]
BAD = 1
GREEDY = sl.SamplingPolicy.greedy()
OVERFLOW = r"float16 overflows: its largest number is 65504.*dtype='bfloat16' or dtype='float32'"


def breaking(value, hook):
    """NaN in rows whose prompt has two tokens, from the first on: also in their padding."""
    hit = (sl.current_step().prompt_lens == len(PROMPTS[BAD]))[:, None, None]
    return torch.where(hit.to(value.device), torch.nan, value)


@pytest.fixture
def broken_row(tiny_llama_engine):
    """The engine with a hook of a user's that makes one row NaN."""
    point = tiny_llama_engine.model.hook_dict["blocks.1.hook_in"]
    point.add_hook(breaking)
    yield tiny_llama_engine
    point.remove_hooks()


@pytest.mark.parametrize("policy", [GREEDY, sl.SamplingPolicy(top_p=0.9, repetition_penalty=1.2)])
def test_a_row_ends_with_an_error_and_the_others_are_as_without_it(broken_row, policy, caplog):
    options = {"policy": policy, "max_new_tokens": 6, "seed": [1, 2, 3]}
    with caplog.at_level(logging.WARNING, logger="steerlab"):
        rows = broken_row.generate(PROMPTS, **options)
    assert rows[BAD].finish_reason == "error"
    assert rows[BAD].token_ids == []
    assert rows[BAD].text == ""
    assert "prompt 1 are not finite" in caplog.text
    broken_row.model.reset_hooks()
    alone = broken_row.generate(PROMPTS, **options)
    assert [row.token_ids for row in alone if row.token_ids] == [row.token_ids for row in alone]
    for index in (0, 2):
        assert rows[index].token_ids == alone[index].token_ids
        assert rows[index].finish_reason == alone[index].finish_reason


def test_a_row_that_breaks_after_others_were_dropped_is_the_one_that_ends(tiny_llama_engine, monkeypatch):
    engine, prompts, options = tiny_llama_engine, [*PROMPTS, PROMPTS[0]], {"policy": GREEDY, "max_new_tokens": 6}
    plain = engine.generate(prompts, **options)
    end = plain[0].token_ids[0]
    assert end not in [*plain[1].token_ids, *plain[2].token_ids]
    monkeypatch.setattr(engine.model.original_model.generation_config, "eos_token_id", end)

    def late(value, hook):
        step = sl.current_step()
        hit = (step.prompt_lens == len(PROMPTS[2])) & (step.index == 3)
        return torch.where(hit[:, None, None], torch.nan, value)

    with engine.model.hooks(fwd_hooks=[("blocks.1.hook_in", late)]):
        rows = engine.generate(prompts, **options)
    assert [row.finish_reason for row in rows] == ["eos", "length", "error", "eos"]
    assert rows[1].token_ids == plain[1].token_ids
    assert rows[2].token_ids == plain[2].token_ids[:3]


def test_scores_and_captures_name_the_row(broken_row):
    with pytest.raises(NonFiniteError, match=r"logits of prompt 1 \(row 1\) are not finite.*a hook of yours"):
        broken_row.score(PROMPTS, [[[6]]] * 3)
    with pytest.raises(NonFiniteError, match=r"activations of prompt 1 at blocks\.2\.hook_resid_post are not finite"):
        broken_row.capture(PROMPTS, layers=[2])
    ids = torch.tensor([[5, 6, 9], [7, 8, 9]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    with pytest.raises(NonFiniteError, match=r"The logits of row 1 are not finite"):
        sl.hooked_generate(broken_row.model, ids, 3, [], attention_mask=mask)


@pytest.mark.parametrize("engine_name", ["fast", "bridge", "graph"])
def test_nan_of_one_call_reaches_no_later_call(tiny_llama_engine, engine_name):
    """A reused static cache held NaN behind the mask, and 0 times NaN is NaN."""
    engine = tiny_llama_engine
    options = {"policy": GREEDY, "max_new_tokens": 6, "engine": engine_name}
    before = engine.generate(PROMPTS, **options)
    weight = engine.model.original_model.get_input_embeddings().weight
    kept = weight[5].clone()
    with torch.no_grad():
        weight[5] = torch.nan
    long = [[5, *range(20, 40)], [12, 200, *range(40, 59)], [17, *range(60, 80)]]
    try:
        rows = engine.generate(long, **options)
    finally:
        with torch.no_grad():
            weight[5] = kept
    assert [row.finish_reason for row in rows] == ["error", rows[1].finish_reason, rows[2].finish_reason]
    assert all(len(row.token_ids) for row in rows[1:])
    after = engine.generate(PROMPTS, **options)
    assert [row.token_ids for row in after] == [row.token_ids for row in before]
    assert [row.token_log_probs for row in after] == [row.token_log_probs for row in before]


def test_padding_is_finite_where_the_row_is(tiny_llama_engine):
    """Padding held token 0, whose NaN or overflow then reached rows that were shorter than others."""
    weight = tiny_llama_engine.model.original_model.get_input_embeddings().weight
    expected = tiny_llama_engine.score(PROMPTS, [[[6, 7]]] * 3)
    kept = weight[0].clone()
    with torch.no_grad():
        weight[0] = torch.nan
    try:
        found = tiny_llama_engine.score(PROMPTS, [[[6, 7]]] * 3)
        rows = tiny_llama_engine.generate(PROMPTS, policy=GREEDY, max_new_tokens=3)
    finally:
        with torch.no_grad():
            weight[0] = kept
    assert found.log_prob == pytest.approx(expected.log_prob, abs=1e-4)
    assert "error" not in [row.finish_reason for row in rows]


def test_a_steered_row_that_overflows_has_a_receipt_that_is_json(broken_row):
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=2)
    rows = broken_row.generate(PROMPTS, plan=sl.Plan(sl.add(vector, coef=1.0)), max_new_tokens=3, policy=GREEDY)
    assert rows[BAD].finish_reason == "error"
    receipt = broken_row.receipts[BAD]
    assert receipt.edited == receipt.expected == 1  # the last prompt token
    stated = {k: v for k, v in asdict(receipt.edits[0]).items() if v == v}  # NaN means: none
    json.dumps(stated, allow_nan=False)
    assert "mean_relative_change" not in stated


def test_receipts_hold_no_infinity():
    from steerlab.core.receipts import mean_change

    assert mean_change(3.0, 2) == 1.5
    for total, edited in ((float("inf"), 2), (float("nan"), 2), (0.0, 0)):
        assert mean_change(total, edited) != mean_change(total, edited)


# --- float16 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overflow_path(tmp_path_factory):
    """A Gemma-3 whose stream leaves float16, as that family's does."""
    path = build_tiny_family(tmp_path_factory.mktemp("overflow") / "gemma3", "gemma3")
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight.fill_(3e4)
    model.save_pretrained(path)
    return path


CALLS = {
    "generate": lambda e: e.generate(["Hi", "there you"], max_new_tokens=3),
    "stream": lambda e: list(e.stream("Hi", max_new_tokens=3)),
    "score": lambda e: e.score("Hi", [" a"]),
    "logits": lambda e: e.logits("Hi"),
    "capture": lambda e: e.capture("Hi", layers=[1]),
    "capture of generated": lambda e: e.capture("Hi", layers=[0], where=sl.where.index(0), max_new_tokens=2),
    "perplexity": lambda e: sl.perplexity(e, "Hi there how are you"),
    "divergence": lambda e: sl.divergence(e, e, "Hi there how are you"),
    "median norm": lambda e: e.median_norm(1),
    "extract": lambda e: sl.extract(e, sl.ContrastPairs.from_lists(["a b", "a c"], ["b d", "f g"]), layers=[1]),
    "hooked_generate": lambda e: sl.hooked_generate(e.model, torch.tensor([[5, 6]]), 3, []),
}


@pytest.mark.parametrize("call", CALLS)
def test_float16_is_named_where_it_overflows(overflow_path, call):
    with sl.load(overflow_path, dtype="float16", device="cpu") as engine, pytest.raises(NonFiniteError, match=OVERFLOW):
        CALLS[call](engine)


def test_a_sequence_processor_names_float16_too(overflow_path):
    tokenizer = AutoTokenizer.from_pretrained(overflow_path)
    model = AutoModelForCausalLM.from_pretrained(overflow_path, dtype=torch.float16).eval()
    with pytest.raises(NonFiniteError, match=OVERFLOW):
        sl.SequenceProcessor(model, tokenizer)


def test_in_float32_the_same_model_runs(overflow_path):
    with sl.load(overflow_path, dtype="float32", device="cpu") as engine:
        assert engine.score("Hi", [" a"])[0].log_prob < 0
