import itertools

import pytest
from hypothesis import event, given, reject, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from steerlab.core import _files as files
from steerlab.core._files import read_chunks
from steerlab.core._text import encode_prompt
from steerlab.core.errors import DataError, PromptError
from steerlab.core.shipped import neutral_text, reference_text
from steerlab.scoring._pieces import check_local, safe_cut, tokenised_pieces
from steerlab.scoring._source import CountedText
from tests.tiny_models import SENTENCES, build_tiny_tokenizer

CORPUS = [*SENTENCES, reference_text(), "aaaa bbbb\nabab\n\nAB ab  ab\n", "1 2 345\n6789\n"]
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(model, trainer, pre_tokenizer=None, normalizer=None, **special):
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def byte_level(pre_tokenizer=None, normalizer=None):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made = trained(models.BPE(), trainer, pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer)
    made.backend_tokenizer.decoder = decoders.ByteLevel()
    return made


def split_then_bytes():
    parts = [
        pre_tokenizers.Split(Regex(GPT4), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return byte_level(pre_tokenizers.Sequence(parts), normalizers.NFC())


def no_words():
    """Byte-pair encoding over the whole text, as Gemma's."""
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>"])
    return trained(models.BPE(unk_token="<unk>"), trainer, normalizer=normalizers.Replace(" ", "▁"))


def word_piece():
    trainer = trainers.WordPieceTrainer(vocab_size=500, show_progress=False, special_tokens=["[UNK]"])
    pre = pre_tokenizers.BertPreTokenizer()
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, pre, normalizers.BertNormalizer())


def metaspace_unigram():
    trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(prepend_scheme="never"))


MAKERS = [byte_level, split_then_bytes, no_words, word_piece, metaspace_unigram]
_MADE = {}


def made(maker):
    return _MADE.setdefault(maker, maker())


def joined(tokenizer, chunks, piece_chars):
    found = list(tokenised_pieces(tokenizer, chunks, d_vocab=10**6, piece_chars=piece_chars))
    return tuple(itertools.chain(*found)), len(found)


def whole(tokenizer, text):
    return encode_prompt(tokenizer, text, d_vocab=10**6).token_ids


BITS = ["the cat", " ran", "\n", "\n\n", " ", "   ", "\t", "a", "ab", "aaaa", "A", "12", "3456789", "...", "?!\n", "é"]
BITS += ["e\u0301", "東京", "🙂", "\r\n", "'ll", "don't", "<s>", "x y z", "Once upon a time", "- item\n", "▁", "  \nB"]
bits = st.sampled_from(BITS)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
@settings(max_examples=40)
@given(parts=st.lists(bits, min_size=20, max_size=120), chunk=st.integers(1, 60))
def test_pieces_are_the_tokens_of_the_whole(maker, parts, chunk):
    text = "x" + "".join(parts)
    chunks = [text[start : start + chunk] for start in range(0, len(text), chunk)]
    try:
        found, n_pieces = joined(made(maker), chunks, 60)
    except PromptError:  # nowhere a safe cut
        reject()
    event(f"{n_pieces} pieces")
    assert found == whole(made(maker), text)


@pytest.mark.parametrize("maker", [*MAKERS, build_tiny_tokenizer], ids=lambda maker: maker.__name__)
def test_prose_is_cut_and_its_tokens_are_those_of_the_whole(maker):
    tokenizer = maker(chat=False) if maker is build_tiny_tokenizer else made(maker)
    text = "\n\n".join([neutral_text(), *SENTENCES, reference_text()])
    for size in (200, 500, 1000):
        found, n_pieces = joined(tokenizer, [text[:7], text[7:5000], text[5000:]], size)
        assert n_pieces > 2
        assert found == whole(tokenizer, text)


def test_the_real_tokenizer(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    text = (neutral_text() + "\n 1234567 <|im_end|>\t 東京\n\n\n" + reference_text() + "\n") * 3
    found, n_pieces = joined(tokenizer, iter([text]), 2000)
    assert n_pieces > 4
    assert found == whole(tokenizer, text)


def test_a_short_text_is_one_piece_and_needs_no_guarantee():
    slow = type(
        "Slow", (), {"bos_token_id": None, "__call__": lambda self, text, **_: {"input_ids": [5] * len(text)}}
    )()
    assert joined(slow, ["abc", "def"], 60) == ((5,) * 6, 1)
    with pytest.raises(PromptError, match="not a fast tokenizer"):
        joined(slow, ["abc " * 100], 60)


def test_bos_stands_before_the_first_piece_alone():
    tokenizer = made(byte_level)
    with_bos = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")
    from tokenizers.processors import TemplateProcessing

    bos = with_bos.bos_token_id
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    found, n_pieces = joined(with_bos, [neutral_text()], 500)
    assert n_pieces > 2
    assert found.count(bos) == 1
    assert found == whole(with_bos, neutral_text())


def test_a_cut_that_changes_tokens_is_not_taken():
    tokenizer = made(byte_level)
    words = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    words.normalizer = normalizers.Prepend("x")  # puts something before every piece
    broken = PreTrainedTokenizerFast(tokenizer_object=words)
    assert safe_cut(tokenizer, neutral_text(), 1000) is not None
    assert safe_cut(broken, neutral_text(), 1000) is None
    with pytest.raises(PromptError, match="no place where it can be cut"):
        joined(broken, [neutral_text() * 3], 300)


def test_tokenizers_without_a_guarantee_are_refused():
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), (" ", -1.0)], unk_id=0))
    with pytest.raises(PromptError, match="Unigram without a split into words"):
        check_local(PreTrainedTokenizerFast(tokenizer_object=unigram))
    random = Tokenizer(models.BPE(dropout=0.1))
    with pytest.raises(PromptError, match="gives no such guarantee"):
        check_local(PreTrainedTokenizerFast(tokenizer_object=random))


def test_text_without_a_place_to_cut_is_refused():
    with pytest.raises(PromptError, match="no place where it can be cut"):
        joined(made(byte_level), ["x" * 5000], 100)


def test_chunks_that_are_no_text():
    with pytest.raises(PromptError, match="consists of strings, got int"):
        list(CountedText(["abc", 5]))


def test_files_are_read_as_text(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", 3)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xe6\x9d\xb1\n")
    assert "".join(read_chunks(path)) == "one\ntwo 東\n"
    path.write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(DataError, match="line 2 is not UTF-8 text, the byte 0xe9"):
        list(read_chunks(path))
    with pytest.raises(DataError, match="No such file"):
        list(read_chunks(tmp_path / "b.txt"))
