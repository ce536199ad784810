"""How engines cut prompts and targets, and that they take the same arguments."""

import inspect
from types import SimpleNamespace

import pytest

from steerlab._runtime.encoding import Encoder
from steerlab.core.engine import Engine
from steerlab.core.errors import ContextLengthError, PromptError, TargetError
from steerlab.engines.lens.engine import LensEngine
from steerlab.engines.vllm.engine import VLLMEngine
from tests.tiny_models import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer(chat=True)
INFO = SimpleNamespace(d_vocab=len(TOKENIZER), context_length=40)
ENCODER = Encoder(TOKENIZER, INFO)


def test_pairs_come_in_order_with_what_their_prompts_hold():
    pairs, contents = ENCODER.pairs(["It was", [5, 6]], [["noon"], ["noon", [7]]])
    assert [(i, j) for i, j, _ in pairs] == [(0, 0), (1, 0), (1, 1)]
    assert [(c.index, c.n_prompts, c.text) for c in contents] == [(0, 2, "It was"), (1, 2, None)]
    assert (contents[1].token_ids, pairs[2][2].target_ids) == ((5, 6), (7,))


def test_a_context_may_be_filled_and_not_exceeded():
    pairs, _ = ENCODER.pairs([[5] * 30], [[[6] * 10]])
    assert len(pairs) == 1
    with pytest.raises(ContextLengthError, match="Row 0: prompt and target came to 41 tokens, 1 more than the context"):
        ENCODER.pairs([[5] * 30], [[[6] * 11]])
    assert len(ENCODER.prompts([[5] * 30], False, 10)) == 1
    with pytest.raises(ContextLengthError, match=r"Row 1: prompt and new tokens came to 41.*40\. Shorten it; nothing"):
        ENCODER.prompts([[5], [5] * 30], False, 11)
    with pytest.raises(ContextLengthError, match=r"Row 0: the prompt came to 41 .* Shorten it, or wait; nothing"):
        Encoder(TOKENIZER, INFO, ", or wait").prompts([[5] * 41], False, 11)


def test_prompts_are_errors_one_by_one():
    good, bad, long, strange = ENCODER.each_prompt(["It was", [5, 10**6], [5] * 41, 7.5], False)
    assert good.token_ids == tuple(TOKENIZER("It was")["input_ids"])
    assert isinstance(bad, PromptError)
    assert isinstance(long, ContextLengthError)
    assert "Prompt 3 is neither a string" in str(strange)


def test_half_a_character_fails_its_prompt_alone():
    chat = [{"role": "user", "content": "cut \ud83d"}]
    good, bad, talk, also_good = ENCODER.each_prompt(["It was", "cut \ud83d", chat, "noon"], False)
    assert (good.text, also_good.text) == ("It was", "noon")
    for error in (bad, talk):
        assert isinstance(error, PromptError)
        assert "holds half a character" in str(error)


def test_without_a_tokenizer_only_ids_are_scored():
    blind = Encoder(None, INFO)
    ((_, _, pair),), _ = blind.pairs([[5]], [[[6, 7]]])
    assert (pair.target_ids, pair.num_bytes) == ((6, 7), None)
    with pytest.raises(PromptError, match="no tokenizer"):
        blind.pairs(["It was"], [[[6]]])
    with pytest.raises(TargetError, match="no tokenizer"):
        blind.pairs([[5]], [["it"]])
    with pytest.raises(TargetError, match="score_eos=True needs an EOS"):
        blind.pairs([[5]], [[[6]]], score_eos=True)


@pytest.mark.parametrize("engine", [LensEngine, VLLMEngine])
def test_both_engines_score_by_the_protocol(engine):
    promised = inspect.signature(Engine.score).parameters
    taken = inspect.signature(engine.score).parameters
    assert {name: p.default for name, p in promised.items()} == {name: taken[name].default for name in promised}
