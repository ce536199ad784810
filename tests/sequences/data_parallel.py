"""What `test_data_parallel.py` runs in two processes joined by gloo: scoring under DistributedDataParallel.

Each process scores one of two prompts' responses and saves what it found, by scenario.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

from steerlab.sequences import BatchedSequences, SequenceProcessor, entropy_gradient

N_PROCESSES = 2
MOVED = "model.layers.2.mlp.up_proj.weight"
CONFIG = {"generation": {"max_new_tokens": 12, "rb_requires_grad": True}}


def drawn(path: Path) -> BatchedSequences:
    """Two prompts with three responses each."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(text)["input_ids"] for text in ("The ferry", "She opened the window, because")]
    generator = torch.Generator().manual_seed(0)
    lengths = [[7, 12, 3], [5, 1, 9]]
    return BatchedSequences.from_ids(
        prompts, [[torch.randint(5, 200, (n,), generator=generator).tolist() for n in row] for row in lengths]
    )


def share(sequences: BatchedSequences, rank: int) -> BatchedSequences:
    """One process's part: another prompt for each."""
    return sequences.select([(rank, g) for g in range(sequences.n_samples)])


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def processor_of(model: Any, path: Path) -> SequenceProcessor:
    return SequenceProcessor(model, AutoTokenizer.from_pretrained(path), config=CONFIG)


def loss_of(processor: SequenceProcessor, sequences: BatchedSequences, **more: Any) -> torch.Tensor:
    """A loss of log p and entropy, summed over tokens."""
    found = processor.teacher_force_logprobs(sequences, with_grad=True, compute_rb=True, **more)
    parts = (found.logprobs, found.rb_entropies_torch)
    return sum(values.sum() for nested in parts for row in nested or () for values in row)  # pyright: ignore


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient; they are cleared."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _steps(rank: int, path: Path, wrap: Callable[[Any], Any] = DistributedDataParallel) -> Any:
    """Two steps; the number of batches differs between the processes."""
    model = load(path)
    processor, sequences = processor_of(wrap(model), path), share(drawn(path), rank)
    found = []
    for _ in range(2):
        loss_of(processor, sequences, tf_batch_size=1 + 2 * rank).backward()
        found.append(gradients(model))
    return found


def _unused(rank: int, path: Path) -> Any:
    """Only the log-probs of one response enter the loss, and one parameter has no part in it."""
    model = load(path)
    model.spare = torch.nn.Parameter(torch.ones(3))
    processor = processor_of(DistributedDataParallel(model, find_unused_parameters=True), path)
    for _ in range(2):
        processor.teacher_force_logprobs(share(drawn(path), rank), with_grad=True).logprobs[0][0].sum().backward()
        found = gradients(model)
    return found


def _two_calls(rank: int, path: Path) -> Any:
    """Two calls, one backward pass."""
    model = load(path)
    processor, sequences = processor_of(DistributedDataParallel(model), path), share(drawn(path), rank)
    (loss_of(processor, sequences) + loss_of(processor, sequences)).backward()
    return gradients(model)


def _no_sync(rank: int, path: Path) -> Any:
    """Gradients of one pass that is told not to average, and of it and another one that is not."""
    model = load(path)
    wrapper = DistributedDataParallel(model)
    processor, sequences = processor_of(wrapper, path), share(drawn(path), rank)
    alone = {}
    for context in (wrapper.no_sync(), nullcontext()):
        with context:
            loss_of(processor, sequences).backward()
        alone = alone or {name: p.grad.clone() for name, p in model.named_parameters()}
    return alone, gradients(model)


def _override(rank: int, path: Path) -> Any:
    """Gradients by θ and by η at θ + η·v."""
    model = load(path)
    processor, sequences = processor_of(DistributedDataParallel(model), path), share(drawn(path), rank)
    eta = torch.tensor(0.1, requires_grad=True)
    loss_of(processor, sequences, params_override=processor.params_override(direction(model), eta)).backward()
    return gradients(model), eta.grad


def direction(model: Any) -> dict[str, torch.Tensor]:
    shape = model.get_parameter(MOVED).shape
    return {MOVED: torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 10}


def _own_estimates(rank: int, path: Path) -> Any:
    """Calls that the other process makes more or less often, and then a step."""
    model = load(path)
    processor, sequences = processor_of(DistributedDataParallel(model), path), share(drawn(path), rank)
    for _ in range(1 + rank):
        entropy_gradient(processor, sequences, tf_batch_size=1)
        processor.teacher_force_logprobs(sequences)
    untouched = not gradients(model)
    loss_of(processor, sequences).backward()
    return untouched, gradients(model)


def _error(rank: int, path: Path) -> Any:
    """A pass that fails half way, and then a step."""
    model = load(path)
    wrapper = DistributedDataParallel(model)
    processor, sequences = processor_of(wrapper, path), share(drawn(path), rank)
    message = ""
    handle = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    try:
        loss_of(processor, sequences)
    except ZeroDivisionError as error:
        message = str(error)
    handle.remove()
    back = wrapper.module is model
    loss_of(processor, sequences).backward()
    return message, back, gradients(model)


SCENARIOS: dict[str, Callable[[int, Path], Any]] = {
    "steps": _steps,
    "static": lambda *a: _steps(*a, lambda model: DistributedDataParallel(model, static_graph=True)),
    "compiled_inside": lambda *a: _steps(
        *a, lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    ),
    "compiled_outside": lambda *a: _steps(
        *a, lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager")
    ),
    "unused": _unused,
    "two_calls": _two_calls,
    "no_sync": _no_sync,
    "override": _override,
    "own_estimates": _own_estimates,
    "error": _error,
}
