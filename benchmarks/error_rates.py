"""How often the verdict of an effect is wrong, on SmolLM2: false `effect` of vectors that mean nothing, and power.

    python benchmarks/error_rates.py --out error_rates.jsonl
    python benchmarks/error_rates.py --kind random --runs 5 --out error_rates.jsonl

Three kinds of runs, each a whole `Experiment.effect` as a user would ask for it:

- `random`: the vector is an isotropic random direction. It comes from no pairs, so random directions are its null;
- `flipped`: the vector is extracted from the shipped sentiment pairs after a balanced flip of their labels, and these
  relabelled pairs are its pairs. Its nulls are random directions and balanced flips of the relabelled pairs;
- `resampled`: the vector is extracted from a bootstrap sample of the pairs, drawn within each group, with its true
  labels. Its nulls are random directions and balanced flips of that sample.

The first two should say `effect` seldom, the third nearly always. Every run draws anew, from the seed, its kind and its
number: the vector or its pairs, the items (a few groups of the shipped test prompts, one prompt of each), all control
vectors, and the bootstrap of the interval. Runs share the model, the median norm, and the activations of the pairs'
sentences, which no label and no sample changes and which therefore are read once.

A finished run is a line of `--out`; runs that are there already are not run again.

`verdict_rates.py` draws thousands of runs, of vectors of graded strength, from a table of item slopes instead.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch

import steerlab as sl
from steerlab.core._files import write_atomic
from steerlab.core.contrast_pairs import balanced_flips
from steerlab.core.results import Activations
from steerlab.core.shipped import neutral_text, shipped_vectors
from steerlab.experiment.measurements.effect.result import Effect

RUNS = {"random": 50, "flipped": 50, "resampled": 100}
SETTINGS = ("layer", "items", "doses", "draws", "neutral", "seed")  # what must agree for runs to be counted together


def main() -> None:
    """Does the runs that are missing, and prints the table."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    with sl.load(options.model, dtype="float32", device="cpu") as engine:
        print_table(finish(engine, options))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--kind", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--runs", type=int, default=None, help="runs of each kind; 50, 50 and 100 by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layer", type=int, default=14)
    parser.add_argument("--items", type=int, default=5, help="prompts a run, each of another group; at most 9")
    parser.add_argument("--doses", type=float, nargs="+", default=[-0.2, 0.0, 0.2])
    parser.add_argument("--draws", type=int, default=20, help="control vectors of each family")
    parser.add_argument("--neutral", type=int, default=2, help="paragraphs of the neutral text to measure the cost on")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=Path("error_rates.jsonl"), help="JSON lines, one a finished run")
    return parser.parse_args(arguments)


