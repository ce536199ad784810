"""Rebuilds the shipped vectors, bit for bit, and the figures in their cards.

Usage::

    python vectors/build.py                    # every set: its vector file, then the figures in CARD.md and README.md
    python vectors/build.py formality          # only this one
    python vectors/build.py [NAME ...] --check # builds afresh, compares with the shipped files; exit status 1 if a
                                               # byte differs

The bytes depend on the data, the weights and the library versions, which the file names; not on time or place. One
thread is used, because sums split over threads are rounded differently.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import steerlab as sl
from steerlab.core.files import write_atomic
from steerlab.core.shipped import neutral_text

HERE = Path(__file__).resolve().parent
MODEL = "smollm2-135m"
LAST = sl.where.last_prompt()
PLACES = {
    "every position": sl.where.all(),
    "last prompt token and generated": sl.where.last_prompt() | sl.where.generated(),
}


@dataclass(frozen=True)
class Recipe:
    """How one vector is made and measured; a card says why these values.

    Attributes:
        name: of the folder and of the vector.
        layer: the layer kept.
        site: where in the layer.
        method: the estimator.
        read: the positions read in each prompt.
        doses: of the effect.
        cost_doses: of the perplexity, wider than `doses` to show where the model breaks.
    """

    name: str
    layer: int
    site: str = "resid_post"
    method: str = "mean_diff"
    read: sl.where.Where = LAST
    doses: tuple[float, ...] = (-0.2, -0.1, 0.0, 0.1, 0.2)
    cost_doses: tuple[float, ...] = (-0.4, -0.2, -0.1, 0.0, 0.1, 0.2, 0.4)

    @property
    def folder(self) -> Path:
        """Where the set lies."""
        return HERE / self.name

    @property
    def file(self) -> Path:
        """The vector file."""
        return self.folder / f"{self.name}.safetensors"

    def pairs(self) -> sl.ContrastPairs:
        """The training pairs."""
        return sl.ContrastPairs.from_jsonl(self.folder / "pairs.jsonl", group="group", split="train")

    def targets(self) -> sl.Targets:
        """The test targets."""
        return sl.Targets.from_jsonl(self.folder / "targets.jsonl", split="test")


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("sentiment", layer=14),
        Recipe("formality", layer=24),
        Recipe("refusal", layer=14),
        Recipe("capitals", layer=23),
    )
}


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--check", action="store_true", help="compare fresh builds with the shipped files")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in RECIPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; the sets are {', '.join(RECIPES)}")
    torch.set_num_threads(1)
    recipes = [RECIPES[name] for name in arguments.names or RECIPES]
    with sl.load(MODEL, dtype="float32", device="cpu") as engine:
        if arguments.check:
            return max([check(engine, recipe) for recipe in recipes])
        for recipe in recipes:
            build(engine, recipe).save(recipe.file)
            print(f"wrote {recipe.file}")
            write_figures(engine, recipe)
    return 0


# --- the vectors --------------------------------------------------------------------------------------------------


def build(engine: Any, recipe: Recipe) -> sl.SteeringVector:
    """The vector, extracted from the training pairs."""
    # All layers are read although one is kept: the shipped bytes were made so.
    vectors = sl.extract(engine, recipe.pairs(), method=recipe.method, site=recipe.site, layers="all", read=recipe.read)
    vector = vectors[recipe.layer]
    return replace(vector, card=replace(vector.card, name=recipe.name))


def check(engine: Any, recipe: Recipe) -> int:
    """Compares a fresh build with the shipped file, byte by byte, and says what differs."""
    shipped = recipe.file
    if not shipped.is_file():
        print(f"{shipped} is missing; run this script without --check.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(build(engine, recipe).save(Path(folder) / shipped.name))
        if fresh.read_bytes() == shipped.read_bytes():
            print(f"{shipped.name}: identical")
            return 0
        lines = difference(sl.SteeringVector.load(shipped), sl.SteeringVector.load(fresh))
    print("\n".join([f"{shipped.name}: a fresh build differs from the shipped file", *lines]), file=sys.stderr)
    return 1


def difference(shipped: sl.SteeringVector, fresh: sl.SteeringVector) -> list[str]:
    """What differs between two vectors, a line each."""
    old, new = shipped.card.to_json(), fresh.card.to_json()
    lines = [f"{key}: shipped {old[key]!r}, fresh {new[key]!r}" for key in old if old[key] != new[key]]
    if shipped.values.shape == fresh.values.shape:
        lines.append(f"values: largest difference {(shipped.values - fresh.values).abs().max().item():.3g}")
    else:
        lines.append(f"values: shipped {tuple(shipped.values.shape)}, fresh {tuple(fresh.values.shape)}")
    return lines


# --- the figures --------------------------------------------------------------------------------------------------


def write_figures(engine: Any, recipe: Recipe) -> None:
    """Measures the shipped vector on the test targets and rewrites the figures in the card and in the list."""
    vector = sl.SteeringVector.load(recipe.file)
    plans = {place: sl.Plan(sl.add(vector, dose=1.0, where=where)) for place, where in PLACES.items()}
    effects = measure_effects(engine, recipe, plans)
    costs = measure_cost(engine, plans["every position"], recipe.cost_doses)
    replace_block(recipe.folder / "CARD.md", card_figures(vector, effects, costs))
    row = list_row(recipe, vector, effects["every position"])
    replace_block(HERE / "README.md", list_of_vectors(listed_rows() | {recipe.name: row}))
    print(f"rewrote the figures in {recipe.name}/CARD.md and README.md")


def measure_effects(engine: Any, recipe: Recipe, plans: Mapping[str, sl.Plan]) -> dict[str, Any]:
    """The effect of each plan on the test targets, with both null families."""
    pairs, targets = recipe.pairs(), recipe.targets()
    controls = sl.Controls(random=20, shuffled=20)
    with tempfile.TemporaryDirectory() as root:
        experiment = sl.Experiment(f"{recipe.name}-card", model=engine, seed=0, root=root)
        return {
            place: experiment.effect(plan, targets, doses=list(recipe.doses), controls=controls, pairs=pairs)
            for place, plan in plans.items()
        }


def measure_cost(engine: Any, plan: sl.Plan, doses: Sequence[float]) -> dict[float, float]:
    """Perplexity of the neutral text at each dose, as a ratio to the unsteered one."""
    plain = sl.perplexity(engine, neutral_text()).perplexity
    return {dose: sl.perplexity(engine, neutral_text(), plan=plan.scaled(dose)).perplexity / plain for dose in doses}


def card_figures(vector: sl.SteeringVector, effects: Mapping[str, Any], costs: Mapping[float, float]) -> str:
    """The figures block of a card, in Markdown."""
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


def list_row(recipe: Recipe, vector: sl.SteeringVector, effect: Any) -> str:
    """The row of one vector in the list, in Markdown."""
    return (
        f"| [{recipe.name}]({recipe.name}/CARD.md) | Apache-2.0 | {MODEL} | {vector.layer} ({vector.site}) "
        f"| {effect.slope:.2f} ({effect.ci[0]:.2f} to {effect.ci[1]:.2f}) | {rank(effect.null_rank)} |"
    )


def listed_rows() -> dict[str, str]:
    """The rows that the list has now, by name; those of sets that are not measured afresh stay."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return {match[1]: match[0] for match in re.finditer(r"^\| \[(\w+)\]\(\1/CARD\.md\) \|.*\|$", text, re.MULTILINE)}


def list_of_vectors(rows: Mapping[str, str]) -> str:
    """The table of vectors, in the order of the recipes, in Markdown."""
    header = [
        "| vector | licence | model | layer | slope per unit dose | null rank p |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*header, *(rows[name] for name in RECIPES if name in rows)])


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
