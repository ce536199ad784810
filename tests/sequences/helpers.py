import itertools
import math

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from steerlab.sequences import BatchedSequences


class CharTokenizer:
    """Three tokens `a`, `b` and the end of text, for models small enough to enumerate."""

    bos_token_id = None
    eos_token_id = 2
    pad_token_id = 2
    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": ["ab".index(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join("ab"[i] for i in ids if i != 2)


def enumerable_model(d_vocab, eos):
    """A float64 model of a few tokens whose logits depend on the whole prefix."""
    # not a Llama: its norms compute in float32 whatever the weights
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "initializer_range": 0.6}
    ends = {"bos_token_id": 0, "eos_token_id": eos, "pad_token_id": eos, "tie_word_embeddings": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=d_vocab, **sizes, **ends)).double().eval()


def all_responses(length, eos=2, vocabulary=3):
    """Every response that a sampler can give: up to the first end of text, or to the length."""
    found = set()
    for ids in itertools.product(range(vocabulary), repeat=length):
        end = ids.index(eos) + 1 if eos in ids else length
        found.add(ids[:end])
    return sorted(found)


def enumerated(prompt, length):
    """All responses to one prompt as sequences with B = 1."""
    return BatchedSequences.from_ids([prompt], [[list(ids) for ids in all_responses(length)]], pad_id=2)


def step_logits(model, prompt, response):
    """Logits that predict each token of a response, [T, V], by the plain model."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, len(prompt) - 1 : -1]


def reference_q(logits, temperature=1.0, top_p=1.0):
    """The sampling distribution written out: sort, drop the low end, renormalise. Float64."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += p[i]
        if mass >= top_p:
            break
    q = np.zeros_like(p)
    q[kept] = p[kept] / p[kept].sum()
    return q


def entropy_of(q):
    return -sum(x * math.log(x) for x in q if x > 0)
