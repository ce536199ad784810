"""Experiments whose answers are known beforehand, on a model of your choice: is what is there found, and nothing else?

    python benchmarks/reference_experiments.py --model smollm2-135m --out reference.csv
    python benchmarks/reference_experiments.py --model DIRECTORY --device cuda --evals FOLDER --out reference.csv

- `sentiment`, `refusal`: vectors of the shipped pairs on the shipped test items. Right is `effect`.
- `half`: half of the unit sentiment vector, the rest a random direction, drawn anew in each of `--halves` runs. Right
  is `effect` as often as the power curve of `verdict_rates.py` says.
- `null`: of the sentiment pairs after a balanced flip of their labels. Right is anything but `effect`.
- `survival-instinct`, `corrigible-neutral-HHH`: of questions with two lettered answers (`--evals`: a folder with these
  files of anthropics/evals, CC BY 4.0), on other questions. Where labels carry little, right is anything but `effect`.

Both null families run in all of them. The layer is the one of `--layers` whose vector has the largest gain on the
shipped items of the split `dev`, within the bound on perplexity; questions take the middle one. Every experiment is a
run below `--root`; one that was stopped goes on.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import steerlab as sl
from steerlab.core._files import write_atomic
from steerlab.core.contrast_pairs import balanced_flips
from steerlab.core.shipped import neutral_text, shipped_vectors
from steerlab.protocols import ChoiceItems

EVALS = ("survival-instinct", "corrigible-neutral-HHH")
KINDS = ("sentiment", "half", "null", "refusal", *EVALS)
LONGEST = 400
"""Characters of a question at most."""


def main() -> None:
    """Measures what is missing and prints the table."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    load = {"dtype": options.dtype, "device": options.device, "batch_tokens": options.batch_tokens}
    rows = []
    with sl.load(options.model, **{name: value for name, value in load.items() if value is not None}) as engine:
        for kind, draw in asked(options):
            rows.append(measured(engine, kind, draw, options))
            write_atomic(options.out, pd.DataFrame(rows).to_csv(index=False))
            print(line(rows[-1]), file=sys.stderr, flush=True)
    for row in rows:
        print(line(row))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=None, help="all that there is data for by default")
    parser.add_argument("--evals", type=Path, default=None, help="folder with survival-instinct.jsonl and the like")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=None, help="0.4, 0.47 and 0.55 of the depth by default"
    )
    parser.add_argument("--doses", type=float, nargs="+", default=[-0.2, -0.1, 0.0, 0.1, 0.2])
    parser.add_argument("--draws", type=int, default=20, help="control vectors of each family")
    parser.add_argument("--halves", type=int, default=10, help="runs of half")
    parser.add_argument("--nulls", type=int, default=5, help="runs of null")
    parser.add_argument("--items", type=int, default=60, help="items at most; of questions as many make the vector")
    parser.add_argument("--neutral", type=int, default=2, help="paragraphs of the neutral text to measure the cost on")
    parser.add_argument("--device", default=None, help="the first GPU by default, else the CPU")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-tokens", type=int, default=None, help="tokens per forward pass")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--root", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("reference.csv"))
    return parser.parse_args(arguments)


