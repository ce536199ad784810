"""Scoring a model sharded by `fully_shard` (FSDP2) over processes, beside the whole model: agreement and memory.

    torchrun --nproc-per-node 2 benchmarks/sharded.py --device cuda --out sharded.json
    torchrun --nproc-per-node 2 benchmarks/sharded.py --device cpu --shape small --tokens 64

On GPUs the processes are joined by NCCL, one GPU each, on a CPU by gloo. First everything that
`tests/sequences/test_sharded.py` looks at, on its tiny model in float32: scores and gradients under several ways to
shard, a loss of a part of the results, a plan, and a head cut by its vocabulary. Then a random Llama in bfloat16:
log p, log q, entropies and gradients of each process's own responses, and the highest memory of each GPU in a step,
parameters and gradients included. Needs torch, transformers and steerlab; neither vLLM nor TransformerLens.

The exit status is 1 if a tiny float32 figure differs by more than the test allows, or a sharded gradient in bfloat16 by
more than 2 % of its norm.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_steering import SHAPES

from steerlab.sequences import BatchedSequences, SequenceProcessor
from tests.sequences import sharded as tiny
from tests.sequences.data_parallel import N_PROCESSES, drawn, loss_of, processor_of, share

SCORES_ATOL, GRADIENTS_ATOL, GRADIENTS_RTOL = 1e-5, 2e-4, 1e-4
"""What the test allows, on a CPU; on a GPU sums in another order may take ten times as much."""

NARROW_SHARE = 0.02
"""Of a gradient's norm."""


def main() -> None:
    """Runs both parts in this process, one of those that torchrun started."""
    options = arguments()
    rank, directory = join(options.device)
    device = options.device if options.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    try:
        started = time.perf_counter()
        result: dict[str, Any] = {"machine": machine(options.device), "options": vars(options)}
        result["tiny"] = run_tiny(rank, directory, options.device)
        result["large"] = run_large(rank, device, options)
        result["seconds"] = time.perf_counter() - started
        everybody: list[Any] = [None] * N_PROCESSES
        dist.all_gather_object(everybody, result)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        show(everybody)
        if options.out:
            Path(options.out).write_text(json.dumps(everybody, indent=2) + "\n")
    sys.exit(not all(holds(one, options.device) for one in everybody))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=4, help="responses of each process")
    parser.add_argument("--tokens", type=int, default=512, help="of each response")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--out", help="write the figures here as JSON")
    return parser.parse_args()


def join(device: str) -> tuple[int, Path]:
    """This process's number, and a directory that all of them see."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if dist.get_world_size() != N_PROCESSES:
        raise SystemExit(f"Start {N_PROCESSES} processes: torchrun --nproc-per-node {N_PROCESSES} {sys.argv[0]}")
    rank = dist.get_rank()
    found = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(
        found, device=torch.device(device, torch.cuda.current_device() if device == "cuda" else 0)
    )
    return rank, Path(str(found[0]))


def machine(device: str) -> dict[str, Any]:
    """What runs."""
    import transformers

    return {
        "card": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# --- the tests' tiny model ----------------------------------------------------------------------------------------


def run_tiny(rank: int, directory: Path, device: str) -> dict[str, dict[str, float]]:
    """Per scenario of the tests the largest differences from the whole model, in nats and in units of a gradient."""
    from tests.tiny_models import build_tiny_llama

    path = directory / "llama"
    if rank == 0:
        build_tiny_llama(path)
    dist.barrier()
    model = tiny.load(path, device)
    processor, sequences = processor_of(model, path), drawn(path)
    mine = share(sequences, rank)
    (loss_of(processor, sequences) / N_PROCESSES).backward()
    mean, own = tiny.gradients(model), tiny.scores(processor, mine)
    found = {}
    for name in ("steps", "own_head", "own_decoder", "resharded"):
        scored, steps, kept = tiny.SCENARIOS[name](rank, path, device)
        gradients = max(worst(got, mean) for got in steps)
        found[name] = {"scores": largest(scored, own), "gradients": gradients, "largest_share_kept": kept}
    part = tiny.SCENARIOS["part_of_the_loss"](rank, path, device)
    found["part_of_the_loss"] = {"gradients": worst(part, part_of_the_loss(model, processor, sequences))}
    scored, edited = tiny.SCENARIOS["steered"](rank, path, device)
    steered = tiny.scores(processor, mine, plan=tiny.plan_of(path))
    same = edited == [receipt.edited for receipt in processor.receipts]
    found["steered"] = {"scores": largest(scored, steered), "receipts_that_differ": float(not same)}
    found["columns"] = run_columns(rank, path, device)
    return found


def part_of_the_loss(model: Any, processor: SequenceProcessor, sequences: BatchedSequences) -> dict[str, Tensor]:
    """Gradients of one response of each process."""
    for rank in range(N_PROCESSES):
        scored = processor.teacher_force_logprobs(share(sequences, rank), with_grad=True)
        (scored.logprobs[rank][0].sum() / N_PROCESSES).backward()
    return tiny.gradients(model)


def run_columns(rank: int, path: Path, device: str) -> dict[str, float]:
    """A head cut by its vocabulary."""
    mine = tiny.columns(rank, path, device)
    model = tiny.load(path, device)
    tiny.odd_head(model)
    processor, sequences = tiny.columns_processor(model, path), drawn(path)
    expected = tiny.scores(processor, sequences)
    loss_of(processor, sequences).backward()
    gradients = tiny.gradients(model)
    texts, logits, _ = tiny.draws_and_logits(processor)
    return {
        "scores": largest([*mine.scores, mine.drawn[1]], [*expected, logits]),
        "gradients": worst(mine.gradients, gradients),
        "draws_that_differ": float(not torch.equal(mine.drawn[0], texts)),
    }


def largest(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, nats."""
    return max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True))


