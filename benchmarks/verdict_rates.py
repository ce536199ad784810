"""How often each verdict of an effect is given, for meaningless vectors and real ones of graded strength.

    python benchmarks/slope_tables.py --out slope_tables
    python -m benchmarks.verdict_rates --tables slope_tables --out verdict_rates.csv --plot power_curves.svg

Every run is an experiment drawn anew: groups of items (with replacement from the shipped ones), prompts within them,
the vector, and its control vectors. Slopes come from `slope_tables.py`; margin, interval, ranks and verdict come
from the package. Vectors:

- `random`: isotropic random directions;
- `flipped`: of sentiment pairs after a balanced flip of labels, whose null is balanced flips of those labels;
- `mixed`: s·u + √(1 − s²)·r of the true unit vector u and a random unit vector r orthogonal to it, for strengths s;
- `detectable`: so mixed that the mean slope over all items is the median `detectable` of designs of that kind.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats

from benchmarks.slope_tables import POSITIONS, Slopes, unit
from steerlab.core._files import write_atomic
from steerlab.experiment.measurements.effect._figures import Figures, design_of, margin_of
from steerlab.experiment.measurements.effect._settings import EffectSettings
from steerlab.experiment.measurements.effect._verdicts import judge
from steerlab.measures import cluster_t_mean, null_rank

STRENGTHS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
PILOTS, PER_GROUP, POOL = 30, 3, 2000
GROUPS = (4, 9, 20)
CURVES = (("default", "random"), ("default", "random+flips"), ("all", "random"))
VERDICTS = ("effect", "inconclusive", "no effect")
SETTINGS = EffectSettings()

VECTORS = ("random", "flipped", "mixed", "detectable")


@dataclass(frozen=True)
class Kind:
    """Runs of one kind.

    Attributes:
        vector: `random`, `flipped`, `mixed` or `detectable`.
        positions: `default` or `all`.
        families: null families, `random` or `random+flips`.
        groups: groups of items.
        per_group: prompts of each.
        strength: of `mixed` vectors.
    """

    vector: str
    positions: str
    families: str
    groups: int
    per_group: int
    strength: float = 0.0


class Runs:
    """Draws runs from a table.

    Args:
        slopes: the table.
        draws: control vectors of each family.
    """

    def __init__(self, slopes: Slopes, draws: int = 20) -> None:
        self._slopes, self._draws = slopes, draws
        names = np.array(slopes.groups)
        self._signs = slopes.signs(POOL, np.random.default_rng(0))
        self._members = [np.flatnonzero(names == name) for name in dict.fromkeys(slopes.groups)]

    def figures(self, kind: Kind, rng: np.random.Generator, size: float = 0.0) -> Figures:
        """The figures of one run; `size` is the mean slope of a `detectable` vector."""
        return figures_from(*self.drawn(kind, rng, size))

    def detectable(self, kind: Kind, rng: np.random.Generator) -> float:
        """What the design of one run could have seen."""
        design = design_of(*self.drawn(kind, rng), SETTINGS)
        return np.inf if design is None else design.detectable()

    def drawn(
        self, kind: Kind, rng: np.random.Generator, size: float = 0.0
    ) -> tuple[np.ndarray, list[str], dict[str, np.ndarray]]:
        """Item slopes, their groups, and mean control slopes of one run."""
        table, pool = self._slopes, self._signs
        signs = pool[rng.integers(POOL)] if kind.vector == "flipped" else np.ones(pool.shape[1])
        vector = self._vector(kind, signs, size, rng)
        controls = {"random": table.random(self._draws, rng)}
        if kind.families == "random+flips":
            controls["shuffled"] = table.relabelled(signs * pool[rng.choice(POOL, self._draws, replace=False)])
        chosen = [rng.choice(self._members[g], kind.per_group, replace=False) for g in self._groups(kind, rng)]
        items, groups = np.concatenate(chosen), np.repeat(np.arange(kind.groups), kind.per_group).astype(str).tolist()
        slopes = table.of(vector[None], kind.positions)[0, items]
        nulls = {name: table.of(rows, kind.positions)[:, items].mean(axis=1) for name, rows in controls.items()}
        return slopes, groups, nulls

    def mean_slope(self, strength: float, positions: str) -> float:
        """Mean slope over all items of the true vector, times the strength."""
        return strength * float(self._slopes.of(self._slopes.true[None], positions).mean())

    def _groups(self, kind: Kind, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(len(self._members), size=kind.groups)

    def _vector(self, kind: Kind, signs: np.ndarray, size: float, rng: np.random.Generator) -> np.ndarray:
        table, true = self._slopes, self._slopes.true
        other = table.random(1, rng)[0]
        if kind.vector == "random":
            return other
        if kind.vector == "flipped":
            return table.relabelled(signs[None])[0]
        across = [true]
        strength = kind.strength
        if kind.vector == "detectable":  # the random part moves no mean, so that the mean slope is what was asked for
            strength = size / self.mean_slope(1.0, kind.positions)
            across.append(table.gradients[kind.positions].mean(axis=0))
        basis, _ = np.linalg.qr(np.stack(across, axis=1))
        other = unit(other - basis @ (basis.T @ other))
        return strength * true + np.sqrt(max(0.0, 1 - strength**2)) * other


def figures_from(slopes: np.ndarray, groups: list[str], nulls: dict[str, np.ndarray]) -> Figures:
    """The figures of an effect with these item slopes and mean control slopes, three doses within the cost."""
    outer, inner = (cluster_t_mean(slopes, groups, level=level) for level in (SETTINGS.level, 2 * SETTINGS.level - 1))
    mean = float(slopes.mean())
    rows = [(name, draw, slope) for name, drawn in nulls.items() for draw, slope in enumerate(drawn)]
    return Figures(
        n_doses=3,
        fitted_doses=[-0.2, 0.0, 0.2],
        item_slopes=pd.DataFrame({"item": range(len(slopes)), "group": groups, "slope": slopes}),
        slope=mean,
        ci=(outer.low, outer.high),
        equivalence_ci=(inner.low, inner.high),
        curvature=0.0,
        curvature_ci=(0.0, 0.0),
        collapse_dose=np.nan,
        anti_steerable=float((slopes < 0).mean()),
        null_slopes=pd.DataFrame(rows, columns=["family", "draw", "slope"]),
        rank_slope=mean,
        null_ranks={name: null_rank(mean, drawn) for name, drawn in nulls.items()},
        margin=margin_of(nulls, SETTINGS),
        detectable=np.nan,  # no part of the verdict
        needed_groups=np.nan,
    )


def kinds(strengths: Sequence[float] = STRENGTHS) -> Iterator[Kind]:
    """Every kind of run."""
    for positions, groups, per_group in itertools.product(POSITIONS, GROUPS, (PER_GROUP,)):
        yield Kind("random", positions, "random", groups, per_group)
        yield Kind("flipped", positions, "random+flips", groups, per_group)
        for families in ("random", "random+flips"):
            yield Kind("detectable", positions, families, groups, per_group)
    for (positions, families), groups, strength in itertools.product(CURVES, GROUPS, strengths):
        yield Kind("mixed", positions, families, groups, PER_GROUP, strength)


def counted(runs: Runs, kind: Kind, n: int, seed: int) -> dict[str, Any]:
    """How often each verdict was given in n runs."""
    rng = np.random.default_rng([seed, *map(ord, repr(kind))])
    size = 0.0
    if kind.vector == "detectable":
        pilot = Kind("mixed", kind.positions, kind.families, kind.groups, kind.per_group, 0.3)
        size = float(np.median([runs.detectable(pilot, rng) for _ in range(PILOTS)]))
    n = n // 2 if kind.vector == "mixed" else n
    found = [runs.figures(kind, rng, size) for _ in range(n)]
    verdicts = [judge(figures, SETTINGS)[0] for figures in found]
    slope = size or runs.mean_slope(kind.strength, kind.positions)
    row = vars(kind) | {"slope": slope, "runs": n} | {name: verdicts.count(name) for name in VERDICTS}
    excludes = sum(figures.ci[0] > 0 or figures.ci[1] < 0 for figures in found)
    return row | {"excludes_zero": excludes}


def main() -> None:
    """Draws the runs, writes the counts, draws the curves, prints the tables."""
    options = parse(sys.argv[1:])
    runs = Runs(Slopes.load(options.tables), options.draws)
    found = []
    for kind in (kind for kind in kinds(options.strengths) if kind.vector in options.vectors):
        found.append(counted(runs, kind, options.runs, options.seed))
        print(found[-1], file=sys.stderr, flush=True)
    table = pd.DataFrame(found)
    write_atomic(options.out, table.to_csv(index=False))
    if options.plot is not None:
        draw_curves(table, options.plot)
    print_tables(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("slope_tables"), help="folder of slope_tables.py")
    parser.add_argument("--runs", type=int, default=200, help="runs of each kind; half as many of mixed")
    parser.add_argument("--vectors", nargs="+", default=VECTORS, choices=VECTORS, help="which vectors; all by default")
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS, help="of mixed vectors")
    parser.add_argument("--draws", type=int, default=20, help="control vectors of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("verdict_rates.csv"))
    parser.add_argument("--plot", type=Path, default=None, help="where to draw the power curves")
    return parser.parse_args(arguments)


def share(count: int, n: int) -> str:
    """A share in per cent with its exact binomial interval."""
    interval = scipy.stats.binomtest(int(count), int(n)).proportion_ci(0.95, method="exact")
    return f"{100 * count / n:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def print_tables(table: pd.DataFrame) -> None:
    """The tables of docs/nulls.md."""
    titles = {"random": "false effect", "flipped": "false effect", "detectable": "real"}
    for vector, title in ((vector, title) for vector, title in titles.items() if vector in set(table.vector)):
        print(f"\n{vector}: {title}")
        print("| positions | nulls | groups × prompts | slope | effect, % | no effect, % | interval excludes 0, % |")
        for row in table[table.vector == vector].to_dict("records"):
            effect, none = (share(row[name], row["runs"]) for name in ("effect", "no effect"))
            size = f"{row['slope']:.1f}" if row["slope"] else "–"
            shape = f"{row['groups']} × {row['per_group']}"
            excludes = f"{100 * row['excludes_zero'] / row['runs']:.0f}"
            print(f"| {row['positions']} | {row['families']} | {shape} | {size} | {effect} | {none} | {excludes} |")
        rows = table[table.vector == vector]
        print("together:", {name: share(rows[name].sum(), rows.runs.sum()) for name in VERDICTS})
    print(table[table.vector == "mixed"].drop(columns=["vector", "per_group"]).to_string(index=False))


def draw_curves(table: pd.DataFrame, path: Path) -> None:
    """Share of runs found, over the strength: a panel per positions and null families, a line per number of groups."""
    import matplotlib.pyplot as plt

    mixed = table[table.vector == "mixed"]
    figure, axes = plt.subplots(1, len(CURVES), figsize=(9, 2.9), sharey=True, layout="constrained")
    for ax, (positions, families) in zip(axes, CURVES, strict=True):
        part = mixed[(mixed.positions == positions) & (mixed.families == families)]
        for groups, style in zip(GROUPS, (":", "--", "-"), strict=True):
            rows = part[part.groups == groups]
            ax.plot(rows.strength, rows.effect / rows.runs, style, color="#0072B2", label=f"{groups} groups")
        ax.axhline(0.8, color="0.6", linewidth=0.8)
        ax.set_title(f"{positions} positions, {families}", fontsize=9)
        ax.set_xlabel("strength of the true vector")
    axes[0].set_ylabel("share of runs with effect")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
