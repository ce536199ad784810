"""Both engines cut prompts and targets alike, and take the same arguments."""

import inspect
from types import SimpleNamespace

import pytest

from steerlab.core.engine import Engine
from steerlab.core.errors import ContextLengthError, PromptError, TargetError
from steerlab.engines.lens.engine import LensEngine
from steerlab.engines.vllm.client.encoding import Encoder as VLLMEncoder
from steerlab.engines.vllm.engine import VLLMEngine
from steerlab.runtime.encoding import Encoder as LensEncoder
from tests.tiny_models import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer(chat=True)
INFO = SimpleNamespace(d_vocab=len(TOKENIZER), context_length=40)
LENS, VLLM = LensEncoder(TOKENIZER, INFO), VLLMEncoder(TOKENIZER, INFO)

CASES = [
    (["The harb", "It was"], [["our", " seven"], ["noon"]], {}),
    (["The harb"], [["our"]], {"boundary": "separate"}),
    (["It was", [5, 6]], [["noon"], ["noon", "it"]], {"variants": ("", " ")}),
    ([[5, 6]], [[[7], [8, 9]]], {"score_eos": True}),
    ("Hi", ["it", " it"], {"chat": True, "variants": (" ",), "score_eos": True}),
]


def both(prompts, targets, *, boundary="joint", score_eos=False, chat=False, variants=("",)):
    ours, _ = LENS.pairs(prompts, targets, boundary=boundary, variants=variants, score_eos=score_eos, chat=chat)
    return ours, VLLM.pairs(prompts, targets, boundary, score_eos, chat, variants)


@pytest.mark.parametrize(("prompts", "targets", "options"), CASES)
def test_the_engines_encode_alike(prompts, targets, options):
    lens, vllm = both(prompts, targets, **options)
    assert [(i, j, pair) for i, j, _, pair in vllm] == lens
    assert [i for i, _, _, _ in vllm] == sorted(i for i, _, _, _ in vllm)


def test_a_context_may_be_filled_and_not_exceeded():
    lens, vllm = both([[5] * 30], [[[6] * 10]])
    assert len(lens) == len(vllm) == 1
    for encode in (
        lambda: LENS.pairs([[5] * 30], [[[6] * 11]]),
        lambda: VLLM.pairs([[5] * 30], [[[6] * 11]], "joint", False, False),
    ):
        with pytest.raises(ContextLengthError, match="41 tokens, 1 more than the context of 40"):
            encode()


def test_vllms_prompts_are_errors_one_by_one():
    good, bad, long = VLLM.prompts(["It was", [5, 10**6], [5] * 41], False, 0)
    assert good.token_ids == tuple(TOKENIZER("It was")["input_ids"])
    assert isinstance(bad, PromptError)
    assert isinstance(long, ContextLengthError)


def test_half_a_character_fails_its_prompt_alone():
    chat = [{"role": "user", "content": "cut \ud83d"}]
    good, bad, talk, also_good = VLLM.prompts(["It was", "cut \ud83d", chat, "noon"], False, 0)
    assert (good.text, also_good.text) == ("It was", "noon")
    for error in (bad, talk):
        assert isinstance(error, PromptError)
        assert "holds half a character" in str(error)


def test_without_a_tokenizer_only_ids_are_scored():
    blind = VLLMEncoder(None, INFO)
    ((_, _, _, pair),) = blind.pairs([[5]], [[[6, 7]]], "joint", False, False)
    assert (pair.target_ids, pair.num_bytes) == ((6, 7), None)
    with pytest.raises(TargetError, match="no tokenizer"):
        blind.pairs([[5]], [["it"]], "joint", False, False)
    with pytest.raises(TargetError, match="score_eos=True needs an EOS"):
        blind.pairs([[5]], [[[6]]], "joint", True, False)


@pytest.mark.parametrize("engine", [LensEngine, VLLMEngine])
def test_both_engines_score_by_the_protocol(engine):
    promised = inspect.signature(Engine.score).parameters
    taken = inspect.signature(engine.score).parameters
    assert {name: p.default for name, p in promised.items()} == {name: taken[name].default for name in promised}
