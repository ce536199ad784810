"""A model with Llama-2's kind of tokenizer, and what both engines must say of its texts."""

import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import build_chain, build_spacing_tokenizer

PROMPT = "The capital of France is"


def build(directory):
    """A model that goes on from the prompt with the tokens `▁yes`, `an`, `▁yes`, `an`, …."""
    tokenizer = build_spacing_tokenizer("llama2")
    ids = tokenizer.convert_tokens_to_ids(["▁is", "▁yes", "an", "▁yes"])
    return build_chain(directory, tokenizer, ids)


def check_texts(engine):
    """Completions keep the space of their first token, and stop strings see it."""
    ids = engine.tokenizer(PROMPT)["input_ids"]
    for prompt in (PROMPT, ids):
        assert engine.generate([prompt], max_new_tokens=3).texts == [" yesan yes"]
    yes, an = engine.tokenizer.convert_tokens_to_ids(["▁yes", "an"])
    for stop, text, tokens in ((" yes", "", [yes]), ("yes", " ", [yes]), ("an yes", " yes", [yes, an, yes])):
        (completion,) = engine.generate([PROMPT], max_new_tokens=8, stop=stop)
        assert (completion.text, completion.token_ids, completion.finish_reason) == (text, tokens, "stop")


def check_scores(engine, path):
    """A target with and without its space are two, after ids and where each part is encoded alone."""
    ids = engine.tokenizer(PROMPT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    wanted = {
        target: _log_prob(model, ids, engine.tokenizer.convert_tokens_to_ids(tokens))
        for target, tokens in (("Paris", ["Par", "is"]), (" Paris", ["▁Paris"]))
    }
    assert abs(wanted["Paris"] - wanted[" Paris"]) > 0.1
    for prompt, options in ((ids, {}), (PROMPT, {"boundary": "separate"}), (PROMPT, {})):
        scores = engine.score([prompt], [list(wanted)], **options)
        torch.testing.assert_close([s.log_prob for s in scores], list(wanted.values()), atol=1e-4, rtol=0)
        assert [s.num_bytes for s in scores] == [5, 6]
    scores = engine.score([ids], [["Paris"]], variants=("", " "))
    torch.testing.assert_close([s.log_prob for s in scores], list(wanted.values()), atol=1e-4, rtol=0)


def _log_prob(model, ids, target):
    with torch.no_grad():
        log_probs = model(torch.tensor([[*ids, *target]])).logits.log_softmax(-1)[0]
    return sum(log_probs[len(ids) - 1 + k, token].item() for k, token in enumerate(target))
