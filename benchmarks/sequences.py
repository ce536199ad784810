"""Scoring sequences, side by side in one run: steerlab, logits materialised whole, and fused heads of TRL and Liger.

    python benchmarks/sequences.py --threads 2
    python benchmarks/sequences.py --device cuda --vocab 128256 --dtype bfloat16 --tokens 4096 --grad-rows 4

Every variant gives log p, log q and the entropy of q for every generated token under the same policy; with gradients,
the backward pass of their sum by all parameters too. The materialised variant holds all logits of a pass at once, and
cuts the nucleus by sorting, as Hugging Face's warper does. TRL and Liger have no top_p, so they take part where top_p
is 1, if installed: `pip install trl==1.16.0 liger-kernel==0.8.5`, and on Hopper `nvidia-cutlass-dsl` for Liger's own
kernels, without which its torch code runs.

Times are medians over repeats in which the variants take turns: totals with the decoder, and of the head alone (hidden
states to log p and entropy, and back to the gradients of hidden states and weight). Memory is the peak of the head,
above its arguments: on a GPU as the allocator counts it, on a Linux CPU as the resident set grows. On a busy machine
`--clock cpu` counts the process's own CPU seconds instead. `--vocab` makes a Llama of 16 layers and width 2048 with
random weights; otherwise it is SmolLM2. `--sharpness` multiplies its final norm, whose logits are flat otherwise.
"""

import argparse
import cProfile
import ctypes
import ctypes.util
import functools
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from steerlab.core._files import write_atomic
from steerlab.sequences import BatchedSequences, SequenceProcessor
from steerlab.sequences._head import HeadSpec, measure_head

PROMPT_TOKENS = 16

Measures = tuple[Tensor, Tensor, Tensor]
"""Log p, log q and entropy of every row."""

Head = Callable[[Tensor, Tensor, Tensor], Measures]
"""From hidden states [rows, d_model], weight [d_vocab, d_model] and tokens [rows]."""


def main() -> None:
    """Runs the benchmark and prints its table."""
    options = parse(sys.argv[1:])
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options)
    rows: list[dict[str, Any]] = []
    for policy in options.policies:
        temperature, top_p = (float(part) for part in policy.split(":"))
        bench = Bench(model, tokenizer, temperature, top_p, options)
        rows += bench.memory()
        rows += bench.times(with_grad=False)
        if options.grad_rows:
            rows += bench.times(with_grad=True)
        if options.profile:
            bench.profile()
    result = {"machine": machine(options.device), "options": vars(options), "rows": rows}
    print_table(result)
    if options.out:
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vocab", type=int, default=0, help="a random 1B Llama with this vocabulary; 0 is SmolLM2")
    parser.add_argument("--layers", type=int, default=16, help="of that Llama")
    parser.add_argument("--width", type=int, default=2048, help="of that Llama, a multiple of 64")
    parser.add_argument("--sequences", type=int, default=4, help="B·G")
    parser.add_argument("--tokens", type=int, default=2048, help="generated tokens of each")
    parser.add_argument("--rows", type=int, default=4, help="sequences per pass without gradients")
    parser.add_argument("--grad-rows", type=int, default=1, help="sequences per backward pass; 0 leaves gradients out")
    parser.add_argument("--policies", nargs="+", default=["1:1", "0.7:0.95"], help="temperature:top_p")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what seconds are")
    parser.add_argument("--peers", nargs="*", default=["TRL", "Liger"], choices=["TRL", "Liger"])
    parser.add_argument("--sharpness", type=float, default=1.0, help="factor of the final norm's weight")
    parser.add_argument("--profile", action="store_true", help="also say where the time of one total call goes")
    parser.add_argument("--out", default=None, help="write the figures here as JSON")
    return parser.parse_args(arguments)


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model with sdpa attention, and a tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from steerlab.models import resolve

    dtype = getattr(torch, options.dtype)
    if not options.vocab:
        path = resolve("smollm2-135m").path
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        for parameter in model.parameters():  # out of the mapped file, whose pages come and go
            parameter.data = parameter.data.clone()
        return model.to(options.device).eval(), AutoTokenizer.from_pretrained(path)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 256),
        head_dim=64,
        vocab_size=options.vocab,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.model.norm.weight.data *= options.sharpness
    return model.eval(), NoTokenizer()


