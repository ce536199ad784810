"""Scoring speed, side by side in one run: plain Hugging Face, lm-eval's HFLM, and steerlab's TransformerLens engine.

    python scripts/setup.py peers
    .venv-peers/bin/python benchmarks/scoring_lens.py --rounds 3

Three workloads: `shared` is one prompt with many targets, `header` many prompts that begin alike (as few-shot prompts
do) with one target each, `different` many prompts that have nothing in common. Every variant scores the same strings,
and its log-probs are compared with the plain model's. The variants take turns, once per round, so that a busy moment
of the machine hits them all; figures are medians over rounds, and the ratio is the variant's time over steerlab's,
taken within each round. CPU seconds are given beside wall seconds: other programs on the machine lengthen them less.
"""

import argparse
import itertools
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import steerlab as sl
from steerlab.core._files import write_atomic
from steerlab.core.shipped import reference_text
from steerlab.models import resolve


@dataclass(frozen=True)
class Workload:
    """Prompts with their targets, as text."""

    name: str
    prompts: list[str]
    targets: list[list[str]]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every prompt with each of its targets."""
        return [(prompt, target) for prompt, row in zip(self.prompts, self.targets, strict=True) for target in row]


def main() -> None:
    """Runs the benchmark and prints a table."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    path = resolve(options.model).path
    with sl.load(str(path), dtype=options.dtype, device="cpu") as engine:
        variants = make_variants(path, engine, options)
        rows = []
        for workload in workloads(engine.tokenizer, options):
            rows += measure(workload, variants, options.rounds)
            print_rows(rows[-len(variants) :])
    if options.out:
        result = {"machine": machine(), "options": vars(options), "rows": rows}
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--targets", type=int, default=32, help="targets of the shared prompt, and prompts otherwise")
    parser.add_argument("--target-tokens", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the shared prompt")
    parser.add_argument("--short-prompt-tokens", type=int, default=96, help="of the different prompts")
    parser.add_argument("--header-tokens", type=int, default=256, help="that the prompts of `header` share")
    parser.add_argument("--question-tokens", type=int, default=24, help="of each prompt's own after the header")
    parser.add_argument("--workloads", nargs="+", default=["shared", "header", "different"])
    parser.add_argument("--batch-size", type=int, default=1, help="HFLM's batch size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", default=None, help="write the figures here as JSON")
    return parser.parse_args(arguments)


def workloads(tokenizer: Any, options: argparse.Namespace) -> list[Workload]:
    """The chosen workloads, cut from the shipped reference text."""
    n = options.targets
    target = Cutter(tokenizer, options.target_tokens).pieces(n)
    shared = Cutter(tokenizer, options.prompt_tokens).pieces(1)
    header = Cutter(tokenizer, options.header_tokens).pieces(1)[0]
    questions = Cutter(tokenizer, options.question_tokens).pieces(n)
    short = Cutter(tokenizer, options.short_prompt_tokens).pieces(n)
    single = [[text] for text in target]
    known = {
        "shared": Workload("shared", shared, [target]),
        "header": Workload("header", [header + question for question in questions], single),
        "different": Workload("different", short, single),
    }
    return [known[name] for name in options.workloads]


class Cutter:
    """Pieces of the reference text of a given number of tokens, each beginning with a space.

    Args:
        tokenizer: the model's tokenizer.
        n_tokens: tokens per piece.
    """

    def __init__(self, tokenizer: Any, n_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.n_tokens = n_tokens
        self.ids = tokenizer(reference_text(), add_special_tokens=False)["input_ids"]

    def pieces(self, n: int) -> list[str]:
        """The first n different ones that are cut at words, so that the tokenizer gives the same tokens again."""
        found = list(itertools.islice(self._all(), n))
        if len(found) < n:
            raise SystemExit(f"The reference text holds {len(found)} pieces of {self.n_tokens} tokens, {n} are needed.")
        return found

    def _all(self) -> Any:
        seen: set[str] = set()
        step = max(1, self.n_tokens // 8)
        place = 0
        while place + self.n_tokens < len(self.ids):
            text = self.tokenizer.decode(self.ids[place : place + self.n_tokens])
            following = self.tokenizer.decode([self.ids[place + self.n_tokens]])
            if text.startswith(" ") and following.startswith(" ") and text not in seen and self._is_stable(text):
                seen.add(text)
                yield text
                place += step
            else:
                place += 1

    def _is_stable(self, text: str) -> bool:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) == self.n_tokens


Variant = Callable[[Workload], list[float]]


def make_variants(path: Path, engine: Any, options: argparse.Namespace) -> dict[str, Variant]:
    """Everything that is compared; each gives the log-prob of every pair, in order."""
    from transformers import AutoModelForCausalLM

    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise SystemExit(
            "lm-eval is not installed here: python scripts/setup.py peers, then run this with .venv-peers/bin/python."
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()
    harness = HFLM(pretrained=plain, tokenizer=engine.tokenizer, batch_size=options.batch_size)
    return {
        "plain Hugging Face, one by one": lambda workload: one_by_one(plain, engine.tokenizer, workload),
        f"lm-eval HFLM, batch {options.batch_size}": lambda workload: with_harness(harness, workload),
        "steerlab": lambda workload: engine.score(workload.prompts, workload.targets).log_prob.tolist(),
    }


@torch.inference_mode()
def one_by_one(model: Any, tokenizer: Any, workload: Workload) -> list[float]:
    """Each pair in a forward pass of its own."""
    found = []
    for prompt, target in workload.pairs:
        n_prompt = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(prompt + target)["input_ids"]])
        logits = model(ids, use_cache=False).logits[0, n_prompt - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, n_prompt:, None]).sum().item())
    return found