def finish(engine: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Does what is missing of the runs asked for, writing each when it is done.

    Returns:
        The runs asked for, those of earlier calls included.

    Raises:
        SystemExit: if the file holds runs of other settings.
    """
    settings = settings_of(engine, options)
    done = read_runs(options.out, settings)
    asked = [(kind, n) for kind in options.kind for n in range(RUNS[kind] if options.runs is None else options.runs)]
    engine.median_norm(options.layer)
    with captured_once(engine):
        for kind, number in asked:
            if (kind, number) not in done:
                done[kind, number] = measure(engine, kind, number, options) | {"settings": settings}
                write_atomic(options.out, "".join(json.dumps(run) + "\n" for run in done.values()))
                report(done[kind, number])
    return [done[key] for key in asked]


def settings_of(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What a run depends on besides its kind and number."""
    return {name: getattr(options, name) for name in SETTINGS} | {"weights_hash": engine.info.weights_hash}


def read_runs(path: Path, settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished runs by kind and number."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    runs = [json.loads(line) for line in lines]
    for run in runs:
        if run["settings"] != settings:
            raise SystemExit(
                f"{path} holds runs of other settings ({run['settings']} there, {settings} here); pass another --out."
            )
    return {(run["kind"], run["number"]): run for run in runs}


# --- one run ------------------------------------------------------------------------------------------------------


def measure(engine: Any, kind: str, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: an effect from scratch, and what of it is kept."""
    start = time.perf_counter()
    rng = np.random.default_rng([options.seed, list(RUNS).index(kind), number])
    items = drawn_items(options.items, rng)
    pairs = drawn_pairs(kind, rng)
    exp = sl.Experiment("error-rates", engine, seed=int(rng.integers(2**31)), root=None)
    vector = exp.extract(pairs, layers=[options.layer])[options.layer] if pairs else random_vector(engine, options, rng)
    effect = exp.effect(
        sl.Plan(sl.add(vector, dose=1.0)),
        items,
        options.doses,
        controls=sl.Controls(random=options.draws, shuffled=options.draws if pairs else 0),
        pairs=pairs,
        neutral=neutral_text().split("\n\n")[: options.neutral],
    )
    groups = [item.group for item in items]
    seconds = round(time.perf_counter() - start, 2)
    return {"kind": kind, "number": number, "seconds": seconds, "groups": groups, **figures(effect)}


def figures(effect: Effect) -> dict[str, Any]:
    """What is kept of an effect."""
    names = ("verdict", "slope", "ci", "anti_steerable", "rank_slope", "null_ranks", "fitted_doses", "reasons")
    nulls = effect.nulls().set_index("family")
    largest = {family: float(nulls.largest_size[family]) for family in effect.null_ranks}
    return {name: effect.summary()[name] for name in names} | {"largest_nulls": largest}


def drawn_items(n: int, rng: np.random.Generator) -> sl.Targets:
    """N items of different groups: one prompt each of n of the shipped test groups."""
    targets = sl.Targets.from_jsonl(shipped_vectors() / "sentiment" / "targets.jsonl", split="test")
    members: dict[str, list[int]] = {}
    for index, item in enumerate(targets):
        members.setdefault(item.group, []).append(index)
    if n > len(members):
        raise SystemExit(f"There are {len(members)} groups of test prompts; --items {n} asks for more.")
    return targets.take([int(rng.choice(members[group])) for group in rng.choice(list(members), n, replace=False)])


def drawn_pairs(kind: str, rng: np.random.Generator) -> sl.ContrastPairs | None:
    """The pairs of a run's vector: relabelled, resampled, or none."""
    path = shipped_vectors() / "sentiment" / "pairs.jsonl"
    pairs = sl.ContrastPairs.from_jsonl(path, group="group", split="train")
    if kind == "flipped":
        return pairs.flipped(balanced_flips(pairs.groups, rng))
    return resampled(pairs, rng) if kind == "resampled" else None


def resampled(pairs: sl.ContrastPairs, rng: np.random.Generator) -> sl.ContrastPairs:
    """As many pairs, drawn with replacement within each group."""
    groups = np.array(pairs.groups)
    chosen = [rng.choice(np.flatnonzero(groups == name), int((groups == name).sum())) for name in np.unique(groups)]
    return pairs.take(np.concatenate(chosen).tolist())


def random_vector(engine: Any, options: argparse.Namespace, rng: np.random.Generator) -> sl.SteeringVector:
    """An isotropic direction; its length is set by the dose."""
    values = torch.from_numpy(rng.standard_normal(engine.info.d_model)).float()
    return sl.SteeringVector.from_tensor(values, layer=options.layer, model=engine.info, name="a random direction")


# --- activations --------------------------------------------------------------------------------------------------


@contextmanager
def captured_once(engine: Any) -> Iterator[None]:
    """While it lasts, the engine reads the activations of each text once, and repeats them when asked again."""
    engine.capture = Repeated(engine.capture)
    try:
        yield
    finally:
        del engine.capture  # the instance's own; the method of its class is left


class Repeated:
    """An engine's `capture` of pooled activations that runs no text twice.

    Args:
        capture: the engine's own.
    """

    def __init__(self, capture: Any) -> None:
        self._capture = capture
        self._known: dict[str, dict[str, Activations]] = {}

    def __call__(self, prompts: Sequence[str], **options: Any) -> Activations:
        """As the engine's."""
        known = self._known.setdefault(repr(sorted(options.items())), {})
        missing = [text for text in dict.fromkeys(prompts) if text not in known]
        if missing:
            found = self._capture(missing, **options)
            known |= {text: one_prompt(found, index) for index, text in enumerate(missing)}
        return joined([known[text] for text in prompts])


def one_prompt(found: Activations, index: int) -> Activations:
    """One prompt's share of pooled activations."""
    values = tuple(layer[index : index + 1] for layer in found.values)
    where, ids = found.positions[index : index + 1], found.prompt_token_ids[index : index + 1]
    return Activations(found.site, found.layers, values, where, found.pool, ids)


def joined(parts: Sequence[Activations]) -> Activations:
    """Pooled activations of several prompts, in order."""
    values = tuple(torch.cat(rows) for rows in zip(*(part.values for part in parts), strict=True))
    positions = tuple(part.positions[0] for part in parts)
    ids = tuple(part.prompt_token_ids[0] for part in parts)
    return Activations(parts[0].site, parts[0].layers, values, positions, parts[0].pool, ids)


# --- what comes of it ---------------------------------------------------------------------------------------------


def report(run: dict[str, Any]) -> None:
    """A line for a finished run."""
    ranks = ", ".join(f"{family} {rank:.3f}" for family, rank in run["null_ranks"].items())
    line = f"{run['kind']} {run['number']}: {run['verdict']}, slope {run['slope']:+.2f}, ranks {ranks}"
    print(f"{line}, {run['seconds']} s", file=sys.stderr, flush=True)


def rates(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over runs of one kind.

    Returns:
        `runs`, `effect`, `share`, `low` and `high` (exact binomial interval of the share, 95 %), `excludes_zero`
        (intervals of the slope that exclude 0), `beyond` (per null family, ranks of at most 0.05), `collapsed`.
    """
    n, effect = len(runs), sum(run["verdict"] == "effect" for run in runs)
    interval = scipy.stats.binomtest(effect, n).proportion_ci(0.95, method="exact")
    families = dict.fromkeys(family for run in runs for family in run["null_ranks"])
    return {
        "runs": n,
        "effect": effect,
        "share": effect / n,
        "low": float(interval.low),
        "high": float(interval.high),
        "excludes_zero": sum(run["ci"][0] > 0 or run["ci"][1] < 0 for run in runs),
        "beyond": {family: sum(run["null_ranks"].get(family, math.nan) <= 0.05 for run in runs) for family in families},
        "collapsed": sum(run["verdict"] == "collapsed" for run in runs),
    }


def print_table(runs: Sequence[dict[str, Any]]) -> None:
    """Counts per kind as Markdown, and for both kinds of false effects together."""
    print("| vector | runs | `effect` | share, 95 % interval | interval excludes 0 | beyond random | beyond flips |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = {kind: (kind,) for kind in RUNS} | {"random or flipped": ("random", "flipped")}
    for name, kinds in rows.items():
        chosen = [run for run in runs if run["kind"] in kinds]
        if chosen:
            print(table_row(name, rates(chosen)))
    for kind in dict.fromkeys(run["kind"] for run in runs):
        slopes = [run["slope"] for run in runs if run["kind"] == kind]
        shown = f"median {statistics.median(slopes):.2f}, {min(slopes):.2f} to {max(slopes):.2f}"
        print(f"\nslopes of {kind}: {shown}")
    print(f"\n{sum(run['seconds'] for run in runs) / 60:.0f} minutes, {len(runs)} runs")


def table_row(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    share = f"{found['share']:.1%} ({found['low']:.1%} to {found['high']:.1%})"
    beyond = " | ".join(str(found["beyond"].get(family, "not run")) for family in ("random", "shuffled"))
    return f"| {name} | {found['runs']} | {found['effect']} | {share} | {found['excludes_zero']} | {beyond} |"


if __name__ == "__main__":
    main()
