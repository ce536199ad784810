"""What `test_sharded.py` runs in two processes joined by gloo: a model sharded by `fully_shard`, a head by its columns.

`benchmarks/sharded.py` runs the same on GPUs, joined by NCCL. Each process scores one of two prompts' responses, or
both score all where they share a head, and saves what it found.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.sequences import SequenceProcessor
from tests.sequences import data_parallel
from tests.sequences.data_parallel import MOVED, N_PROCESSES, drawn, loss_of, processor_of, share


def load(path: Path, device: str) -> Any:
    """The tiny model on a device."""
    return data_parallel.load(path).to(device)


def sharded(
    path: Path, device: str, also: Callable[[Any], list[torch.nn.Module]] = lambda model: [], **more: Any
) -> Any:
    """The tiny model with every layer sharded, further modules, and the rest."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (N_PROCESSES,))
    model = load(path, device)
    for module in (*model.model.layers, *also(model), model):
        fully_shard(module, mesh=mesh, **more)
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient, whole, on the CPU; they are cleared."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone().cpu()
    model.zero_grad()
    return found


def scores(processor: SequenceProcessor, sequences: Any, **more: Any) -> list[torch.Tensor]:
    """Log p, log q and entropy of each token, without gradients."""
    found = processor.teacher_force_logprobs(sequences, compute_rb=True, **more)
    return [
        torch.cat([torch.as_tensor(values) for row in nested for values in row])
        for nested in (found.logprobs, found.token_logqs, found.rb_entropies)
    ]


def largest_shard(model: torch.nn.Module) -> float:
    """The largest share of a parameter that this process keeps between calls; 1 of one that is left whole."""
    parameters = list(model.parameters())
    return max((p.to_local() if hasattr(p, "to_local") else p).numel() / p.numel() for p in parameters)


def _steps(rank: int, path: Path, device: str, **how: Any) -> Any:
    """Scores and two steps; the number of batches differs between the processes."""
    model = sharded(path, device, **how)
    processor, sequences = processor_of(model, path), share(drawn(path), rank)
    without, found = scores(processor, sequences, tf_batch_size=1 + 2 * rank), []
    kept = largest_shard(model)
    for _ in range(2):
        loss_of(processor, sequences, tf_batch_size=1 + 2 * rank).backward()
        found.append(gradients(model))
    return without, found, kept


def _part_of_the_loss(rank: int, path: Path, device: str) -> Any:
    """Only one response of each process enters the loss, of another batch in each."""
    model = sharded(path, device)
    for module in (model, *model.model.layers):
        module.register_forward_pre_hook(_needs_an_argument, with_kwargs=True)
    processor, sequences = processor_of(model, path), share(drawn(path), rank)
    scored = processor.teacher_force_logprobs(sequences, with_grad=True, tf_batch_size=1)
    scored.logprobs[rank][0].sum().backward()
    return gradients(model)


