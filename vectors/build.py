"""Rebuilds the shipped sentiment vector, bit for bit, and the figures in its card.

Usage::

    python vectors/build.py            # writes sentiment.safetensors, then the figures in CARD.md and README.md
    python vectors/build.py --check    # builds afresh, compares with the shipped file; exit status 1 if a byte differs

The bytes depend on the data, the weights and the library versions, which the file names; not on time or place. One
thread is used, because sums split over threads are rounded differently.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import steerlab as sl
from steerlab.core.files import write_atomic
from steerlab.core.shipped import neutral_text

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "sentiment"
VECTOR = FOLDER / "sentiment.safetensors"
PAIRS = FOLDER / "pairs.jsonl"
TARGETS = FOLDER / "targets.jsonl"

MODEL = "smollm2-135m"
LAYER = 14
DOSES = [-0.2, -0.1, 0.0, 0.1, 0.2]
COST_DOSES = [-0.4, *DOSES, 0.4]
PLACES = {
    "every position": sl.where.all(),
    "last prompt token and generated": sl.where.last_prompt() | sl.where.generated(),
}


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare a fresh build with the shipped file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.check:
        return check()
    build().save(VECTOR)
    print(f"wrote {VECTOR}")
    write_figures()
    return 0


# --- the vector ---------------------------------------------------------------------------------------------------


def build() -> sl.SteeringVector:
    """The sentiment vector, extracted from the training pairs."""
    pairs = sl.ContrastPairs.from_jsonl(PAIRS, group="group", split="train")
    with load_engine() as engine:
        vectors = sl.extract(
            engine, pairs, method="mean_diff", site="resid_post", layers="all", read=sl.where.last_prompt()
        )
    vector = vectors[LAYER]
    return replace(vector, card=replace(vector.card, name="sentiment"))


def load_engine() -> Any:
    """The model on the CPU in float32, wherever this runs."""
    return sl.load(MODEL, dtype="float32", device="cpu")


def check() -> int:
    """Compares a fresh build with the shipped file, byte by byte, and says what differs."""
    if not VECTOR.is_file():
        print(f"{VECTOR} is missing; run this script without --check.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(build().save(Path(folder) / VECTOR.name))
        if fresh.read_bytes() == VECTOR.read_bytes():
            print(f"{VECTOR.name}: identical")
            return 0
        print(difference(sl.SteeringVector.load(VECTOR), sl.SteeringVector.load(fresh)), file=sys.stderr)
    return 1


def difference(shipped: sl.SteeringVector, fresh: sl.SteeringVector) -> str:
    """What differs between two vectors, a line each."""
    old, new = shipped.card.to_json(), fresh.card.to_json()
    lines = [f"{key}: shipped {old[key]!r}, fresh {new[key]!r}" for key in old if old[key] != new[key]]
    if shipped.values.shape == fresh.values.shape:
        lines.append(f"values: largest difference {(shipped.values - fresh.values).abs().max().item():.3g}")
    else:
        lines.append(f"values: shipped {tuple(shipped.values.shape)}, fresh {tuple(fresh.values.shape)}")
    return "\n".join([f"{VECTOR.name}: a fresh build differs from the shipped file", *lines])


# --- the figures --------------------------------------------------------------------------------------------------


def write_figures() -> None:
    """Measures the shipped vector on the test targets and rewrites the figures in the card and in the list."""
    vector = sl.SteeringVector.load(VECTOR)
    plans = {place: sl.Plan(sl.add(vector, dose=1.0, where=where)) for place, where in PLACES.items()}
    effects = measure_effects(plans)
    costs = measure_cost(plans["every position"])
    replace_block(FOLDER / "CARD.md", card_figures(vector, effects, costs))
    replace_block(HERE / "README.md", list_of_vectors(vector, effects["every position"]))
    print("rewrote the figures in CARD.md and README.md")


def measure_effects(plans: Mapping[str, sl.Plan]) -> dict[str, Any]:
    """The effect of each plan on the test targets, with both null families."""
    pairs = sl.ContrastPairs.from_jsonl(PAIRS, group="group", split="train")
    targets = sl.Targets.from_jsonl(TARGETS, split="test")
    controls = sl.Controls(random=20, shuffled=20)
    with tempfile.TemporaryDirectory() as root:
        experiment = sl.Experiment("sentiment-card", model=MODEL, backend="lens", seed=0, root=root)
        return {
            place: experiment.effect(plan, targets, doses=DOSES, controls=controls, pairs=pairs)
            for place, plan in plans.items()
        }


def measure_cost(plan: sl.Plan) -> dict[float, float]:
    """Perplexity of the neutral text at each dose, as a ratio to the unsteered one."""
    with load_engine() as engine:
        plain = sl.perplexity(engine, neutral_text()).perplexity
        return {
            dose: sl.perplexity(engine, neutral_text(), plan=plan.scaled(dose)).perplexity / plain
            for dose in COST_DOSES
        }


def card_figures(vector: sl.SteeringVector, effects: Mapping[str, Any], costs: Mapping[float, float]) -> str:
    """The figures block of the card, in Markdown."""
    rows = [
        f"| {place} | {e.slope:.2f} | {e.ci[0]:.2f} to {e.ci[1]:.2f} | {100 * e.anti_steerable:.0f} % "
        f"| {rank(e.null_rank)} | {e.verdict} |"
        for place, e in effects.items()
    ]
    return "\n".join(
        [
            f"Norm {vector.norm:.2f}; median norm of the stream {vector.card.median_norm:.2f} (position 0 left out).",
            "",
            "| edited | slope per unit dose | 95 % interval | anti-steerable | null rank p | verdict |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "Perplexity of the neutral text, every position edited, as a ratio to the unsteered model:",
            "",
            "| dose | " + " | ".join(f"{dose:+.1f}" for dose in costs) + " |",
            "| --- |" + " --- |" * len(costs),
            "| ratio | " + " | ".join(f"{ratio:.3f}" for ratio in costs.values()) + " |",
        ]
    )


def list_of_vectors(vector: sl.SteeringVector, effect: Any) -> str:
    """The table of vectors, in Markdown."""
    return "\n".join(
        [
            "| vector | licence | model | layer | slope per unit dose | null rank p |",
            "| --- | --- | --- | --- | --- | --- |",
            f"| [sentiment](sentiment/CARD.md) | Apache-2.0 | {MODEL} | {vector.layer} ({vector.site}) "
            f"| {effect.slope:.2f} ({effect.ci[0]:.2f} to {effect.ci[1]:.2f}) | {rank(effect.null_rank)} |",
        ]
    )


def rank(value: Any) -> str:
    """A null rank as text, one per family if there are several."""
    if isinstance(value, Mapping):
        return ", ".join(f"{family} {p:.3f}" for family, p in value.items())
    return f"{value:.3f}"


def replace_block(path: Path, figures: str) -> None:
    """Puts text between the two figure markers of a file."""
    pattern = re.compile(r"(<!-- figures: .*? -->\n).*?(<!-- end of figures -->)", re.DOTALL)
    text, count = pattern.subn(lambda match: f"{match[1]}{figures}\n{match[2]}", path.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{path} has {count} figure blocks; there must be one.")
    write_atomic(path, text)


if __name__ == "__main__":
    sys.exit(main())