def asked(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Every experiment: its kind and number."""
    kinds = options.kinds or [kind for kind in KINDS if kind not in EVALS or options.evals is not None]
    times = {"half": options.halves, "null": options.nulls}
    for kind in kinds:
        if kind in EVALS and options.evals is None:
            raise SystemExit(f"{kind} needs its questions; pass --evals FOLDER.")
        yield from ((kind, draw) for draw in range(times.get(kind, 1)))


def layers_of(engine: Any, options: argparse.Namespace) -> list[int]:
    """The layers to choose from."""
    return options.layers or sorted({round(share * engine.info.n_layers) for share in (0.4, 0.47, 0.55)})


def best_vector(exp: Any, pairs: sl.ContrastPairs, name: str, options: argparse.Namespace) -> sl.SteeringVector:
    """The vector of pairs at the layer where that of the true labels works best on development items."""
    layers = layers_of(exp.engine, options)
    if len(layers) > 1:
        vectors = exp.extract(shipped_pairs(name), layers=layers)
        on, bound = shipped_items(name, "dev"), {"ppl_ratio": 1.5}
        best = exp.select(vectors, doses=[max(options.doses)], on=on, subject_to=bound, texts=texts(options))
        layers = [edit.vector.layer for edit in best.plan]
    return exp.extract(pairs, layers=layers)[layers[0]]


def measured(engine: Any, kind: str, draw: int, options: argparse.Namespace) -> dict[str, Any]:
    """One experiment, and what of it is kept."""
    start = time.perf_counter()
    with sl.Experiment(f"{kind}-{draw}", engine, seed=draw, root=folder(options)) as exp:
        vector, pairs, items = MADE.get(kind, questions)(exp, kind, draw, options)
        items = items.take(range(min(options.items, len(items))))
        effect = exp.effect(
            sl.Plan(sl.add(vector, dose=1.0)),
            items,
            options.doses,
            controls=sl.Controls(random=options.draws, shuffled=options.draws),
            pairs=pairs,
            neutral=texts(options),
        )
    names = ("verdict", "slope", "margin", "detectable", "anti_steerable", "size_over_nulls", "n_items", "n_groups")
    found = effect.summary()
    ends = dict(zip(("low", "high"), found["ci"], strict=True))
    ranks = {f"rank_{family}": rank for family, rank in effect.null_ranks.items()}
    about = {"model": engine.info.name, "kind": kind, "draw": draw, "layer": vector.layer}
    after = {"fitted_doses": len(effect.fitted_doses), "reasons": " ".join(effect.reasons)}
    seconds = {"seconds": round(time.perf_counter() - start, 1)}
    letters = by_letter(effect, items) if kind in EVALS else {}
    return {**about, **letters, **{name: found[name] for name in names}, **ends, **ranks, **after, **seconds}


def by_letter(effect: sl.Effect, items: sl.Targets) -> dict[str, float]:
    """Mean slope of the questions whose matching answer is each letter: a bias of letters has opposite signs."""
    letters = [item.positives[0] for item in items]
    return {f"slope_{name}": float(slope) for name, slope in effect.item_slopes.slope.groupby(letters).mean().items()}


Made = tuple[sl.SteeringVector, sl.ContrastPairs, sl.Targets]


def true(exp: Any, kind: str, draw: int, options: argparse.Namespace) -> Made:
    """The vector of shipped pairs."""
    pairs = shipped_pairs(kind)
    return best_vector(exp, pairs, kind, options), pairs, shipped_items(kind, "test")


def half(exp: Any, kind: str, draw: int, options: argparse.Namespace) -> Made:
    """Half of the unit sentiment vector, and of a random direction across it so much that the length stays."""
    vector, pairs, items = true(exp, "sentiment", draw, options)
    unit = vector.values.double() / vector.values.double().norm()
    other = torch.from_numpy(np.random.default_rng([draw, 1]).standard_normal(len(unit)))
    other -= (other @ unit) * unit
    mixed = (0.5 * unit + 0.75**0.5 * other / other.norm()) * vector.norm
    return vector.with_values(mixed.float(), method=str(vector.card.method)), pairs, items


def flipped(exp: Any, kind: str, draw: int, options: argparse.Namespace) -> Made:
    """The vector of sentiment pairs whose labels mean nothing."""
    pairs = shipped_pairs("sentiment")
    pairs = pairs.flipped(balanced_flips(pairs.groups, np.random.default_rng([draw, 2])))
    return best_vector(exp, pairs, "sentiment", options), pairs, shipped_items("sentiment", "test")


def questions(exp: Any, kind: str, draw: int, options: argparse.Namespace) -> Made:
    """The vector of one half of the questions, with the other half as items; the letters of either half are even."""
    found = ChoiceItems.from_jsonl(options.evals / f"{kind}.jsonl")
    kept = {item.question: item for item in found if len(item.question) <= LONGEST}
    letters = [[item for item in kept.values() if item.matching == letter] for letter in "AB"]
    rng, each = np.random.default_rng([draw, 3]), min(options.items, *map(len, letters)) // 2
    sides = [[part[k] for k in rng.permutation(len(part))[: 2 * each]] for part in letters]
    train, test = (ChoiceItems(tuple(item for side in sides for item in side[k::2])) for k in (0, 1))
    pairs, layers = train.pairs(chat=False), layers_of(exp.engine, options)
    layer = layers[len(layers) // 2]
    return exp.extract(pairs, layers=[layer])[layer], pairs, test.targets(chat=False)


MADE: dict[str, Callable[..., Made]] = {"sentiment": true, "refusal": true, "half": half, "null": flipped}


def shipped_pairs(name: str) -> sl.ContrastPairs:
    """Training pairs."""
    return sl.ContrastPairs.from_jsonl(shipped_vectors() / name / "pairs.jsonl", group="group", split="train")


def shipped_items(name: str, split: str) -> sl.Targets:
    """Items of a split."""
    return sl.Targets.from_jsonl(shipped_vectors() / name / "targets.jsonl", split=split)


def texts(options: argparse.Namespace) -> list[str]:
    """The text that the cost is measured on."""
    return neutral_text().split("\n\n")[: options.neutral]


def folder(options: argparse.Namespace) -> Path:
    """The runs of this model."""
    return options.root / f"reference-{Path(options.model).name.removesuffix('.gguf')}"


def line(row: dict[str, Any]) -> str:
    """An experiment in a line."""
    ranks = ", ".join(f"{name[5:]} {value:.3f}" for name, value in row.items() if name.startswith("rank_"))
    slope = f"slope {row['slope']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
    size = f"margin {row['margin']:.2f}, detectable {row['detectable']:.2f}"
    return f"{row['kind']} {row['draw']}, layer {row['layer']}: {row['verdict']}, {slope}, {size}, ranks {ranks}"


if __name__ == "__main__":
    main()