class NoTokenizer:
    """What a SequenceProcessor needs of a tokenizer when it only scores ids."""

    bos_token_id = eos_token_id = pad_token_id = None


@dataclass(frozen=True)
class Piece:
    """Rows of one pass, as each side takes them."""

    ids: Tensor
    sequences: BatchedSequences

    @classmethod
    def of(cls, ids: Tensor) -> "Piece":
        """Rows of prompt and response."""
        responses = [[row] for row in ids[:, PROMPT_TOKENS:].tolist()]
        return cls(ids, BatchedSequences.from_ids(ids[:, :PROMPT_TOKENS].tolist(), responses))


class Bench:
    """One policy's variants on one model."""

    def __init__(
        self, model: Any, tokenizer: Any, temperature: float, top_p: float, options: argparse.Namespace
    ) -> None:
        self.model, self.options, self.temperature, self.top_p = model, options, temperature, top_p
        self.device, self.policy = options.device, f"T={temperature:g} top_p={top_p:g}"
        config = {"temperature": temperature, "top_p": top_p, "rb_requires_grad": True}
        # weights in their own dtype on all sides, so that all do the same work
        precision = {"func_override": {"cast_params": False}}
        self.processor = SequenceProcessor(model, tokenizer, config={"generation": config, "precision": precision})
        generator = torch.Generator().manual_seed(0)
        shape = (options.sequences, PROMPT_TOKENS + options.tokens)
        self.ids = torch.randint(100, self.processor.parts.d_vocab - 100, shape, generator=generator)
        self.heads: dict[str, Head] = {"materialised": self.loss_stage, "steerlab": self.our_head}
        if top_p == 1:
            self.heads |= {name: found for name in options.peers if (found := PEERS[name](temperature)) is not None}

    # --- the head alone -------------------------------------------------------------------------------------------

    def our_head(self, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Measures:
        """Log p, log q and entropy by the processor's head."""
        spec = HeadSpec(self.processor.parts.transform, self.processor.config.generation.policy)
        found = measure_head(spec, hidden, weight, None, tokens)
        return found.log_probs, found.log_qs, found.entropies

    def loss_stage(self, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Measures:
        """Log p, log q and entropy from logits that are all there at once."""
        logits = torch.nn.functional.linear(hidden, weight).float()
        index = tokens[:, None]
        log_p = logits.log_softmax(-1).gather(-1, index)
        scaled = logits if self.temperature == 1 else logits / self.temperature
        if self.top_p < 1:
            scaled = TopPLogitsWarper(self.top_p)(None, scaled)  # pyright: ignore[reportArgumentType]
        log_q = scaled.log_softmax(-1)
        entropy = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)
        return log_p, log_q.gather(-1, index), entropy

    def run_head(self, head: Head, with_grad: bool, hidden: Tensor, tokens: Tensor) -> None:
        """One pass over the head alone; with gradients, back to hidden states and weight."""
        weight = self.model.lm_head.weight.detach().requires_grad_(with_grad)
        hidden = hidden.detach().requires_grad_(with_grad)
        with torch.set_grad_enabled(with_grad):
            log_p, log_q, entropy = head(hidden, weight, tokens)
            if with_grad:
                chosen = log_p if self.top_p == 1 else log_q[log_q.isfinite()]
                torch.autograd.grad(chosen.sum() + entropy.sum(), [hidden, weight])

    # --- with the decoder -----------------------------------------------------------------------------------------

    def variants(self) -> dict[str, Callable[["Piece", bool], None]]:
        """Name → scoring of some rows, with or without the backward pass."""
        others = {
            name: lambda piece, with_grad, head=head: self.plain(head, piece, with_grad)
            for name, head in self.heads.items()
            if name != "steerlab"
        }
        return {"steerlab": self.ours} | others

    def ours(self, piece: "Piece", with_grad: bool) -> None:
        """The processor's public call."""
        results = self.processor.teacher_force_logprobs(
            piece.sequences, with_grad=with_grad, compute_rb=True, tf_batch_size=len(piece.ids)
        )
        if with_grad:
            assert results.rb_entropies_torch is not None
            nested = (results.logprobs, results.token_logqs, results.rb_entropies_torch)
            _backward([torch.cat([values for row in kind for values in row]) for kind in nested])

    def plain(self, head: Head, piece: "Piece", with_grad: bool) -> None:
        """The model's decoder, and a head."""
        moved = piece.ids.to(self.device)
        with torch.set_grad_enabled(with_grad):
            hidden = self.model.model(input_ids=moved, use_cache=False).last_hidden_state[:, PROMPT_TOKENS - 1 : -1]
            measures = head(hidden.flatten(0, 1), self.model.lm_head.weight, moved[:, PROMPT_TOKENS:].flatten())
            if with_grad:
                _backward(measures)
            else:
                [values.cpu() for values in measures]

    # --- where the time goes --------------------------------------------------------------------------------------

    def profile(self) -> None:
        """Prints how long the device works and waits in one total call of each variant; of ours, what the host does."""
        for with_grad, size in ((False, self.options.rows), (True, self.options.grad_rows)):
            if not size:
                continue
            piece, suffix = Piece.of(self.ids[:size]), " with gradients" if with_grad else ""
            for name, run in self.variants().items():
                call = functools.partial(run, piece, with_grad)
                call()
                print(f"{self.policy}{suffix} {name}: {self.shares(call)}", file=sys.stderr, flush=True)
            host = cProfile.Profile()
            host.runcall(self.ours, piece, with_grad)
            synchronise(self.device)
            self.model.zero_grad(set_to_none=True)
            pstats.Stats(host, stream=sys.stderr).sort_stats("tottime").print_stats(25)

    def shares(self, call: Callable[[], Any]) -> str:
        """Milliseconds of a call: before the decoder, in it, and after it on the host; of a GPU at work and waiting."""
        marks: list[float] = []
        decoder = self.model.model
        hooks = [
            decoder.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter())),
            decoder.register_forward_hook(lambda *_: marks.append(time.perf_counter())),
        ]
        try:
            with device_profile(self.device) as kernels:
                start = time.perf_counter()
                seconds = self.timed(call)
        finally:
            for hook in hooks:
                hook.remove()
        before, launched = marks[0] - start, marks[1] - marks[0]
        found = f"{seconds * 1e3:.2f} ms; host {before * 1e3:.2f} before the decoder, {launched * 1e3:.2f} in it"
        return found + "".join(f"; {part}" for part in device_shares(kernels(), seconds))

    # --- figures --------------------------------------------------------------------------------------------------

    def times(self, with_grad: bool) -> list[dict[str, Any]]:
        """Median seconds of every variant over all sequences, and of its head alone over those of one pass."""
        size = self.options.grad_rows if with_grad else self.options.rows
        suffix = " with gradients" if with_grad else ""
        pieces = [Piece.of(ids) for ids in self.ids.split(size)]
        whole = {
            name: lambda run=run: [run(piece, with_grad) for piece in pieces] for name, run in self.variants().items()
        }
        hidden, tokens = self.hidden(size)
        alone = {
            name: lambda head=head: self.run_head(head, with_grad, hidden, tokens) for name, head in self.heads.items()
        }
        return self.medians(f"total seconds{suffix}", whole) + self.medians(f"head seconds{suffix}", alone)

    def medians(self, what: str, runs: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
        """Median seconds of each, taking turns; the first turn does not count."""
        runs = dict(runs)
        found: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(self.options.repeats + 1):
            for name, run in list(runs.items()):
                try:
                    seconds = self.timed(run)
                except Exception as error:  # one variant must not take the others' figures with it
                    print(f"{name} failed and is left out: {error!r:.300}", file=sys.stderr, flush=True)
                    del runs[name], found[name]
                    continue
                if repeat or not self.options.repeats:
                    found[name].append(seconds)
        for name, values in found.items():
            print(f"{self.policy} {what} {name}: {statistics.median(values):.4f}", file=sys.stderr, flush=True)
        return [self.row(what, name, statistics.median(values), values) for name, values in found.items()]

    def row(self, what: str, variant: str, value: float, values: list[float] | None = None) -> dict[str, Any]:
        """A row of the table."""
        return {"policy": self.policy, "what": what, "variant": variant, "value": value, "all": values}

    def timed(self, run: Callable[[], Any]) -> float:
        """Seconds of a run, the device's work included; gradients are dropped."""
        clock = time.process_time if self.options.clock == "cpu" else time.perf_counter
        synchronise(self.device)
        start = clock()
        run()
        synchronise(self.device)
        seconds = clock() - start
        self.model.zero_grad(set_to_none=True)
        return seconds

    @torch.no_grad()
    def hidden(self, rows: int) -> tuple[Tensor, Tensor]:
        """Final hidden states and tokens of a pass."""
        moved = self.ids[:rows].to(self.device)
        hidden = self.model.model(input_ids=moved, use_cache=False).last_hidden_state[:, PROMPT_TOKENS - 1 : -1]
        return hidden.flatten(0, 1), moved[:, PROMPT_TOKENS:].flatten()

    def memory(self) -> list[dict[str, Any]]:
        """Peak of the head of one pass, in MiB."""
        found = []
        sizes = {False: self.options.rows, True: self.options.grad_rows}
        for with_grad, what in ((False, "head peak, MiB"), (True, "head peak, MiB, with gradients")):
            if not sizes[with_grad]:
                continue
            hidden, tokens = self.hidden(sizes[with_grad])
            for name, head in list(self.heads.items()):
                try:
                    value = peak(lambda head=head: self.run_head(head, with_grad, hidden, tokens), self.device)  # noqa: B023
                except Exception as error:
                    print(f"{name} failed and is left out: {error!r:.300}", file=sys.stderr, flush=True)
                    del self.heads[name]
                    continue
                found.append(self.row(what, name, value))
        return found


def trl_head(temperature: float) -> Head | None:
    """TRL's fused head; None if TRL is not installed."""
    try:
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as columns
        from trl.trainer.utils import _ChunkedLogProbFunction as chunked
    except ImportError as error:
        print(f"TRL is left out: {error}", file=sys.stderr)
        return None

    def head(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Measures:
        outputs = ("log_probs", "entropy")
        log_p, entropy, *_ = chunked.apply(hidden, weight, None, tokens, temperature, columns, None, 1.0, outputs)
        return log_p, log_p, entropy

    return head


def liger_head(temperature: float) -> Head | None:
    """Liger's fused linear layer, log-prob and entropy; None if it is not installed."""
    try:
        from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger
    except ImportError as error:
        print(f"Liger is left out: {error}", file=sys.stderr)
        return None
    apply = liger.LigerFusedLinearScaledCrossEntropyFunction.apply
    if torch.cuda.is_available():
        try:
            liger._resolve_implementation(torch.device("cuda"))
        except ImportError as error:
            print(f"Liger runs its torch code: {error}", file=sys.stderr)
            apply = functools.partial(_with_liger_torch, liger._FusedLinearPPOFallbackFunction)

    def head(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Measures:
        surprisal, entropy = apply(hidden, weight, tokens, temperature, return_entropy=True)
        return -surprisal, -surprisal, entropy

    return head


def _with_liger_torch(
    function: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, **_: Any
) -> Any:
    return function.apply(hidden, weight, tokens, temperature, -100, True)


PEERS: dict[str, Callable[[float], Head | None]] = {"TRL": trl_head, "Liger": liger_head}


def _backward(measures: Sequence[Tensor]) -> None:
    """The backward pass of the sum; random tokens may lie outside the nucleus, where log q is −inf."""
    torch.stack([values[values.isfinite()].sum() for values in measures]).sum().backward()


@contextmanager
def device_profile(device: str) -> Iterator[Callable[[], list[tuple[float, float, str]]]]:
    """Gives a function that says, after the body, from when to when (μs) which kernels and copies ran on the GPU."""
    if not device.startswith("cuda"):
        yield list
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield lambda: sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA"
        )


def device_shares(kernels: list[tuple[float, float, str]], seconds: float) -> list[str]:
    """How long a GPU worked and waited in a call, its longest waits, and the kernels that took most."""
    if not kernels:
        return []
    gaps, took, reached = [], dict[str, float](), kernels[0][0]
    for (start, end, name), (_, _, last) in zip(kernels, [kernels[0], *kernels], strict=False):
        gaps.append((max(0.0, start - reached) / 1e3, f"{last:.40} → {name:.40}"))
        took[name] = took.get(name, 0.0) + (end - start) / 1e3
        reached = max(reached, end)
    longest = sorted(took.items(), key=lambda item: -item[1])[:12]
    span, waits = (reached - kernels[0][0]) / 1e3, sum(gap for gap, _ in gaps)
    return [
        f"GPU {span - waits:.2f} at work, {seconds * 1e3 - span:.2f} waiting before and after, {waits:.2f} between",
        "longest waits " + ", ".join(f"{gap:.2f} ({place})" for gap, place in sorted(gaps, reverse=True)[:5]),
        "most in " + ", ".join(f"{value:.2f} {name:.60}" for name, value in longest),
    ]


def peak(run: Callable[[], Any], device: str) -> float:
    """Growth of memory at its highest while a function runs, in MiB; NaN where it cannot be told."""
    synchronise(device)
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        synchronise(device)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        return float("nan")
    run()  # whatever the first run alone brings in is not the stage's
    release_free_memory()
    reset.write_text("5")  # the high-water mark of the resident set starts anew
    before = resident(status, "VmRSS")
    run()
    return (resident(status, "VmHWM") - before) / 2**10


def release_free_memory() -> None:
    """Makes the C library give freed memory back, which would hide growth."""
    library = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if trim is not None:
        trim(0)


def resident(status: Path, name: str) -> int:
    """A figure of the process's memory, KiB."""
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{name}:"))


def synchronise(device: str) -> None:
    """Waits for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    """What ran: card or processor, and library versions."""
    import transformers

    return {
        "card": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def print_table(result: dict[str, Any]) -> None:
    """Every figure, with its ratios to the materialised variant's, to the better peer's, and to our own at top_p 1."""
    print(json.dumps(result["machine"]))
    columns = ("÷ materialised", "÷ better peer", "÷ own at top_p=1")
    print(f"{'policy':<18} {'what':<30} {'variant':<14} {'value':>10} " + " ".join(f"{name:>16}" for name in columns))
    figures = {(row["policy"], row["what"], row["variant"]): row["value"] for row in result["rows"]}
    for (policy, what, variant), value in figures.items():
        peers = [figures[policy, what, name] for name in PEERS if (policy, what, name) in figures]
        bases = (
            figures.get((policy, what, "materialised")),
            min(peers, default=None),
            next(
                (figures[p, what, variant] for p, w, v in figures if "top_p=1" in p and (w, v) == (what, variant)), None
            ),
        )
        ratios = " ".join(f"{'' if base is None else format(value / base, '.3f'):>16}" for base in bases)
        print(f"{policy:<18} {what:<30} {variant:<14} {value:>10.4f} {ratios}")


if __name__ == "__main__":
    main()
