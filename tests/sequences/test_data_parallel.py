"""Two real processes score a half each under DistributedDataParallel; one process with the whole is the reference."""

import pytest
import torch
import torch.distributed as dist

from steerlab.core.errors import InputError
from steerlab.sequences._data_parallel import inside_forward
from tests.sequences.data_parallel import (
    N_PROCESSES,
    direction,
    drawn,
    gradients,
    load,
    loss_of,
    processor_of,
    share,
)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def found(in_two_processes):
    """What the two processes saved."""
    return [saved["data_parallel"] for saved in in_two_processes]


@pytest.fixture(scope="module")
def expected(tiny_llama_path):
    """Gradients of one process: of each half, and their mean."""
    model = load(tiny_llama_path)
    processor, sequences = processor_of(model, tiny_llama_path), drawn(tiny_llama_path)
    halves = []
    for rank in range(N_PROCESSES):
        loss_of(processor, share(sequences, rank)).backward()
        halves.append(gradients(model))
    loss_of(processor, sequences).backward()
    mean = {name: value / N_PROCESSES for name, value in gradients(model).items()}
    return {"halves": halves, "mean": mean}


def close(got, wanted, factor=1.0):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], factor * value, atol=2e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_the_two_halves_differ(expected):
    name = "lm_head.weight"
    assert (expected["halves"][0][name] - expected["mean"][name]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["steps", "static", "compiled_inside", "compiled_outside"])
def test_gradients_are_the_mean_over_processes(found, expected, name):
    for rank in range(N_PROCESSES):
        assert len(found[rank][name]) == 2
        for got in found[rank][name]:
            close(got, expected["mean"])


def test_outputs_that_do_not_enter_the_loss(tiny_llama_path, found):
    model = load(tiny_llama_path)
    processor, sequences = processor_of(model, tiny_llama_path), drawn(tiny_llama_path)
    scored = processor.teacher_force_logprobs(sequences, with_grad=True).logprobs
    (sum(scored[rank][0].sum() for rank in range(N_PROCESSES)) / N_PROCESSES).backward()
    wanted = gradients(model)
    for rank in range(N_PROCESSES):
        got = {name: value for name, value in found[rank]["unused"].items() if name != "spare"}
        close(got, wanted)


def test_two_calls_and_one_backward(found, expected):
    for rank in range(N_PROCESSES):
        close(found[rank]["two_calls"], expected["mean"], 2.0)


def test_no_sync_keeps_gradients_apart_until_the_next_pass(found, expected):
    both = {name: 2 * value for name, value in expected["mean"].items()}
    for rank in range(N_PROCESSES):
        alone, then = found[rank]["no_sync"]
        close(alone, expected["halves"][rank])
        close(then, both)


def test_an_override(tiny_llama_path, found):
    model = load(tiny_llama_path)
    processor, sequences = processor_of(model, tiny_llama_path), drawn(tiny_llama_path)
    etas = []
    for rank in range(N_PROCESSES):
        eta = torch.tensor(0.1, requires_grad=True)
        override = processor.params_override(direction(model), eta)
        (loss_of(processor, share(sequences, rank), params_override=override) / N_PROCESSES).backward()
        etas.append(eta.grad * N_PROCESSES)
    wanted = gradients(model)
    for rank in range(N_PROCESSES):
        got, eta = found[rank]["override"]
        close(got, wanted)
        torch.testing.assert_close(eta, etas[rank], atol=1e-3, rtol=1e-4)  # not a parameter: each process's own


def test_calls_without_averaging_may_differ_between_processes(found, expected):
    for rank in range(N_PROCESSES):
        untouched, then = found[rank]["own_estimates"]
        assert untouched
        close(then, expected["mean"])


def test_the_model_is_back_after_an_error(found, expected):
    for rank in range(N_PROCESSES):
        message, back, then = found[rank]["error"]
        assert (message, back) == ("division by zero", True)
        close(then, expected["mean"])


def test_a_wrapper_that_casts_by_itself_is_refused():
    wrapper = torch.nn.Module()
    wrapper.mixed_precision = object()
    with pytest.raises(InputError, match=r"set precision\.tf_withgrad"):
        inside_forward(wrapper, list)
