"""Scoring the same prompts under many plans on TransformerLens: what no plan edits runs once, or every time.

    python benchmarks/many_plans.py
    python benchmarks/many_plans.py --model random-8b --device cuda --dtype bfloat16

A plan adds a vector from each prompt's last token on, as plans do by default. `shared` is one call with a list of
plans, beside a call for each plan, which runs every prompt whole. A list of one plan gains nothing and pays for a
second pass. The ways take turns, once per round; figures are medians over rounds, the ratio is taken within each round.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from hooked_generation import SHAPES, machine, plain_model, timed, word_tokenizer

import steerlab as sl
from steerlab.core._files import write_atomic


def main() -> None:
    """Runs the benchmark and prints a table."""
    options = parse(sys.argv[1:])
    if options.threads:
        torch.set_num_threads(options.threads)
    model = plain_model(options, 1)
    engine = sl.load(model, tokenizer=word_tokenizer() if options.model in SHAPES else None)
    plans = [None, *(steered(engine, seed) for seed in range(1, options.plans))]
    rows = []
    print(json.dumps(machine(options.device)))
    for n_prompt in options.prompt_tokens:
        for n_target in options.target_tokens:
            rows += measure(engine, plans, n_prompt, n_target, options)
    if options.out:
        result = {"machine": machine(options.device), "options": vars(options), "rows": rows}
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes, or random-1b or -8b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--plans", type=int, default=8, help="plans of a call, the first of them none")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--targets", type=int, default=2, help="targets of each prompt")
    parser.add_argument("--target-tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", default=None, help="write the figures here as JSON")
    return parser.parse_args(arguments)


def steered(engine: sl.LensEngine, seed: int) -> sl.Plan:
    """A plan of one random vector in the middle."""
    values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(seed))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=engine.info.n_layers // 2), coef=1.0))


def measure(
    engine: sl.LensEngine, plans: list[sl.Plan | None], n_prompt: int, n_target: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Seconds of every way at one size."""
    drawn = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Any:
        return torch.randint(100, engine.info.d_vocab - 100, shape, generator=drawn).tolist()

    prompts = tokens(options.prompts, n_prompt)
    targets = tokens(options.prompts, options.targets, n_target)

    def score(given: list[sl.Plan | None]) -> list[float]:
        assigned = [plan for plan in given for _ in prompts]
        return engine.score(prompts * len(given), targets * len(given), plan=assigned).log_prob.tolist()

    def one_by_one(given: list[sl.Plan | None]) -> list[float]:
        return [score for plan in given for score in engine.score(prompts, targets, plan=plan).log_prob.tolist()]

    ways: dict[str, Callable[[], list[float]]] = {
        f"{len(plans)} plans, shared": lambda: score(plans),
        f"{len(plans)} plans, a call each": lambda: one_by_one(plans),
        "a list of one plan": lambda: score(plans[:1]),
        "one plan": lambda: one_by_one(plans[:1]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    scores = {name: run() for name, run in ways.items()}
    for _ in range(options.rounds):
        for name, run in ways.items():
            seconds[name].append(timed(run, options.device))
    names = list(ways)
    rows = []
    for ours, theirs in (names[:2], names[2:]):
        ratios = [a / b for a, b in zip(seconds[theirs], seconds[ours], strict=True)]
        row = {
            "prompt_tokens": n_prompt,
            "target_tokens": n_target,
            "way": ours,
            "seconds": statistics.median(seconds[ours]),
            "seconds_apart": statistics.median(seconds[theirs]),
            "times_faster": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "largest_difference": max(abs(a - b) for a, b in zip(scores[ours], scores[theirs], strict=True)),
        }
        print(
            f"{options.prompts} prompts of {n_prompt} tokens, {options.targets} targets of {n_target} each, {ours}: "
            f"{row['seconds']:8.3f} s; apart {row['seconds_apart']:8.3f} s; ratio {row['times_faster']:.2f} "
            f"({row['least']:.2f} to {row['most']:.2f}), |difference| ≤ {row['largest_difference']:.1e} nats",
            flush=True,
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
