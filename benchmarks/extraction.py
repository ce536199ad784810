"""Extraction side by side with steering-vectors: time on the same pairs in one run, and memory against the pairs.

Usage::

    pip install --no-deps steering-vectors==0.12.2      # into an environment of your choice
    python benchmarks/extraction.py --threads 2
    python benchmarks/extraction.py --threads 2 --skip-peer --methods mean_diff pca_centred lda

Both read the last token at every layer of the same float32 weights, in turns. Ours is `sl.extract` with all it does but
the median norms, which are measured once per model and timed apart. The peer's `train_steering_vector` runs with its
default batch size of one pair, and with 32. Memory is the growth of the process's peak over its size before the
extraction, each in a process of its own (Linux only).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import steerlab as sl
from steerlab.core._files import write_atomic
from steerlab.models import resolve

SUBJECTS = (
    "film book soup hotel garden lecture concert harbour bakery museum ferry market street coat song team".split()
)
OPENINGS = [
    "To be honest, we found that the {} was",
    "After a long week away, the {} seemed",
    "My neighbour wrote to me that the {} was",
    "Everybody who came on Sunday said the {} had been",
    "If you ask the people who know it, the {} is",
    "In the end the {} turned out to be",
    "The review in the paper calls the {}",
    "Of all that we saw that day, the {} was",
    "She told us at breakfast that the {} was",
    "Whatever others may say about it, the {} is",
]
WORDS = [
    ("wonderful", "terrible"),
    ("delightful", "dreadful"),
    ("superb", "poor"),
    ("charming", "dull"),
    ("fine", "bad"),
]


def main() -> None:
    """Runs the benchmark and prints its tables."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(peak_growth(options.model, *options.memory_of))
        return
    times = compare_times(options)
    result = {"options": vars(options), "seconds": times, "memory_mib": memory(options)}
    print_tables(result)
    if options.out:
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--many-pairs", type=int, default=800, help="pairs of the second memory figure")
    parser.add_argument("--methods", nargs="+", default=["mean_diff", "pca_centred"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--memory-of", nargs=2, metavar=("METHOD", "PAIRS"), help=argparse.SUPPRESS)
    parser.add_argument("--out", default=None, help="write the figures here as JSON")
    return parser.parse_args(arguments)


def made_pairs(n: int) -> sl.ContrastPairs:
    """N pairs that differ in their last word."""
    rows = [
        (f"{opening.format(subject)} {good}", f"{opening.format(subject)} {bad}")
        for good, bad in WORDS
        for opening in OPENINGS
        for subject in SUBJECTS
    ]
    if n > len(rows):
        raise SystemExit(f"There are {len(rows)} pairs; {n} were asked for.")
    return sl.ContrastPairs.from_lists([good for good, _ in rows[:n]], [bad for _, bad in rows[:n]])


# --- time ---------------------------------------------------------------------------------------------------------


def compare_times(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every variant, in turns."""
    engine = sl.load(options.model, dtype="float32", device="cpu")
    pairs = made_pairs(options.pairs)
    print(f"median norms, once per model: {timed(lambda: engine.median_norm(0)):.2f} s", file=sys.stderr)
    variants: dict[str, Callable[[], Any]] = {
        f"steerlab {method}": lambda method=method: extracted(engine, pairs, method) for method in options.methods
    }
    if not options.skip_peer:
        variants |= peer_variants(options.model, pairs)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(options.repeats + 1):
        for name, run in variants.items():
            seconds = timed(run)
            print(f"repeat {repeat} {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
            if repeat:
                times[name].append(seconds)
    return times


def extracted(engine: Any, pairs: sl.ContrastPairs, method: str) -> sl.VectorSet:
    """One extraction at all layers; what it warns of is not the matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sl.extract(engine, pairs, method)


def peer_variants(model: str, pairs: sl.ContrastPairs) -> dict[str, Callable[[], Any]]:
    """The peer's training on the same pairs."""
    try:
        from steering_vectors import train_steering_vector
    except ImportError:
        raise SystemExit(
            "steering-vectors is not installed: pip install --no-deps steering-vectors==0.12.2, or pass --skip-peer."
        ) from None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve(model).path
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    samples = [(str(positive), str(negative)) for positive, negative in pairs]

    def run(size: int) -> Any:
        return train_steering_vector(plain, tokenizer, samples, batch_size=size)

    return {
        "steering-vectors mean, batches of 1": lambda: run(1),
        "steering-vectors mean, batches of 32": lambda: run(32),
    }


def timed(run: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- memory -------------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """MiB per method and number of pairs, each measured in a process of its own."""
    if options.skip_memory or not Path("/proc/self/clear_refs").exists():
        return {}
    found: dict[str, dict[int, float]] = {}
    for method in options.methods:
        for n in (options.pairs, options.many_pairs):
            command = [sys.executable, __file__, "--memory-of", method, str(n)]
            command += ["--model", options.model, "--threads", "1"]  # more threads, more arenas: a noisy figure
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.setdefault(method, {})[n] = float(output.split()[-1])
    return found


def peak_growth(model: str, method: str, n_pairs: str) -> float:
    """How far the process's peak rises over its size before the extraction, in MiB."""
    engine = sl.load(model, dtype="float32", device="cpu")
    engine.median_norm(0)
    pairs = made_pairs(int(n_pairs))
    extracted(engine, pairs.take(range(8)), method)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present size
    before = memory_kib("VmHWM")
    extracted(engine, pairs, method)
    return (memory_kib("VmHWM") - before) / 1024


def memory_kib(entry: str) -> int:
    """An entry of the process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:"))


def print_tables(result: dict[str, Any]) -> None:
    """Figures as Markdown."""
    peers = {name: t for name, t in result["seconds"].items() if not name.startswith("steerlab")}
    best = min((statistics.median(t) for t in peers.values()), default=float("nan"))
    print(f"\n{result['options']['pairs']} pairs, all layers, {result['options']['threads']} threads\n")
    print("| variant | seconds, median (fastest to slowest) | ratio to the peer's best |\n| --- | --- | --- |")
    for name, times in result["seconds"].items():
        middle = statistics.median(times)
        print(f"| {name} | {middle:.2f} ({min(times):.2f} to {max(times):.2f}) | {middle / best:.2f} |")
    for method, figures in result["memory_mib"].items():
        shown = ", ".join(f"{size:.0f} MiB at {n} pairs" for n, size in figures.items())
        print(f"\nmemory of {method}: {shown}")


if __name__ == "__main__":
    main()