def _needs_an_argument(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fails as `fully_shard` itself does on GPUs up to torch 2.11."""
    assert args or kwargs, type(module)


def _steered(rank: int, path: Path, device: str) -> Any:
    """Scores under a plan, and its receipts."""
    processor = processor_of(sharded(path, device), path)
    found = scores(processor, share(drawn(path), rank), plan=plan_of(path), tf_batch_size=1 + 2 * rank)
    return found, [receipt.edited for receipt in processor.receipts]


def plan_of(path: Path) -> sl.Plan:
    """A constant vector at one layer."""
    width = load(path, "cpu").config.hidden_size
    vector = sl.SteeringVector.from_tensor(torch.ones(width), layer=1, site="resid_post")
    return sl.Plan(sl.add(vector, coef=0.5))


def _refusals(rank: int, path: Path, device: str) -> Any:
    """What a sharded model cannot do."""
    processor, sequences = processor_of(sharded(path, device), path), share(drawn(path), rank)
    narrow = processor_of(sharded(path, device).to(torch.bfloat16), path)
    empty = sequences.select([(0, 0)]) if rank else sl_empty(sequences)
    calls = {
        "override": lambda: processor.teacher_force_logprobs(sequences, params_override={MOVED: torch.zeros(1)}),
        "drawing": lambda: processor.generate_batched(["The ferry"], 1),
        "narrow": lambda: narrow.teacher_force_logprobs(sequences),
        "nothing": lambda: processor.teacher_force_logprobs(empty),
        "logits": lambda: processor.functional_logits(torch.tensor([[5, 6]])),
        "moved": lambda: processor.params_override({}, 0.1),
        "state": lambda: processor.build_state_override({}, 0.1, param_dtype=None, include_buffers=False),
        "engine": lambda: sl.load(processor),
    }
    found = {name: _message(call) for name, call in calls.items()}
    scores(processor, sequences)  # no refusal leaves the model unusable
    return found


def sl_empty(sequences: Any) -> Any:
    """One prompt whose response is empty."""
    return type(sequences).from_ids([sequences.prompt_ids(0, 0)], [[[]]])


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


class Columns(NamedTuple):
    """What one process finds with its part of a head.

    Attributes:
        scores: log p, log q and entropy of every token.
        gradients: by parameter.
        shape: of its part of the weight.
        drawn: as `draws_and_logits` gives it.
        refusals: by call, what the error says.
    """

    scores: Any
    gradients: dict[str, torch.Tensor]
    shape: tuple[int, ...]
    drawn: Any
    refusals: dict[str, str]


def columns(rank: int, path: Path, device: str) -> Columns:
    """A head cut by its vocabulary, whose size the processes do not divide; both score everything under top_p."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = load(path, device)
    odd_head(model)
    parallelize_module(model, init_device_mesh(device, (N_PROCESSES,)), {"lm_head": ColwiseParallel()})
    processor, sequences = columns_processor(model, path), drawn(path)
    without = scores(processor, sequences)
    loss_of(processor, sequences).backward()
    found = gradients(model)
    calls = {
        "engine": lambda: sl.load(processor),
        "override": lambda: processor.params_override(
            {"lm_head.weight": torch.zeros(383, model.lm_head.in_features)}, 1
        ),
    }
    refusals = {name: _message(call) for name, call in calls.items()}
    shape = tuple(model.lm_head.weight.to_local().shape)
    return Columns(without, found, shape, draws_and_logits(processor), refusals)


def draws_and_logits(processor: SequenceProcessor) -> Any:
    """Two responses, the model's own logits of some ids, and their derivative along a direction of a layer's."""
    texts = processor.generate_batched(["The ferry leaves"], 2, seed=0).sequences
    ids, eta = torch.tensor([[5, 6, 7]]), torch.tensor(0.1, requires_grad=True)
    direction = {MOVED: torch.ones_like(processor.parts.root.get_parameter(MOVED))}
    logits = processor.functional_logits(ids, None, processor.params_override(direction, eta))
    return texts, logits.detach(), torch.autograd.grad(logits.logsumexp(dim=-1).sum(), eta)[0]


def odd_head(model: Any) -> None:
    """Takes the last token off the head, so that their number is odd."""
    size = model.config.vocab_size - 1
    head = torch.nn.Linear(model.config.hidden_size, size, bias=False, device=model.lm_head.weight.device)
    head.weight.data = model.lm_head.weight.data[:size].clone()
    model.lm_head = head
    model.config.vocab_size = size


def columns_processor(model: Any, path: Path) -> SequenceProcessor:
    """A processor with a nucleus that holds every token drawn here but few others."""
    processor = processor_of(model, path)
    config = {"generation": {"rb_requires_grad": True, "temperature": 0.9, "top_p": 0.999}}
    processor.config = config
    return processor


SCENARIOS: dict[str, Callable[[int, Path, str], Any]] = {
    "steps": _steps,
    "own_head": lambda *a: _steps(*a, also=lambda model: [model.lm_head]),
    "own_decoder": lambda *a: _steps(*a, also=lambda model: [model.model]),
    "resharded": lambda *a: _steps(*a, reshard_after_forward=True),
    "part_of_the_loss": _part_of_the_loss,
    "steered": _steered,
    "refusals": _refusals,
    "columns": columns,
}
