"""Five tokens, four steps: every sequence, every policy, on the nuclei and on replayed sets, against plain formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from steerlab.core.token_sets import TokenSets
from steerlab.sequences import BatchedSequences, SequenceProcessor, entropy_gradient
from tests.sequences.helpers import all_responses, enumerable_model, reference_q

VOCABULARY, LENGTH, PROMPT, EOS = 5, 4, [0, 3, 1], 2
POLICIES = [{}, {"temperature": 0.6}, {"top_p": 0.7}, {"temperature": 1.4, "top_p": 0.85}, {"do_sample": False}]


@pytest.fixture(scope="module")
def model():
    return enumerable_model(VOCABULARY, EOS)


@pytest.fixture(scope="module")
def responses():
    return [list(ids) for ids in all_responses(LENGTH, EOS, VOCABULARY)]


def policy_of(generation):
    return {"temperature": generation.get("temperature", 1.0), "top_p": generation.get("top_p", 1.0)}


def sets_at(logits, generation):
    """The sets of every step, by the reference."""
    if not generation.get("do_sample", True):
        return [[int(row.argmax())] for row in logits]
    return [np.nonzero(reference_q(row, **policy_of(generation)))[0] for row in logits]


def plain_logits(model, responses):
    """Logits of every response's steps, [responses, steps, vocabulary], with their graph."""
    longest = torch.tensor([[*PROMPT, *ids, *[0] * (LENGTH - len(ids))] for ids in responses])
    return model(input_ids=longest).logits[:, len(PROMPT) - 1 : -1]


def plainly(logits, responses, sets, temperature):
    """Log q of each token and entropy of each step, lists of tensors, with their graph."""
    log_qs, entropies = [], []
    for row, ids, steps in zip(logits, responses, sets, strict=True):
        for x, token, members in zip(row, ids, steps, strict=False):
            inside = torch.zeros(VOCABULARY, dtype=torch.bool)
            inside[torch.as_tensor(members)] = True
            log_q = (x / temperature)[inside].log_softmax(dim=0)
            entropies.append(-(log_q.exp() * log_q).sum())
            place = int(inside[:token].sum())
            log_qs.append(log_q[place] if inside[token] else torch.tensor(-math.inf, dtype=x.dtype))
    return torch.stack(log_qs), torch.stack(entropies)


@pytest.mark.parametrize(
    ("generation", "support"),
    [*((generation, "replayed") for generation in POLICIES), *((POLICIES[k], "recomputed") for k in (3, 4))],
    ids=str,
)
def test_log_q_entropy_and_gradients_equal_the_formulas(model, responses, generation, support):
    processor = SequenceProcessor(model, config={"generation": {"rb_requires_grad": True, **generation}})
    with torch.no_grad():
        drawn_from = [
            sets_at(rows[: len(ids)].numpy(), generation)
            for rows, ids in zip(plain_logits(model, responses), responses, strict=True)
        ]
    sequences = BatchedSequences.from_ids([PROMPT], [responses])
    sequences = replace(sequences, supports=[[TokenSets.of(steps, VOCABULARY) for steps in drawn_from]])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # the draws are of other parameters than the scores
        before = {name: p.clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    try:
        logits = plain_logits(model, responses)
        sets = drawn_from
        if support == "recomputed":
            sets = [
                sets_at(x.detach().numpy()[: len(ids)], generation) for x, ids in zip(logits, responses, strict=True)
            ]
        temperature = policy_of(generation)["temperature"]
        log_qs, entropies = plainly(logits, responses, sets, temperature)
        no_grad = processor.teacher_force_logprobs(sequences, compute_rb=True, support=support)
        found = processor.teacher_force_logprobs(sequences, True, compute_rb=True, support=support)
        for results in (no_grad, found):
            ours = torch.cat([values.detach() for values in results.token_logqs[0]])
            torch.testing.assert_close(ours, log_qs.detach(), atol=1e-6, rtol=0)
            rb = torch.from_numpy(np.concatenate(results.rb_entropies[0]))
            torch.testing.assert_close(rb, entropies.detach(), atol=1e-6, rtol=0)
        possible = log_qs.detach().isfinite()
        assert 0 < int(possible.sum())
        by = torch.randn(2, len(log_qs), generator=generator, dtype=torch.float64)
        theirs = by[0][possible] @ log_qs[possible] + by[1] @ entropies
        ours = by[0][possible] @ torch.cat(found.token_logqs[0])[possible] + by[1] @ torch.cat(
            found.rb_entropies_torch[0]
        )
        parameters = dict(model.named_parameters())
        for name, a, b in zip(parameters, grads(ours, model), grads(theirs, model), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0, msg=name)
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])


def grads(value, model):
    if not value.requires_grad:
        return [torch.zeros_like(p) for p in model.parameters()]
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, model.parameters(), strict=True)]


@pytest.mark.parametrize("support", ["recomputed", "replayed"])
@pytest.mark.parametrize("generation", POLICIES[:4], ids=str)
def test_rb_entropy_has_the_mean_of_the_whole_tree(model, responses, generation, support):
    """Σ q·ΣH over all sequences is the entropy of the sequence as one variable; and so is its gradient."""
    processor = SequenceProcessor(model, config={"generation": generation})
    with torch.no_grad():
        plain = plain_logits(model, responses)
    # any sets make a policy, if a prefix always has the same one: here the two most probable tokens, and the last one
    sets = [
        [sorted({*row.argsort()[-2:].tolist(), VOCABULARY - 1}) for row in x[: len(ids)].numpy()]
        for x, ids in zip(plain, responses, strict=True)
    ]
    sequences = BatchedSequences.from_ids([PROMPT], [responses])
    sequences = replace(sequences, supports=[[TokenSets.of(steps, VOCABULARY) for steps in sets]])
    scored = processor.teacher_force_logprobs(sequences, compute_rb=True, support=support)
    q = np.exp(scored.sequence_logqs[0])
    assert q.sum() == pytest.approx(1, abs=1e-9)
    rb = np.array([values.sum() for values in scored.rb_entropies[0]])
    assert q @ rb == pytest.approx(-(q[q > 0] * np.log(q[q > 0])).sum(), abs=1e-9)
    if support == "recomputed" or generation.get("top_p", 1.0) == 1:
        return
    possible = [(0, k) for k in np.nonzero(q)[0]]
    gradient = entropy_gradient(
        processor, sequences.select(possible), weights=q[q > 0], support="replayed", names=["lm_head.weight"]
    )
    weight = model.lm_head.weight.detach().clone().requires_grad_()
    hidden = model.transformer(
        input_ids=torch.tensor([[*PROMPT, *ids, *[0] * (LENGTH - len(ids))] for ids in responses])
    ).last_hidden_state.detach()[:, len(PROMPT) - 1 : -1]
    log_qs, entropies = plainly(hidden @ weight.T, responses, sets, policy_of(generation)["temperature"])
    sizes = [len(ids) for ids in responses]
    total = sum(
        log_q.sum().exp() * h.sum() for log_q, h in zip(log_qs.split(sizes), entropies.split(sizes), strict=True)
    )
    (expected,) = torch.autograd.grad(total, weight)
    assert gradient.entropy == pytest.approx(float(total.detach()), abs=1e-9)
    torch.testing.assert_close(gradient.gradient["lm_head.weight"], expected, atol=1e-6, rtol=0)
