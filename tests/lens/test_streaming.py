"""`engine.stream`: the pieces are the text, they are whole, and between them the model is untouched."""

import pytest

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.engines.lens._backends import unhooked_model_of
from tests.lens.helpers import PROMPTS, all_hooks, strong_plan

GREEDY = sl.SamplingPolicy.greedy()
HOT = sl.SamplingPolicy(temperature=2.0)
ENGINES = ["fast", "bridge"]


def shadow_hooks(engine):
    return [
        hook
        for module in unhooked_model_of(engine.model).model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]


@pytest.mark.parametrize(
    ("engine", "policy", "steered"),
    [("auto", HOT, True), *((engine, *way) for engine in ENGINES for way in ((GREEDY, False), (HOT, True)))],
)
def test_the_pieces_joined_are_generates_text(tiny_engine, engine, policy, steered):
    _, lens = tiny_engine
    options = {"policy": policy, "max_new_tokens": 12, "seed": 3, "engine": engine}
    options["plan"] = strong_plan(lens) if steered else None
    for prompt in PROMPTS[:3]:
        (expected,) = lens.generate(prompt, **options)
        receipts = lens.receipts
        lens.receipts = []
        assert "".join(lens.stream(prompt, **options)) == expected.text
        assert lens.receipts == receipts


def test_text_comes_as_it_grows_on_the_real_model(lens_engine):
    pieces = list(lens_engine.stream("The capital of France is", policy=GREEDY, max_new_tokens=5))
    assert pieces[0] == " Paris"
    assert len(pieces) > 2


def test_no_replacement_character_before_the_end(tiny_llama_engine):
    """A byte-level model that is sampled hot breaks characters all the time."""
    broken = whole = 0
    for seed in range(12):
        options = {"policy": HOT, "max_new_tokens": 24, "seed": seed}
        (expected,) = tiny_llama_engine.generate("Hi", **options)
        pieces = list(tiny_llama_engine.stream("Hi", **options))
        assert "".join(pieces) == expected.text
        broken += "\N{REPLACEMENT CHARACTER}" in expected.text
        whole += any(ord(c) > 127 and c != "\N{REPLACEMENT CHARACTER}" for c in expected.text)
        for piece in pieces[:-1]:  # one inside a piece can never become a character; one at its end could
            assert not piece.endswith("\N{REPLACEMENT CHARACTER}")
    assert broken
    assert whole


@pytest.mark.parametrize("text", ["naïve café ✓ 東京 Übung", "🙂 a 🙂🙂", "é"])
def test_multi_byte_characters_come_whole(tiny_llama_engine, monkeypatch, text):
    """The model is made to say one byte at a time."""
    tokenizer = tiny_llama_engine.tokenizer
    pieces_of_bytes = [i for b in text.encode() for i in [tokenizer.convert_tokens_to_ids(byte_token(b))]]
    assert tokenizer.decode(pieces_of_bytes) == text
    say(tiny_llama_engine, monkeypatch, pieces_of_bytes)
    options = {"policy": GREEDY, "max_new_tokens": len(pieces_of_bytes)}
    pieces = list(tiny_llama_engine.stream("Hi", **options))
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len(pieces) == len(text)
    # stopped in the middle of a character, the text ends as generate's does
    options["max_new_tokens"] -= 1
    (expected,) = tiny_llama_engine.generate("Hi", **options)
    assert "".join(tiny_llama_engine.stream("Hi", **options)) == expected.text


