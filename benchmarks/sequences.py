"""Scoring sequences, side by side in one run: steerlab, logits materialised whole, and TRL's chunked head.

    python benchmarks/sequences.py --threads 2
    python benchmarks/sequences.py --device cuda --vocab 128256 --dtype bfloat16 --tokens 4096 --grad-rows 4

Every variant gives log p, log q and the entropy of q for every generated token under the same policy; with gradients,
the backward pass of their sum by all parameters too. The materialised variant holds all logits of a pass at once, and
cuts the nucleus by sorting, as Hugging Face's warper does. TRL, if installed (`pip install --no-deps trl==1.16.0`), has
no top_p, so it takes part where top_p is 1.

Times are totals, the decoder included, medians over repeats in which the variants take turns. Memory is the peak of
the loss stage, above what the final hidden states leave: on a GPU as the allocator counts it, on a Linux CPU as the
resident set grows. On a busy machine `--clock cpu` counts the process's own CPU seconds instead. `--vocab` makes a
Llama of 16 layers and width 2048 with random weights; otherwise it is SmolLM2.
"""

import argparse
import ctypes
import ctypes.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from steerlab.core.files import write_atomic
from steerlab.sequences import BatchedSequences, SequenceProcessor
from steerlab.sequences.head import HeadSpec, measure_head

PROMPT_TOKENS = 16


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
    parser.add_argument("--skip-trl", action="store_true")
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
    return model.eval(), NoTokenizer()


class NoTokenizer:
    """What a SequenceProcessor needs of a tokenizer when it only scores ids."""

    bos_token_id = eos_token_id = pad_token_id = None


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
        self.trl = None if options.skip_trl or top_p < 1 else trl_forward(model, temperature)

    # --- variants -------------------------------------------------------------------------------------------------

    def variants(self) -> dict[str, Callable[[Tensor, bool], None]]:
        """Name → scoring of some rows, with or without the backward pass."""
        found = {"materialised": self.materialised, "steerlab": self.ours}
        return found | ({} if self.trl is None else {"TRL chunked": self.theirs})

    def ours(self, ids: Tensor, with_grad: bool) -> None:
        """The processor's public call."""
        made = BatchedSequences.from_ids(
            ids[:, :PROMPT_TOKENS].tolist(), [[row] for row in ids[:, PROMPT_TOKENS:].tolist()]
        )
        results = self.processor.teacher_force_logprobs(
            made, with_grad=with_grad, compute_rb=True, tf_batch_size=len(ids)
        )
        if with_grad:
            assert results.rb_entropies_torch is not None
            nested = (results.logprobs, results.token_logqs, results.rb_entropies_torch)
            # random tokens may lie outside the nucleus, where log q is −inf
            terms = [values[values.isfinite()].sum() for kind in nested for row in kind for values in row]
            torch.stack(terms).sum().backward()

    def materialised(self, ids: Tensor, with_grad: bool) -> None:
        """All logits of the pass, then the measures on them."""
        moved = ids.to(self.device)
        with torch.set_grad_enabled(with_grad):
            hidden = self.model.model(input_ids=moved, use_cache=False).last_hidden_state
            measures = self.loss_stage(hidden[:, PROMPT_TOKENS - 1 : -1], moved[:, PROMPT_TOKENS:])
            if with_grad:
                sum(values[values.isfinite()].sum() for values in measures).backward()
            else:
                [values.cpu() for values in measures]

    def loss_stage(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log p, log q and entropy from logits that are all there at once."""
        logits = torch.nn.functional.linear(hidden, self.model.lm_head.weight).float().flatten(0, 1)
        index = tokens.reshape(-1, 1)
        log_p = logits.log_softmax(-1).gather(-1, index)
        scaled = logits if self.temperature == 1 else logits / self.temperature
        if self.top_p < 1:
            scaled = TopPLogitsWarper(self.top_p)(None, scaled)  # pyright: ignore[reportArgumentType]
        log_q = scaled.log_softmax(-1)
        entropy = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)
        return log_p, log_q.gather(-1, index), entropy

    def theirs(self, ids: Tensor, with_grad: bool) -> None:
        """TRL's chunked head."""
        moved = ids.to(self.device)
        labels = moved.clone()
        labels[:, :PROMPT_TOKENS] = -100
        assert self.trl is not None
        with torch.set_grad_enabled(with_grad):
            output = self.trl(input_ids=moved, labels=labels, fused_lm_head=True)
            if with_grad:
                (output.log_probs.sum() + output.entropy.sum()).backward()
            else:
                output.log_probs.cpu(), output.entropy.cpu()

    # --- figures --------------------------------------------------------------------------------------------------

    def times(self, with_grad: bool) -> list[dict[str, Any]]:
        """Median seconds of every variant over all sequences."""
        size = self.options.grad_rows if with_grad else self.options.rows
        variants = self.variants()
        found: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in range(self.options.repeats + 1):
            for name, run in list(variants.items()):
                try:
                    seconds = self.timed(lambda run=run: [run(part, with_grad) for part in self.ids.split(size)])
                except Exception as error:  # one variant must not take the others' figures with it
                    print(f"{name} failed and is left out: {error!r:.300}", file=sys.stderr, flush=True)
                    del variants[name], found[name]
                    continue
                print(f"{self.policy} grad={with_grad} {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
                if repeat or not self.options.repeats:
                    found[name].append(seconds)
        what = "total seconds with gradients" if with_grad else "total seconds"
        return [
            {"policy": self.policy, "what": what, "variant": name, "value": statistics.median(values), "all": values}
            for name, values in found.items()
        ]

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
    def memory(self) -> list[dict[str, Any]]:
        """Peak of the loss stage of one pass without gradients, in MiB."""
        moved = self.ids[: self.options.rows].to(self.device)
        hidden = self.model.model(input_ids=moved, use_cache=False).last_hidden_state[:, PROMPT_TOKENS - 1 : -1]
        tokens = moved[:, PROMPT_TOKENS:]
        spec = HeadSpec(self.processor.parts.transform, self.processor.config.generation.policy)
        flat, weight = hidden.flatten(0, 1), self.model.lm_head.weight
        stages = {
            "steerlab": lambda: measure_head(spec, flat, weight, None, tokens.flatten()),
            "materialised": lambda: self.loss_stage(hidden, tokens),
        }
        return [
            {"policy": self.policy, "what": "loss-stage peak, MiB", "variant": name, "value": peak(run, self.device)}
            for name, run in stages.items()
        ]


def trl_forward(model: Any, temperature: float) -> Callable[..., Any] | None:
    """TRL's forward with its chunked head, bound to the model but not left on it; None if TRL is not installed."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        print(f"TRL is left out: {error}", file=sys.stderr)
        return None
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    patched = model.forward
    del model.forward
    return patched


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
    """Every figure, with its ratio to the materialised variant's."""
    print(json.dumps(result["machine"]))
    print(f"{'policy':<18} {'what':<30} {'variant':<14} {'value':>10} {'÷ materialised':>15}")
    for row in result["rows"]:
        like = [r for r in result["rows"] if (r["policy"], r["what"]) == (row["policy"], row["what"])]
        base = next((r["value"] for r in like if r["variant"] == "materialised"), float("nan"))
        print(
            f"{row['policy']:<18} {row['what']:<30} {row['variant']:<14} {row['value']:>10.2f} "
            f"{row['value'] / base:>15.3f}"
        )


if __name__ == "__main__":
    main()
