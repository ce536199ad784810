import pytest

from steerlab.core import _encoded_pairs as encoded_pairs
from steerlab.core._encoded_pairs import encode_pairs
from steerlab.core._spelling import Continuation, ids_after, spelled_bytes, token_text
from steerlab.core._text import EncodedPrompt, encode_pair, encode_prompt
from steerlab.core.errors import TargetError
from tests.tiny_models import SPACING_KINDS, build_spacing_tokenizer

TOKENIZERS = {kind: build_spacing_tokenizer(kind) for kind in SPACING_KINDS}
PREFIXING = ("llama2", "llama2_metaspace", "t5", "bytes_prefixed")
TRUE_TO_TEXT = (*PREFIXING, "gemma", "bytes")  # all but word_piece, which forgets spaces and case
PROMPT = "The capital of France is"


@pytest.fixture(params=SPACING_KINDS)
def tokenizer(request):
    return TOKENIZERS[request.param]


def plain(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def named(tokenizer, *tokens):
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    assert tokenizer.unk_token_id not in ids
    return tuple(ids)


# --- what ids spell after a prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama2", "llama2_metaspace", "gemma"])
def test_a_completion_keeps_the_space_of_its_first_token(kind):
    tokenizer = TOKENIZERS[kind]
    prompt = encode_prompt(tokenizer, PROMPT, d_vocab=len(tokenizer)).token_ids
    assert Continuation(tokenizer, prompt).text(named(tokenizer, "▁yes", "an", "▁yes")) == " yesan yes"


def test_prompt_and_completion_together_spell_the_text(tokenizer):
    ids = plain(tokenizer, "The capital of France is Paris, yes.")
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for cut in range(1, len(ids) + 1):
        start = tokenizer.decode(ids[:cut], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert start + Continuation(tokenizer, ids[:cut]).text(ids[cut:]) == whole


@pytest.mark.parametrize("kind", TRUE_TO_TEXT)
def test_at_the_start_of_a_text_and_after_special_tokens_alone_ids_spell_what_they_do_alone(kind):
    tokenizer = TOKENIZERS[kind]
    ids = plain(tokenizer, "Paris")
    for context in ((), (tokenizer.bos_token_id,)):
        assert Continuation(tokenizer, context).text(ids) == tokenizer.decode(ids)


def test_special_tokens_between_prompt_and_completion_take_no_space_away():
    tokenizer = TOKENIZERS["llama2"]
    context = (*plain(tokenizer, PROMPT), *[tokenizer.pad_token_id] * 20)
    assert Continuation(tokenizer, context).text(named(tokenizer, "▁Paris")) == " Paris"


@pytest.mark.parametrize("kind", ["llama2", "bytes"])
def test_a_character_in_halves_is_the_continuations(kind):
    tokenizer = TOKENIZERS[kind]
    city = plain(tokenizer, "a🙂🙂")[-4:]  # neither is in the vocabulary: a token a byte
    for cut in (1, 2, 3):
        context = (*plain(tokenizer, "The a🙂"), *city[:cut])
        assert Continuation(tokenizer, context).text(city[cut:]) == "🙂"
        assert spelled_bytes(tokenizer, context, city[cut:]) == 4


@pytest.mark.parametrize(
    ("kind", "token", "text"), [("llama2", "▁yes", " yes"), ("llama2", "an", "an"), ("word_piece", "paris", " paris")]
)
def test_a_token_reads_as_inside_a_text(kind, token, text):
    tokenizer = TOKENIZERS[kind]
    assert token_text(tokenizer, named(tokenizer, token)[0]) == text


def test_special_tokens_read_as_their_names(tokenizer):
    assert token_text(tokenizer, tokenizer.eos_token_id).strip() == "</s>"


# --- which ids spell a target -------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", ["joint", "separate"])
@pytest.mark.parametrize("kind", TRUE_TO_TEXT)
def test_a_target_with_and_without_its_space_are_two(kind, boundary):
    tokenizer = TOKENIZERS[kind]
    ids = encode_prompt(tokenizer, PROMPT, d_vocab=len(tokenizer)).token_ids
    prompt = EncodedPrompt(ids, PROMPT if boundary == "separate" else None)
    found = {
        target: encode_pair(tokenizer, prompt, target, boundary=boundary, d_vocab=len(tokenizer))
        for target in ("Paris", " Paris", ".", "\nyes")
    }
    for target, pair in found.items():
        assert pair.context_ids == ids
        assert Continuation(tokenizer, ids).text(pair.target_ids) == (
            target if kind != "t5" else target.replace("\n", "")
        )
    joint = encode_prompt(tokenizer, PROMPT + " Paris", d_vocab=len(tokenizer)).token_ids
    assert ids + found[" Paris"].target_ids == joint


def test_variants_after_ids_are_spelled_with_and_without_the_space():
    tokenizer = TOKENIZERS["llama2_metaspace"]
    prompt = EncodedPrompt(plain(tokenizer, PROMPT), None)
    pairs = encode_pairs(tokenizer, [prompt], [["Paris"]], d_vocab=len(tokenizer), variants=("", " "))
    assert [pair.target_ids for _, _, pair in pairs] == [named(tokenizer, "Par", "is"), named(tokenizer, "▁Paris")]
    assert [pair.num_bytes for _, _, pair in pairs] == [5, 6]


def test_tokenizers_without_a_space_of_their_own_encode_as_before():
    for kind in ("gemma", "bytes"):
        tokenizer = TOKENIZERS[kind]
        for text in ("Paris", " Paris", "  Paris", "\n\nParis", "🙂", ".", "</s>"):
            assert ids_after(tokenizer, plain(tokenizer, PROMPT), text) == plain(tokenizer, text)


def test_after_bos_alone_a_text_starts():
    tokenizer = TOKENIZERS["llama2"]
    assert ids_after(tokenizer, (tokenizer.bos_token_id,), "Paris") == named(tokenizer, "▁Paris")


def test_a_target_that_cannot_be_spelled_is_refused():
    tokenizer = TOKENIZERS["word_piece"]
    prompt = plain(tokenizer, PROMPT)
    assert ids_after(tokenizer, prompt, " Paris") == named(tokenizer, "paris")
    assert ids_after(tokenizer, prompt, "an") != ids_after(tokenizer, prompt, " an")
    with pytest.raises(TargetError, match=r"cannot spell the target ' \.' right after other tokens.* read '\.' there"):
        ids_after(tokenizer, prompt, " .")


# --- the hint -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hints(monkeypatch, caplog):
    monkeypatch.setattr(encoded_pairs, "_hinted", False)

    def of(prompt, *targets, text=True, variants=("",)):
        tokenizer = TOKENIZERS["bytes"]
        ids = plain(tokenizer, prompt)
        encoded = EncodedPrompt(ids, prompt if text else None)
        encode_pairs(tokenizer, [encoded], [list(targets)], d_vocab=len(tokenizer), variants=variants)
        return [record.getMessage() for record in caplog.records]

    return of


@pytest.mark.parametrize("text", [True, False], ids=["text", "ids"])
def test_a_glued_target_is_hinted_at_once(hints, text):
    assert hints(PROMPT, " Paris", ".", text=text) == []
    (message,) = hints(PROMPT, "Paris", "Rome", text=text)
    assert "'Paris'" in message
    assert "'isParis'" in message
    assert hints(PROMPT, "Madrid", text=text) == [message]


@pytest.mark.parametrize(("prompt", "target"), [("It costs 1", "5"), ("東京", "は"), ("Really", "?"), ("is ", "Paris")])
def test_what_is_written_without_a_space_is_not_hinted_at(hints, prompt, target):
    assert hints(prompt, target) == []
