"""Two real processes share a model sharded by `fully_shard`, or a head; one process with the whole is the reference."""

import pytest
import torch
import torch.distributed as dist

from tests.sequences.data_parallel import N_PROCESSES, drawn, load, loss_of, processor_of, share
from tests.sequences.sharded import (
    columns_processor,
    draws_and_logits,
    gradients,
    odd_head,
    plan_of,
    scores,
)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def found(in_two_processes):
    """What the two processes saved."""
    return [saved["sharded"] for saved in in_two_processes]


@pytest.fixture(scope="module")
def whole(tiny_llama_path):
    """The whole model, its processor and all sequences."""
    model = load(tiny_llama_path)
    return model, processor_of(model, tiny_llama_path), drawn(tiny_llama_path)


@pytest.fixture(scope="module")
def mean(whole):
    """The mean over processes of the gradients of their losses."""
    model, processor, sequences = whole
    (loss_of(processor, sequences) / N_PROCESSES).backward()
    return gradients(model)


def close(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, atol=2e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["steps", "own_head", "own_decoder", "resharded"])
def test_scores_and_gradients_are_those_of_the_whole_model(found, whole, mean, name):
    _, processor, sequences = whole
    for rank in range(N_PROCESSES):
        scored, steps, kept = found[rank][name]
        torch.testing.assert_close(scored, scores(processor, share(sequences, rank)), atol=1e-5, rtol=1e-5)
        assert len(steps) == 2
        for got in steps:
            close(got, mean)
        assert kept <= 0.5


def test_a_loss_of_some_results_only(found, whole):
    model, processor, sequences = whole
    total = 0
    for rank in range(N_PROCESSES):
        scored = processor.teacher_force_logprobs(share(sequences, rank), with_grad=True)
        total = total + scored.logprobs[rank][0].sum() / N_PROCESSES
    total.backward()
    wanted = gradients(model)
    for rank in range(N_PROCESSES):
        close(found[rank]["part_of_the_loss"], wanted)


def test_a_plan(found, whole, tiny_llama_path):
    _, processor, sequences = whole
    for rank in range(N_PROCESSES):
        mine = share(sequences, rank)
        scored, edited = found[rank]["steered"]
        torch.testing.assert_close(scored, scores(processor, mine, plan=plan_of(tiny_llama_path)), atol=1e-5, rtol=1e-5)
        assert edited == [receipt.edited for receipt in processor.receipts]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("override", "runs with its own parameters only"),
        ("drawing", "Draw through an engine"),
        ("narrow", "'cast_params': False"),
        ("nothing", "give each at least one"),
        ("logits", "make a processor on an unsharded copy"),
        ("moved", "make a processor on an unsharded copy"),
        ("state", "make a processor on an unsharded copy"),
        ("engine", "spread over processes"),
    ],
)
def test_what_is_refused(found, name, said):
    for rank in range(N_PROCESSES):
        assert said in found[rank]["refusals"][name]


def test_a_head_cut_by_its_vocabulary(found, tiny_llama_path):
    model = load(tiny_llama_path)
    odd_head(model)
    processor, sequences = columns_processor(model, tiny_llama_path), drawn(tiny_llama_path)
    expected = scores(processor, sequences)
    loss_of(processor, sequences).backward()
    wanted = gradients(model)
    texts, logits, slope = draws_and_logits(processor)
    for rank in range(N_PROCESSES):
        mine = found[rank]["columns"]
        # each process has the logits of its own tokens only, and a draw must not be from those
        assert torch.equal(mine.drawn[0], texts)
        torch.testing.assert_close(mine.drawn[1:], (logits, slope), atol=1e-5, rtol=1e-4)
        assert "spread over processes" in mine.refusals["engine"]
        assert "is a DTensor" in mine.refusals["override"]
        assert mine.shape[0] == model.lm_head.weight.shape[0] // 2 + (rank == 0)
        torch.testing.assert_close(mine.scores, expected, atol=1e-5, rtol=1e-5)
        close(mine.gradients, wanted)