def with_harness(harness: Any, workload: Workload) -> list[float]:
    """What lm-eval says."""
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(workload.pairs)]
    return [log_prob for log_prob, _ in harness.loglikelihood(requests, disable_tqdm=True)]


def measure(workload: Workload, variants: dict[str, Variant], rounds: int) -> list[dict[str, Any]]:
    """A row per variant: seconds, targets per second, how much slower than steerlab, and the largest difference."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in variants}
    scores: dict[str, list[float]] = {}
    variants["steerlab"](workload)  # what is made once per model
    for _ in range(rounds):
        for name, variant in variants.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            scores[name] = variant(workload)
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
    reference = next(iter(scores.values()))
    return [
        {
            "workload": workload.name,
            "variant": name,
            "pairs": len(workload.pairs),
            "seconds": statistics.median(seconds[name]),
            "targets_per_second": len(workload.pairs) / statistics.median(seconds[name]),
            "times_steerlab": ratio(seconds[name], seconds["steerlab"]),
            "cpu_seconds": statistics.median(cpu_seconds[name]),
            "cpu_times_steerlab": ratio(cpu_seconds[name], cpu_seconds["steerlab"]),
            "largest_difference": max(abs(a - b) for a, b in zip(scores[name], reference, strict=True)),
        }
        for name in variants
    ]


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Median over rounds of their time over ours."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """A table of one workload."""
    print(f"{rows[0]['workload']}: {rows[0]['pairs']} pairs")
    for row in rows:
        print(
            f"  {row['variant']:<32} {row['seconds']:8.2f} s ({row['times_steerlab']:6.2f} x steerlab), "
            f"CPU {row['cpu_seconds']:8.2f} s ({row['cpu_times_steerlab']:6.2f} x), "
            f"{row['targets_per_second']:7.2f} targets/s, |difference| ≤ {row['largest_difference']:.1e} nats",
            flush=True,
        )


def machine() -> dict[str, str]:
    """Where it ran."""
    return {"platform": platform.platform(), "processor": platform.processor(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
