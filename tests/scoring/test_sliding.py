import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.errors import InputError, PlanError, PromptError
from steerlab.scoring import Perplexity, text_nlls
from tests.tiny_models import SENTENCES, build_chain, build_spacing_tokenizer

TEXT = " ".join(SENTENCES)


@pytest.fixture(scope="module")
def huggingface(tiny_llama_path):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_path, attn_implementation="eager")


def reference_nlls(model, ids, context, stride, first=1):
    """Each token's nll from a whole uncached window, without the code under test."""
    found = []
    for k in range(first, len(ids)):
        if k < context:
            start = 0
        else:
            step = min(stride, context - 1)
            stop = min(context + step * math.ceil((k + 1 - context) / step), len(ids))
            start = max(0, stop - context)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:k]])).logits[0, -1].double()
        found.append(-logits.log_softmax(-1)[ids[k]].item())
    return found


# --- perplexity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "stride"), [(24, 24), (24, 10), (256, 256)])
def test_equals_an_independent_computation(tiny_llama_engine, huggingface, context, stride):
    ids = tiny_llama_engine.tokenizer(TEXT)["input_ids"][:90]
    found = sl.perplexity(tiny_llama_engine, ids, context_length=context, stride=stride)
    expected = reference_nlls(huggingface, ids, context, stride)
    assert found.num_tokens == len(ids) - 1
    assert found.token_nlls.tolist() == pytest.approx(expected, abs=1e-4)
    assert found.nll == pytest.approx(np.mean(expected), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)


def test_windows_are_weighted_by_tokens_and_strides_agree_on_the_count(tiny_llama_engine):
    ids = tiny_llama_engine.tokenizer(TEXT)["input_ids"][:31]
    # at context 30 the second window scores one token alone
    found = sl.perplexity(tiny_llama_engine, ids, context_length=30)
    first, second = found.token_nlls[:29], found.token_nlls[29:]
    assert len(second) == 1
    assert found.nll == pytest.approx((first.sum() + second.sum()) / 30)
    assert found.nll != pytest.approx((first.mean() + second.mean()) / 2, abs=1e-3)
    assert sl.perplexity(tiny_llama_engine, ids, context_length=30, stride=7).num_tokens == 30


def test_bits_per_byte(tiny_llama_engine):
    text = "naïve café"
    found = sl.perplexity(tiny_llama_engine, text)
    tokens = tiny_llama_engine.tokenizer(text)["input_ids"]
    first = tiny_llama_engine.tokenizer.decode(tokens[:1])
    assert found.num_bytes == len(text.encode()) - len(first.encode())
    assert found.bits_per_byte == pytest.approx(found.token_nlls.sum() / math.log(2) / found.num_bytes)


@pytest.mark.parametrize("text", ["東京 is a city.", "✓ done"])
def test_a_first_character_split_over_tokens_counts_whole(tiny_llama_engine, text):
    tokens = tiny_llama_engine.tokenizer(text)["input_ids"]
    assert tiny_llama_engine.tokenizer.decode(tokens[:1]) == "\ufffd"
    assert sl.perplexity(tiny_llama_engine, text).num_bytes == len(text.encode())


def special(path, kind="bytes"):
    """An engine whose tokenizer has `<unk>` and `<s>` as special tokens."""
    tokenizer = build_spacing_tokenizer(kind)
    return build_chain(path / kind, tokenizer, [5, 6, 7])


def test_names_of_special_tokens_in_a_text_count_as_they_are_written(tmp_path):
    with sl.load(special(tmp_path), device="cpu") as engine:
        text = "The <unk> of Rome"
        assert engine.tokenizer.unk_token_id in engine.tokenizer(text)["input_ids"]
        first = len(engine.tokenizer.decode(engine.tokenizer(text)["input_ids"][:1]))
        for given in (text, iter(["The <u", "nk> of", " Rome"]), _written(tmp_path / "a.txt", text)):
            found = sl.perplexity(engine, given)
            assert found.num_bytes == 17 - first
            bits = found.token_nlls.sum() / math.log(2)
            assert found.bits_per_byte == pytest.approx(bits / (17 - first))
        assert sl.perplexity(engine, engine.tokenizer(text)["input_ids"]).num_bytes == 12 - first  # ids spell no name
        assert sl.perplexity(engine, "<unk>The").num_bytes == 3
        assert sl.perplexity(engine, "<s><s>The").num_bytes == 3
        assert sl.perplexity(engine, "The<s>", bos_each_window=True).num_bytes == 6
        assert sl.perplexity(engine, "<s>The", bos_each_window=True).num_bytes == 3
        (score,) = engine.score(["The"], [[" <unk> of"]])
        assert score.num_bytes == 9
        (score,) = engine.score(["The"], [[engine.tokenizer(" <unk> of")["input_ids"]]])
        assert score.num_bytes == 4


@pytest.mark.parametrize("kind", ["llama2", "t5", "word_piece", "bytes_prefixed"])
def test_bytes_are_the_texts_whatever_the_tokenizer_makes_of_it(tmp_path, kind):
    text = "The ✈ of Rome's  café"  # an unknown character, two spaces
    with sl.load(special(tmp_path, kind), device="cpu") as engine:
        found = sl.perplexity(engine, text)
        unscored = 0 if engine.tokenizer(text)["input_ids"][0] == engine.tokenizer.bos_token_id else 3
        assert found.num_bytes == len(text.encode()) - unscored
        assert engine.score(["The"], [[" ✈ of"]])[0].num_bytes == 7


def _written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("given", ["cut \ud83d", iter(["whole ", "cut \ud83d"])], ids=["text", "chunks"])
def test_half_a_character_is_refused(tiny_llama_engine, given):
    with pytest.raises(PromptError, match="holds half a character"):
        sl.perplexity(tiny_llama_engine, given)