def worst(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of gradients over what is allowed there; below 1 all is well."""
    assert got.keys() == wanted.keys()
    allowed = {name: GRADIENTS_ATOL + GRADIENTS_RTOL * value.abs() for name, value in wanted.items()}
    return max(((got[name] - value).abs() / allowed[name]).max().item() for name, value in wanted.items())


# --- a large model ------------------------------------------------------------------------------------------------


def run_large(rank: int, device: str, options: argparse.Namespace) -> dict[str, Any]:
    """Scores, gradients and memory of the whole model on each device, and of the sharded one."""
    sequences = random_sequences(rank, options)
    model = build(device, options)
    whole = Step(model, device, options).run(sequences)
    average(whole.gradients, device)
    del model
    release(device)
    model = build(device, options)
    mesh = init_device_mesh(options.device, (N_PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    release(device)
    size = sum(p.numel() for p in model.parameters())
    shared = Step(model, device, options).run(sequences)
    return {
        "parameters": size,
        "tokens": sum(map(sum, sequences.gen_lens)),
        "differences": compare_scores(shared, whole),
        "gradients": shares(shared.gradients, whole.gradients),
        "peak_mib": {
            name: {"whole": whole.peaks[name], "sharded": shared.peaks[name]} for name in ("scores", "gradients")
        },
        "seconds": {
            name: {"whole": whole.seconds[name], "sharded": shared.seconds[name]} for name in ("scores", "gradients")
        },
    }


def build(device: str, options: argparse.Namespace) -> Any:
    """A random Llama, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(**SHAPES[options.shape], tie_word_embeddings=False, **ids)
        return LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()


def random_sequences(rank: int, options: argparse.Namespace) -> BatchedSequences:
    """Responses of this process alone."""
    generator = torch.Generator().manual_seed(rank)
    size = SHAPES[options.shape]["vocab_size"]
    ids = torch.randint(5, size, (options.sequences, 16 + options.tokens), generator=generator).tolist()
    return BatchedSequences.from_ids([row[:16] for row in ids], [[row[16:]] for row in ids])


class Step:
    """One model's scores and one backward pass, with what they took.

    Attributes:
        scores: log p, log q, entropy of every token, of the calls without and with gradients.
        gradients: by parameter, whole, on the CPU.
        peaks: MiB of the device at the most; NaN on a CPU.
        seconds: of each call, the second time it is made.
    """

    def __init__(self, model: Any, device: str, options: argparse.Namespace) -> None:
        self.model, self.device = model, device
        generation = {"top_p": options.top_p, "rb_requires_grad": True, "tf_batch_size": options.sequences}
        precision = {"func_override": {"cast_params": False}}
        self.processor = SequenceProcessor(model, config={"generation": generation, "precision": precision})
        self.scores: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, Tensor] = {}
        self.peaks: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def run(self, sequences: BatchedSequences) -> "Step":
        """Makes both calls, each twice: the first brings in what is loaded once."""
        for _ in range(2):
            self.measured("scores", lambda: self.keep("scores", sequences, with_grad=False))
            self.model.zero_grad(set_to_none=True)
            self.measured("gradients", lambda: self.keep("gradients", sequences, with_grad=True))
        for name, parameter in self.model.named_parameters():
            grad: Any = parameter.grad
            self.gradients[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float().cpu()
            parameter.grad = None
        del self.model, self.processor  # whose memory the next one's peak must not hold
        return self

    def keep(self, name: str, sequences: BatchedSequences, *, with_grad: bool) -> None:
        """One call, and its backward pass."""
        found = self.processor.teacher_force_logprobs(sequences, with_grad, compute_rb=True)
        nested = (found.logprobs, found.token_logqs, found.rb_entropies_torch or found.rb_entropies)
        flat = [torch.cat([torch.as_tensor(values) for row in one for values in row]) for one in nested]
        if with_grad:
            sum(values[values.isfinite()].sum() for values in flat).backward()  # pyright: ignore
        self.scores[name] = [values.detach().float().cpu() for values in flat]

    def measured(self, name: str, work: Any) -> None:
        """Runs something, and notes its peak and time."""
        dist.barrier()
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        work()
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.seconds[name] = time.perf_counter() - start
        self.peaks[name] = torch.cuda.max_memory_allocated() / 2**20 if self.device != "cpu" else float("nan")


def average(gradients: dict[str, Tensor], device: str) -> None:
    """Takes the mean over processes, in place."""
    for name in gradients:
        moved = gradients[name].to(device)
        dist.all_reduce(moved)
        gradients[name] = (moved / N_PROCESSES).cpu()


def release(device: str) -> None:
    """Gives free memory back."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def compare_scores(shared: Step, whole: Step) -> dict[str, dict[str, float]]:
    """Differences between the two models' numbers: the largest and the mean, and tokens outside one nucleus only."""
    found = {}
    for call, ours in shared.scores.items():
        for name, a, b in zip(("log p", "log q", "entropy"), ours, whole.scores[call], strict=True):
            both = a.isfinite() & b.isfinite()
            difference = (a - b)[both].abs()
            figures = {"largest": difference.max().item(), "mean": difference.mean().item()}
            found[f"{call}, {name}"] = figures | {"in_one_nucleus_only": int((a.isfinite() != b.isfinite()).sum())}
    return found


def shares(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Any]:
    """Norms of differences over the gradients' norms: the largest of a parameter, and of all together."""
    each = {name: ((got[name] - value).norm() / value.norm()).item() for name, value in wanted.items()}
    total = sum((got[name] - value).square().sum() for name, value in wanted.items())
    whole = sum(value.square().sum() for value in wanted.values())
    worst_name = max(each, key=lambda name: each[name])
    return {"largest": each[worst_name], "of": worst_name, "together": float((total / whole) ** 0.5)}  # pyright: ignore


# --- what came of it ----------------------------------------------------------------------------------------------


def holds(result: dict[str, Any], device: str) -> bool:
    """Whether every figure is within what is allowed."""
    factor = 1 if device == "cpu" else 10
    for figures in result["tiny"].values():
        if figures.get("scores", 0) > factor * SCORES_ATOL or figures.get("gradients", 0) > factor:
            return False
        if (
            figures.get("receipts_that_differ")
            or figures.get("draws_that_differ")
            or figures.get("largest_share_kept", 0) > 0.5
        ):
            return False
    return result["large"]["gradients"]["together"] <= NARROW_SHARE


def show(everybody: list[dict[str, Any]]) -> None:
    """Prints each process's figures."""
    print(json.dumps(everybody[0]["machine"]), f"{everybody[0]['seconds']:.1f} s")
    table("process", "tiny float32 model", "scores, nats", "gradients ÷ allowed", "other")
    for rank, result in enumerate(everybody):
        for name, figures in result["tiny"].items():
            others = {key: value for key, value in figures.items() if key not in ("scores", "gradients")}
            line(rank, name, number(figures, "scores"), number(figures, "gradients"), others or "")
    large = everybody[0]["large"]
    print(f"\n{large['parameters'] / 1e9:.2f} G parameters, {large['tokens']} tokens of each process")
    table("process", "quantity", "largest, nats", "mean, nats", "in one nucleus only")
    for rank, result in enumerate(everybody):
        for name, row in result["large"]["differences"].items():
            line(rank, name, f"{row['largest']:.3g}", f"{row['mean']:.3g}", row["in_one_nucleus_only"])
    table("process", "gradients, difference ÷ norm", "largest", "of")
    for rank, result in enumerate(everybody):
        found = result["large"]["gradients"]
        line(rank, f"{found['together']:.3g}", f"{found['largest']:.3g}", found["of"])
    table("process", "call", "whole, MiB", "sharded, MiB", "whole, s", "sharded, s")
    for rank, result in enumerate(everybody):
        for name, peak in result["large"]["peak_mib"].items():
            took = result["large"]["seconds"][name]
            memory = f"{peak['whole']:.0f}", f"{peak['sharded']:.0f}"
            line(rank, name, *memory, f"{took['whole']:.3f}", f"{took['sharded']:.3f}")


def table(*columns: str) -> None:
    """The head of a Markdown table."""
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")


def line(*cells: Any) -> None:
    """A row of it."""
    print(f"| {' | '.join(map(str, cells))} |")


def number(figures: dict[str, float], name: str) -> str:
    """A figure, if there is one."""
    return f"{figures[name]:.2g}" if name in figures else ""


if __name__ == "__main__":
    main()