def byte_token(byte):
    """The byte's token in a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()[byte]


def say(engine, monkeypatch, ids):
    """Makes greedy decoding give these tokens, one after another, in every row."""
    from steerlab._runtime.rows import Rows

    position = {"extend": lambda rows: 0, "step": lambda rows: rows._passes - 1}
    for name, place in position.items():
        original = getattr(Rows, name)

        def forced(self, *args, original=original, place=place, **options):
            logits = original(self, *args, **options).clone()
            logits[:, -1] = 0.0
            logits[:, -1, ids[min(place(self), len(ids) - 1)]] = 9.0
            return logits

        monkeypatch.setattr(Rows, name, forced)


# --- stop strings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["lo wo", "o world", "world", "h", "hello world!", " ", "xyz", "d!x", ["rld", "lo"]])
def test_a_stop_string_over_several_tokens_is_never_shown(tiny_llama_engine, monkeypatch, stop):
    text = "hello world!"
    say(tiny_llama_engine, monkeypatch, [tiny_llama_engine.tokenizer.convert_tokens_to_ids(c) for c in "helloĠworld!"])
    options = {"policy": GREEDY, "max_new_tokens": len(text), "stop": stop}
    (expected,) = tiny_llama_engine.generate("Hi", **options)
    strings = [stop] if isinstance(stop, str) else stop
    cut = min((text.find(s) for s in strings if s in text), default=len(text))
    assert expected.text == text[:cut]
    assert expected.finish_reason == ("length" if cut == len(text) else "stop")
    pieces = list(tiny_llama_engine.stream("Hi", **options))
    assert "".join(pieces) == expected.text
    assert all(pieces)


def test_what_could_become_a_stop_string_is_held_back_and_then_given(tiny_llama_engine, monkeypatch):
    letters = "aabaac"
    say(tiny_llama_engine, monkeypatch, [tiny_llama_engine.tokenizer.convert_tokens_to_ids(c) for c in letters])
    pieces = list(tiny_llama_engine.stream("Hi", policy=GREEDY, max_new_tokens=6, stop="aaa"))
    assert pieces == ["aab", "aac"]
    pieces = list(tiny_llama_engine.stream("Hi", policy=GREEDY, max_new_tokens=5, stop="aaa"))
    assert "".join(pieces) == "aabaa"


# --- the model between the pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_closed_early_it_leaves_no_hook_and_no_trace(tiny_llama_engine, engine):
    lens = tiny_llama_engine
    before = all_hooks(lens.model)
    plain = lens.generate("Hi", policy=GREEDY, max_new_tokens=6)[0].token_ids
    lens.receipts = ["of the call before"]
    stream = lens.stream("Hi", plan=strong_plan(lens), policy=GREEDY, max_new_tokens=20, engine=engine)
    next(stream)
    stream.close()
    assert lens.receipts == ["of the call before"]
    assert all_hooks(lens.model) == before
    assert not shadow_hooks(lens)
    assert lens.generate("Hi", policy=GREEDY, max_new_tokens=6)[0].token_ids == plain


@pytest.mark.parametrize("engine", ENGINES)
def test_other_calls_may_come_between_the_pieces(tiny_llama_engine, engine):
    """A suspended stream must not steer them, whatever their shape, nor they it."""
    lens = tiny_llama_engine
    plan = strong_plan(lens, where=sl.where.all())
    options = {"policy": GREEDY, "max_new_tokens": 10, "engine": engine}
    prompts = [[5], [5, 6], "Hi"]
    expected = "".join(lens.stream([5], plan=plan, **options))
    plain = [lens.generate([p], **options)[0].token_ids for p in prompts]
    scores = lens.score(["Hi"], [[" a"]]).log_prob.tolist()
    before = all_hooks(lens.model)

    stream = lens.stream([5], plan=plan, **options)
    text = next(stream)
    for piece in stream:
        assert all_hooks(lens.model) == before
        assert not shadow_hooks(lens)
        assert [lens.generate([p], **options)[0].token_ids for p in prompts] == plain
        assert lens.score(["Hi"], [[" a"]]).log_prob.tolist() == scores
        text += piece
    assert text == expected


def test_two_streams_side_by_side(tiny_llama_engine):
    lens = tiny_llama_engine
    options = {"policy": GREEDY, "max_new_tokens": 10}
    a, b = {"plan": strong_plan(lens)}, {"plan": strong_plan(lens).scaled(-1)}
    expected = ["".join(lens.stream("Hi", **options, **arm)) for arm in (a, b)]
    streams = [lens.stream("Hi", **options, **arm) for arm in (a, b)]
    texts = ["", ""]
    running = [0, 1]
    while running:
        for k in list(running):
            piece = next(streams[k], None)
            if piece is None:
                running.remove(k)
            else:
                texts[k] += piece
    assert texts == expected
    assert texts[0] != texts[1]


def test_what_is_refused(tiny_llama_engine):
    with pytest.raises(InputError, match="max_new_tokens"):
        list(tiny_llama_engine.stream("Hi", max_new_tokens=-1))
    with pytest.raises(InputError, match="seed"):
        list(tiny_llama_engine.stream("Hi", seed=-1))
    with pytest.raises(InputError, match="stop string"):
        list(tiny_llama_engine.stream("Hi", stop=""))
    assert list(tiny_llama_engine.stream("Hi", max_new_tokens=0)) == []
