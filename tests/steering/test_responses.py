"""Vectors from the model's own responses, and from sets of texts without pairs."""

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError, VectorValueError

ASKED = ["Where are the keys?", "Why had it stopped?"]
PAIRS = sl.ContrastPairs.from_lists([f"Kind: {q}" for q in ASKED], [f"Rude: {q}" for q in ASKED])
DRAWN = sl.Responses(max_new_tokens=6, policy=sl.SamplingPolicy.greedy())
generated = sl.where.generated


def response_means(engine, prompts, layer, after=0):
    """The mean stream over the tokens of each greedy response, from one pass over prompt and response."""
    found = []
    for row in engine.generate(prompts, policy=DRAWN.policy, max_new_tokens=6):
        prompt = engine.tokenizer(prompts[row.prompt_index])["input_ids"]
        written = row.token_ids[:-1] if row.finish_reason == "eos" else row.token_ids
        stream = engine.capture([[*prompt, *written]], layers=layer)[layer]
        found.append(stream[len(prompt) + after :].mean(dim=0))
    return torch.stack(found)


@pytest.mark.parametrize("after", [0, 2])
def test_the_mean_over_the_models_own_words(tiny_llama_engine, after):
    read = generated(after=after)
    vectors = sl.extract(tiny_llama_engine, PAIRS, layers=[1, 2], read=read, responses=DRAWN)
    for layer, vector in vectors.items():
        sides = [response_means(tiny_llama_engine, side, layer, after) for side in (PAIRS.positives, PAIRS.negatives)]
        torch.testing.assert_close(vector.values, (sides[0] - sides[1]).mean(dim=0), atol=1e-4, rtol=1e-4)
    card = vectors[1].card
    assert sl.Responses.from_json(card.responses) == DRAWN
    assert card.from_json(card.to_json()) == card
    assert vectors.diagnostics(PAIRS.take([1])).to_frame().auc.between(0, 1).all()


def test_sampled_responses_depend_on_their_prompt_alone(tiny_llama_engine):
    drawn = sl.Responses(max_new_tokens=5, n=3, seed=4)
    options = {"layers": 1, "read": generated(), "responses": drawn}
    whole, in_parts = (sl.extract(tiny_llama_engine, PAIRS, **options, pairs_per_chunk=k)[1] for k in (64, 1))
    torch.testing.assert_close(whole.values, in_parts.values, atol=1e-5, rtol=1e-4)
    other = sl.extract(tiny_llama_engine, PAIRS, **{**options, "responses": sl.Responses(5, n=3, seed=5)})[1]
    assert not torch.allclose(whole.values, other.values, atol=1e-2)


def test_unpaired_sets_by_tokens_and_by_texts(tiny_llama_engine):
    longer, shorter = (
        ["The ferry leaves the harbour at seven", "Nobody knew", "The street was quiet"],
        ["Soup", "Two plus"],
    )
    layers = {"layers": [1, 3], "read": "all"}
    reads = [[tiny_llama_engine.capture([t], layers=3)[3] for t in side] for side in (longer, shorter)]
    by_tokens = [torch.cat(side).mean(dim=0) for side in reads]
    by_texts = [torch.stack([rows.mean(dim=0) for rows in side]).mean(dim=0) for side in reads]
    for pool, means in (("tokens", by_tokens), ("texts", by_texts)):
        v = sl.extract_unpaired(tiny_llama_engine, longer, shorter, pool=pool, **layers)[3]
        torch.testing.assert_close(v.values, means[0] - means[1], atol=1e-4, rtol=1e-4)
        assert (v.card.method, v.card.pool, v.card.notes) == ("mean_diff_unpaired", pool, "3 texts against 2")
    assert not torch.allclose(by_tokens[0] - by_tokens[1], by_texts[0] - by_texts[1], atol=1e-2)


def test_unpaired_responses(tiny_llama_engine):
    found = sl.extract_unpaired(
        tiny_llama_engine, PAIRS.positives, ["Hm"], layers=2, read=generated(), pool="texts", responses=DRAWN
    )[2]
    sides = [response_means(tiny_llama_engine, list(side), 2).mean(dim=0) for side in (PAIRS.positives, ["Hm"])]
    torch.testing.assert_close(found.values, sides[0] - sides[1], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_read_is_refused(tiny_llama_engine):
    engine = tiny_llama_engine
    cases = [
        (lambda: sl.extract(engine, PAIRS, layers=1, responses=DRAWN), InputError, "reads no response"),
        (
            lambda: sl.extract(engine, PAIRS, layers=1, read=generated() | sl.where.span("K")),
            InputError,
            "looks something",
        ),
        (
            lambda: sl.extract(engine, PAIRS, layers=1, read=generated(after=6), responses=DRAWN),
            InputError,
            "selects no token of the response to prompt 0",
        ),
        (lambda: sl.Responses(0), InputError, "max_new_tokens"),
        (lambda: sl.extract_unpaired(engine, "a text", ["b"]), DataError, "positives is a list of texts"),
        (lambda: sl.extract_unpaired(engine, ["a b"], []), DataError, "negatives is a list of texts"),
        (lambda: sl.extract_unpaired(engine, ["a b"], ["c d"], pool="mean"), InputError, "'tokens' or 'texts'"),
        (lambda: sl.extract_unpaired(engine, ["a b"], ["a b"], layers=1), VectorValueError, "same at layers"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()