def test_bos_before_each_window_scores_the_first_token_too(tiny_llama_engine, huggingface):
    tokenizer = tiny_llama_engine.tokenizer
    ids = tokenizer(TEXT)["input_ids"][:40]
    found = sl.perplexity(tiny_llama_engine, ids, context_length=20, stride=10, bos_each_window=True)
    assert found.num_tokens == 40
    with torch.no_grad():
        logits = huggingface(torch.tensor([[tokenizer.bos_token_id, *ids[:18]]])).logits[0].double().log_softmax(-1)
    expected = [-logits[k, ids[k]].item() for k in range(19)]
    assert found.token_nlls[:19].tolist() == pytest.approx(expected, abs=1e-4)
    with_bos = sl.perplexity(
        tiny_llama_engine, [tokenizer.bos_token_id, *ids], context_length=20, stride=10, bos_each_window=True
    )
    assert np.array_equal(with_bos.token_nlls, found.token_nlls)


def test_a_plan_at_scale_zero_changes_nothing_and_a_real_one_edits_every_token(tiny_llama_engine):
    torch.manual_seed(0)
    v = sl.SteeringVector.from_tensor(torch.randn(64), layer=1)
    plan = sl.Plan(sl.add(v, coef=3.0))
    options = {"context_length": 24, "stride": 12}
    plain = sl.perplexity(tiny_llama_engine, TEXT[:120], **options)
    zero = sl.perplexity(tiny_llama_engine, TEXT[:120], plan=plan.scaled(0.0), **options)
    assert np.array_equal(zero.token_nlls, plain.token_nlls)
    steered = sl.perplexity(tiny_llama_engine, TEXT[:120], plan=plan, **options)
    assert (steered.token_nlls != plain.token_nlls).all()
    everywhere = sl.Plan(sl.add(v, coef=3.0, where=sl.where.all()))
    assert np.array_equal(
        sl.perplexity(tiny_llama_engine, TEXT[:120], plan=everywhere, **options).token_nlls, steered.token_nlls
    )


@pytest.mark.parametrize("as_given", [list, tuple, torch.tensor, np.array])
def test_ids_of_any_kind(tiny_llama_engine, as_given):
    ids = tiny_llama_engine.tokenizer(SENTENCES[0])["input_ids"]
    assert sl.perplexity(tiny_llama_engine, as_given(ids)).nll == sl.perplexity(tiny_llama_engine, SENTENCES[0]).nll


@pytest.mark.parametrize("text", ["", [], [5], ["two", "texts"]])
def test_nothing_to_score_is_refused(tiny_llama_engine, text):
    with pytest.raises(PromptError):
        sl.perplexity(tiny_llama_engine, text)


@pytest.mark.parametrize(
    "options",
    [
        {"context_length": 257},
        {"context_length": 1},
        {"context_length": 8, "stride": 9},
        {"context_length": 8, "stride": 9, "bos_each_window": True},
        {"stride": 1000},
        {"stride": 0},
        {"context_length": 2, "bos_each_window": True},
        {"context_length": 8.0},
    ],
)
def test_bad_context_and_stride_are_refused(tiny_llama_engine, options):
    with pytest.raises(InputError):
        sl.perplexity(tiny_llama_engine, TEXT, **options)


def test_hopeless_texts_have_infinite_perplexity():
    assert Perplexity(800.0, 1, 1, 2, 1, np.array([800.0])).perplexity == math.inf


# --- many texts ---------------------------------------------------------------------------------------------------


def test_text_nlls_equal_perplexity_of_each(tiny_llama_engine):
    found = text_nlls(tiny_llama_engine, SENTENCES[:3])
    for nlls, text in zip(found, SENTENCES[:3], strict=True):
        assert nlls.tolist() == pytest.approx(sl.perplexity(tiny_llama_engine, text).token_nlls.tolist(), abs=1e-5)


def test_text_nlls_refuse_what_cannot_be_scored(tiny_llama_engine):
    with pytest.raises(PromptError, match="text 1 has 1"):
        text_nlls(tiny_llama_engine, [SENTENCES[0], [5]])
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(torch.ones(64), layer=1), coef=1.0, where=sl.where.index(3)))
    assert len(text_nlls(tiny_llama_engine, [[5] * 200], plan=plan)[0]) == 199
    with pytest.raises(PlanError, match="windows"):
        text_nlls(tiny_llama_engine, [[5] * 300], plan=plan)


def test_positions_that_windows_cannot_keep_are_refused(tiny_llama_engine):
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    text = "the cat ran home " * 30
    for where in (sl.where.index(3), sl.where.prompt(), sl.where.generated(after=2, until=4)):
        plan = sl.Plan(sl.add(vector, coef=1.0, where=where))
        with pytest.raises(PlanError, match="windows"):
            sl.perplexity(tiny_llama_engine, text, context_length=32, stride=16, plan=plan)
    plan = sl.Plan(sl.add(vector, coef=1.0))
    assert sl.perplexity(tiny_llama_engine, text, context_length=32, stride=16, plan=plan).num_tokens > 32


def test_long_texts_lose_no_token(tiny_llama_engine):
    text = "the cat ran home " * 100
    ids = tiny_llama_engine.tokenizer(text)["input_ids"]
    assert len(ids) > tiny_llama_engine.info.context_length
    (nlls,) = text_nlls(tiny_llama_engine, [text])
    assert len(nlls) == len(ids) - 1
    assert nlls == pytest.approx(sl.perplexity(tiny_llama_engine, text).token_nlls, abs=1e-4)
