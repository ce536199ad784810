"""A large run: how long its report takes, and whether every frame of it loads in pandas and in polars.

Usage::

    python benchmarks/report.py --threads 2
    python benchmarks/report.py --rows 10000 --root runs/ --out figures.json

An effect is measured with control arms on as many items as it takes to reach `--rows` result rows, with entropy, cost,
generations and a transfer beside it. Then the report is written as HTML and as Markdown, from the run that was just
measured and once more from the run directory alone, as another process would; and every Parquet file of the directory
is read by both libraries, whose columns and numbers of rows must agree.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from extraction import SUBJECTS

import steerlab as sl
from steerlab.core._files import write_atomic

DOSES = [-0.2, -0.1, 0.0, 0.1, 0.2]
CONTROLS = {"random": 20, "shuffled": 20, "wrong_layer": True}
FOR_PAIRS, FOR_TRANSFER = 48, 24  # prompts
ENDS = 2  # doses that a control arm runs at
OPENINGS = [
    "To be honest, we found that the {} was",
    "After a long week away, the {} seemed",
    "My neighbour wrote to me that the {} was",
    "Everybody who came on Sunday said the {} had been",
    "In the end the {} turned out to be",
    "The review in the paper calls the {}",
    "Of all that we saw that day, the {} was",
    "She told us at breakfast that the {} was",
    "Nobody had told me that the {} would be",
    "Two of my friends think that the {} is",
    "The guide that we bought calls the {}",
    "What I liked least about the town: the {} was",
    "On our first evening the {} already seemed",
    "According to the letter the {} had become",
    "The children shouted that the {} was",
    "By the time we left, the {} had turned",
]
GOOD, BAD = " wonderful", " terrible"


def main() -> None:
    """Runs the benchmark and prints its figures."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        figures = measured(options, options.root or Path(temporary))
    print_figures(figures)
    if options.out:
        write_atomic(options.out, json.dumps({"options": vars(options), **figures}, indent=2, default=str) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--layer", type=int, default=14, help="of the vector that is measured")
    parser.add_argument("--rows", type=int, default=10_000, help="result rows, at least")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--root", type=Path, default=None, help="keep the run here; by default it is thrown away")
    parser.add_argument("--out", default=None, help="write the figures here as JSON")
    return parser.parse_args(arguments)


def measured(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Makes the run, writes its reports, reads its frames."""
    with sl.Experiment("large", options.model, root=root, seed=0, overwrite=True) as experiment:
        making = timed(lambda: make_run(experiment, options.layer, options.rows))
        rows = len(experiment.effects[0].rows)
        reports = written(experiment, root, "as measured")
        path = experiment.path
    reports |= written(sl.Experiment.load(path), root, "from its directory")
    return {"rows": rows, "making": making, "reports": reports, "reading": read_frames(path)}


# --- the run ------------------------------------------------------------------------------------------------------


def make_run(experiment: sl.Experiment, layer: int, rows: int) -> None:
    """Everything a report shows, with at least so many result rows."""
    arms = sum(CONTROLS.values())
    n_items = math.ceil(rows / (len(DOSES) + ENDS * arms))
    prompts = all_prompts()
    if n_items > len(prompts) - FOR_PAIRS - FOR_TRANSFER:
        raise SystemExit(f"{rows} rows take {n_items} items; there are {len(prompts) - FOR_PAIRS - FOR_TRANSFER}.")
    items, others = targets(prompts[:n_items]), targets(prompts[n_items : n_items + FOR_TRANSFER])
    pairs = sl.ContrastPairs.from_lists(*([prompt + word for prompt in prompts[-FOR_PAIRS:]] for word in (GOOD, BAD)))
    around = range(max(layer - 4, 0), min(layer + 6, experiment.engine.info.n_layers))
    vectors = experiment.extract(pairs, layers=around)
    plan = sl.Plan(sl.add(vectors[layer], dose=1.0))
    experiment.selfcheck()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the wrong layer
        experiment.effect(plan, items, DOSES, controls=sl.Controls(**CONTROLS), pairs=pairs)
    experiment.entropy(plan.scaled(0.1))
    experiment.cost(plan, doses=[0, 0.1, 0.2], prompts=prompts[:8], max_new_tokens=20)
    experiment.generate(plan, prompts[:8], doses=[-0.1, 0, 0.1], max_new_tokens=20)
    experiment.transfer(plan, others, DOSES)


def all_prompts() -> list[str]:
    """Every opening with every subject, subjects changing fastest."""
    return [opening.format(subject) for opening, subject in itertools.product(OPENINGS, SUBJECTS)]


def targets(prompts: list[str]) -> sl.Targets:
    """Items of a good and a bad word; those with one opening are a group."""
    return sl.Targets.from_records(
        [
            {"prompt": prompt, "target": word, "label": label, "group": prompt[:16]}
            for prompt in prompts
            for word, label in ((GOOD, 1), (BAD, -1))
        ]
    )


# --- its report and its frames ------------------------------------------------------------------------------------


def written(experiment: sl.Experiment, root: Path, how: str) -> dict[str, dict[str, float]]:
    """Seconds and MiB of the report in both formats."""
    found = {}
    for name, suffix in (("HTML", "html"), ("Markdown", "md")):
        place = root / f"report-of-{how.replace(' ', '-')}.{suffix}"
        seconds = timed(lambda place=place: experiment.report(place))
        found[f"{name}, {how}"] = {"seconds": seconds, "mib": size_of(place) / 2**20}
    return found


def size_of(report: Path) -> int:
    """Bytes of a report and of the pictures beside it."""
    beside = report.with_name(f"{report.stem}_files").rglob("*") if report.suffix == ".md" else ()
    return report.stat().st_size + sum(path.stat().st_size for path in beside if path.is_file())


def read_frames(run: Path) -> dict[str, float]:
    """Seconds that both libraries take for all frames of a run; how many frames and rows there are."""
    import pandas as pd
    import polars as pl

    frames, rows = sorted(run.rglob("*.parquet")), 0
    seconds = {"pandas": 0.0, "polars": 0.0}
    for path in frames:
        start = time.perf_counter()
        in_pandas = pd.read_parquet(path)
        between = time.perf_counter()
        in_polars = pl.read_parquet(path)
        seconds["pandas"] += between - start
        seconds["polars"] += time.perf_counter() - between
        if list(in_pandas.columns) != in_polars.columns or len(in_pandas) != len(in_polars):
            raise SystemExit(f"{path} is not the same frame in pandas and in polars.")
        rows += len(in_pandas)
    return {"frames": len(frames), "rows": rows, **seconds}


def timed(run: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def print_figures(figures: dict[str, Any]) -> None:
    """Figures as Markdown."""
    reading = figures["reading"]
    print(f"\n{figures['rows']} result rows, measured in {figures['making']:.0f} s\n")
    print("| report | seconds | MiB |\n| --- | --- | --- |")
    for name, figure in figures["reports"].items():
        print(f"| {name} | {figure['seconds']:.1f} | {figure['mib']:.1f} |")
    print(
        f"\n{reading['frames']} frames of {reading['rows']} rows in all: pandas {reading['pandas']:.2f} s, "
        f"polars {reading['polars']:.2f} s"
    )


if __name__ == "__main__":
    main()
