"""Every number in a report's tables follows from the frames on disk, by pandas and numpy alone.

Nothing here uses the package but to make the run; the tables are read from the Markdown and computed anew.
"""

import json
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import steerlab as sl
from steerlab.experiment.measurements.cost import perplexity_cost
from tests.experiment.data import DEV, HELD_OUT, PAIRS, TARGETS, TEXTS

DOSES = [-0.2, -0.1, 0.0, 0.1, 0.2, 6.0]
OPTIONS = {"controls": sl.Controls(random=19, shuffled=19, wrong_layer=True), "neutral": TEXTS}
ARMS = {"vector": "the vector", "random": "random directions", "shuffled": "label flips", "wrong_layer": "wrong layer"}


@pytest.fixture(scope="module")
def run(tiny_llama_engine: sl.LensEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=3) as exp:
        vectors = exp.extract(PAIRS, layers=[1, 2])
        plan = sl.Plan(sl.add(vectors[1], dose=1.0))
        other = sl.Plan(sl.add(vectors[2], dose=1.0))
        ratios = perplexity_cost(tiny_llama_engine, plan, TEXTS, DOSES).ppl_ratio.sort_values()
        bound = float(ratios.iloc[-2:].mean())  # the costliest dose lies past it
        exp.effect(plan, TARGETS, DOSES, pairs=PAIRS, max_ppl_ratio=bound, **OPTIONS)
        best = exp.select(vectors, [0.1, 0.2], DEV, subject_to={"ppl_ratio": 50.0}, texts=TEXTS)
        exp.confirm(best, HELD_OUT, controls=sl.Controls(random=19))
        exp.cost(plan, TEXTS, doses=[0, 0.2])
        exp.entropy(plan.scaled(0.2), TEXTS)
        exp.interaction(plan, other, TARGETS, doses_a=[0, 0.2], doses_b=[0, 0.1])
        exp.transfer(plan, HELD_OUT, DOSES[:4])
        exp.report(exp.path / "report.md")
        return exp.path


def plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text).replace("−", "-").replace("\u202f", "").replace("\u00a0", " ").strip()


def table(run: Path, section: str, caption: str) -> pd.DataFrame:
    """A table of the report as text, found by its section and the beginning of its caption."""
    text = (run / "report.md").read_text()
    part = text[text.index(f"## {section}") :]
    lines = part[part.index(f"\n{caption}") :].splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("| "))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return pd.DataFrame(rows[2:], columns=rows[0])


def close(shown: str, value: float) -> bool:
    """Whether a cell shows a value, rounded to the digits it has; an interval after it is left to `interval`."""
    found = shown.split(" [")[0]
    if found == "–":
        return bool(np.isnan(value))
    if found.endswith("∞"):
        return float(found.replace("∞", "inf")) == value
    if found == "0":
        return value == 0
    digits = Decimal(found)
    return abs(float(digits) - value) <= 0.51 * 10.0 ** int(digits.as_tuple().exponent)


def check(shown: pd.Series, values: object) -> None:
    listed = list(values)
    assert len(shown) == len(listed)
    wrong = [(a, b) for a, b in zip(shown, listed, strict=True) if not close(a, float(b))]
    assert not wrong, (shown.name, wrong)


def ends_agree(shown: tuple[float, float], sums: np.ndarray, counts: np.ndarray) -> None:
    """Whether an interval is Student's t over groups, its standard error by leaving out one at a time."""
    n = len(sums)
    without = [np.delete(sums, k).sum() / np.delete(counts, k).sum() for k in range(n)]
    error = np.sqrt((n - 1) * np.var(without))
    ends = scipy.stats.t.interval(0.95, n - 1, loc=sums.sum() / counts.sum(), scale=error)
    assert shown == pytest.approx(ends, rel=6e-3, abs=1e-3)


def interval(cell: str) -> tuple[float, float]:
    low, high = re.fullmatch(r".* \[(\S+), (\S+)\]", cell).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return float(low), float(high)


def line_slopes(rows: pd.DataFrame) -> pd.Series:
    """Least-squares slope per item."""
    return rows.groupby("item").apply(lambda part: np.polyfit(part.dose, part.value, 1)[0], include_groups=False)


@pytest.fixture(scope="module")
def effect(run: Path) -> dict[str, pd.DataFrame]:
    rows, cost = (pd.read_parquet(run / f"effects/000/{name}.parquet") for name in ("rows", "cost"))
    bound = json.loads((run / "effects/000/effect.json").read_text())["settings"]["max_ppl_ratio"]
    fitted = cost[cost.ppl_ratio <= bound].dose.tolist()
    assert len(fitted) == 5, "one dose lies past the bound, or nothing is left out"
    real = rows[rows.family == "vector"]
    ends = [min(fitted), max(fitted)]
    slopes = []
    for (family, draw), part in rows.groupby(["family", "draw"], sort=False):
        at = part[part.dose.isin(ends)]
        slopes.append((family, draw, line_slopes(at).mean()))
    return {
        "rows": rows,
        "cost": cost,
        "real": real,
        "fitted": real[real.dose.isin(fitted)],
        "arms": pd.DataFrame(slopes, columns=["family", "draw", "slope"]),
        "past": cost[cost.ppl_ratio > bound],
    }


def test_figures_of_the_effect(run: Path, effect: dict[str, pd.DataFrame]) -> None:
    text = plain((run / "report.md").read_text())
    head = text[text.index("## Effect") : text.index("### Per dose")]
    slopes = line_slopes(effect["fitted"])
    bends = [np.polyfit(part.dose, part.value, 2)[0] for _, part in effect["fitted"].groupby("item")]
    figures = dict(re.findall(r"- \*\*(.+?)\*\* (.+)", head))
    by_meaning = {meaning: value for value, meaning in figures.items()}
    assert float(by_meaning["slope per unit of dose"]) == pytest.approx(slopes.mean(), abs=6e-3)
    assert float(by_meaning["curvature per squared unit"]) == pytest.approx(np.mean(bends), abs=6e-3)
    share = by_meaning["of items are anti-steerable"].removesuffix(" %")
    assert float(share) == pytest.approx(100 * (slopes < 0).mean(), abs=0.6)
    low, high = by_meaning["95 % interval of the slope"].split(" … ")
    group = effect["real"].drop_duplicates("item").set_index("item").group
    grouped = slopes.groupby(group.reindex(slopes.index))
    n, means = (
        grouped.ngroups,
        np.array([slopes[group.reindex(slopes.index) != name].mean() for name in grouped.groups]),
    )
    error = np.sqrt((n - 1) / n * ((means - means.mean()) ** 2).sum())  # a group left out at a time
    ends = scipy.stats.t.interval(0.95, n - 1, loc=slopes.mean(), scale=error)
    assert (float(low), float(high)) == pytest.approx(ends, abs=6e-3)
    arms = effect["arms"]
    own = abs(arms[arms.family == "vector"].slope.iloc[0])
    ranks = [
        (1 + (arms[arms.family == name].slope.abs() >= own).sum()) / (1 + (arms.family == name).sum())
        for name in ("random", "shuffled")
    ]
    assert float(by_meaning["worst null rank"]) == pytest.approx(max(ranks), abs=6e-4)
    assert float(by_meaning["dose where the cost passes the bound"]) == effect["past"].dose.abs().min()


def test_doses_of_the_effect(run: Path, effect: dict[str, pd.DataFrame]) -> None:
    shown = table(run, "Effect", "The vector at each dose")
    means = effect["real"].groupby("dose")[["value", "positive_log_prob", "negative_log_prob"]].mean()
    check(shown["dose"], means.index)
    check(shown["log-prob margin (nats)"], means.value)
    check(shown["log p of positives (nats)"], means.positive_log_prob)
    check(shown["log p of negatives (nats)"], means.negative_log_prob)
    cost = effect["cost"].sort_values("dose")
    check(shown["perplexity"], cost.perplexity)
    check(shown["perplexity ratio"], cost.ppl_ratio)
    assert cost.perplexity.to_numpy() == pytest.approx(np.exp(cost.nll))
    base = cost[cost.dose == 0].nll.iloc[0]
    assert cost.ppl_ratio.to_numpy() == pytest.approx(np.exp(cost.nll - base))
    assert (shown["fitted"] == "no").tolist() == cost.dose.isin(effect["past"].dose).tolist()


def test_arms_items_and_receipts_of_the_effect(run: Path, effect: dict[str, pd.DataFrame]) -> None:
    shown, arms = table(run, "Effect", "Slopes per unit of dose").set_index("arm"), effect["arms"]
    own = abs(arms[arms.family == "vector"].slope.iloc[0])
    for family, part in arms.groupby("family"):
        row = next(row for name, row in shown.iterrows() if str(name) == ARMS[str(family)] or ARMS[str(family)] in name)
        rank = (1 + (part.slope.abs() >= own).sum()) / (1 + len(part)) if family in ("random", "shuffled") else np.nan
        values = [len(part), part.slope.mean(), part.slope.abs().mean(), part.slope.abs().max(), rank]
        check(row[["draws", "mean slope", "mean size of slope", "largest size of slope", "rank"]], values)
    items = table(run, "Effect", "Slope of each item")
    slopes = line_slopes(effect["fitted"]).sort_values()
    assert items["item"].tolist() == [TARGETS.items[item].prompt for item in slopes.index]
    check(items["slope"], slopes)
    receipts = table(run, "Effect", "Tokens that the operators counted")
    grouped = effect["rows"].groupby(["family", "dose"], sort=False)
    check(receipts["dose"], [dose for _, dose in grouped.groups])
    check(receipts["draws"], grouped.draw.nunique())
    check(receipts["items"], grouped.item.nunique())
    for heading, name in (("mean", "mean"), ("least", "min"), ("most", "max")):
        check(receipts[f"edited tokens {heading}"], grouped.edited_tokens.agg(name))
    assert set(receipts[receipts.dose == "0"]["edited tokens most"]) == {"0"}
    first = table(run, "Effect", "The first of")
    check(first["value"], effect["rows"].value.head(20))
    margins = effect["rows"].positive_log_prob - effect["rows"].negative_log_prob
    assert effect["rows"].value.to_numpy() == pytest.approx(margins, abs=1e-6)


def test_cost_and_entropy(run: Path) -> None:
    cost = pd.read_parquet(run / "frames/cost-000.parquet")
    shown = table(run, "Cost on further text", "Perplexity of text per dose")
    check(shown["perplexity"], np.exp(cost.nll))
    check(shown["perplexity ratio"], np.exp(cost.nll - cost.nll[0]))
    check(shown["tokens"], cost.num_tokens)
    rows = pd.read_parquet(run / "frames/entropy-000.parquet")
    shown = table(run, "Entropy and divergence", "Means over all tokens").set_index("quantity")
    wanted = {
        "policy entropy, unsteered (nats)": rows.base,
        "policy entropy, steered (nats)": rows.steered,
        "change of policy entropy (nats)": rows.steered - rows.base,
        "model entropy, unsteered (nats)": rows.raw_base,
        "model entropy, steered (nats)": rows.raw_steered,
        "change of model entropy (nats)": rows.raw_steered - rows.raw_base,
        "KL(steered‖base) of the model (nats)": rows.kl,
        "KL(steered‖base) of the policy (nats)": rows.policy_kl,
        "share of the unsteered nucleus kept": rows.kept,
        "overlap of both nuclei (Jaccard)": rows.jaccard,
        "share of tokens with infinite policy KL": np.isinf(rows.policy_kl),
        "policy KL over the other tokens (nats)": rows.policy_kl[np.isfinite(rows.policy_kl)],
    }
    assert set(shown.index) == set(wanted)
    for name, values in wanted.items():
        assert close(shown.loc[name, "mean"], float(values.mean())), name
        assert int(shown.loc[name, "tokens"]) == len(values)
    texts = rows.groupby("text").steered
    ends_agree(
        interval(shown.loc["policy entropy, steered (nats)", "mean"]),
        *(f().to_numpy() for f in (texts.sum, texts.size)),
    )


def test_selection_confirmation_interaction_and_transfer(run: Path) -> None:
    tries = pd.read_parquet(run / "findings/selection-000/table.parquet")
    tries = tries.sort_values(["chosen", "satisfied", "gain"], ascending=False, kind="stable")
    shown = table(run, "Selection on development items", "All 4 tries")
    for heading, name in (("layer", "layer"), ("dose", "dose"), ("gain", "gain"), ("value", "value")):
        check(shown[heading], tries[name])
    assert tries.gain.to_numpy() == pytest.approx(tries.value - tries.base_value)
    rows = pd.read_parquet(run / "findings/confirmation-000/rows.parquet")
    nulls = pd.read_parquet(run / "findings/confirmation-000/nulls.parquet")
    shown = table(run, "Confirmation on held-out items", "Held-out items")
    check(shown["change"], (rows["value"] - rows.base_value).sort_values())
    text = plain((run / "report.md").read_text())
    said = re.search(
        r"Look 1: .* log_prob_margin (\S+) \[(\S+), (\S+)\] on 3 held-out .*rank (\S+) against random", text
    )
    assert said is not None
    assert float(said[1]) == pytest.approx(rows.change.mean(), abs=6e-4)
    rank = (1 + (nulls.gain.abs() >= abs(rows.change.mean())).sum()) / (1 + len(nulls))
    assert float(said[4].rstrip(".")) == pytest.approx(rank, abs=6e-4)
    cells = pd.read_parquet(run / "findings/interaction-000/rows.parquet")
    shown = table(run, "Interaction of plans", "Means over items")
    means = cells.groupby(["scale_a", "scale_b"], as_index=False).value.mean()
    base = means[(means.scale_a == 0) & (means.scale_b == 0)].value.iloc[0]
    alone_a = means[means.scale_b == 0].set_index("scale_a").value - base
    alone_b = means[means.scale_a == 0].set_index("scale_b").value - base
    expected = means.scale_a.map(alone_a) + means.scale_b.map(alone_b)
    check(shown["value"], means.value)
    check(shown["change"], means.value - base)
    check(shown["expected"], expected)
    assert [float(cell.split(" [")[0]) for cell in shown["interaction"]] == pytest.approx(
        (means.value - base - expected).tolist(), abs=1e-5, rel=1e-3
    )
    moved = pd.read_parquet(run / "findings/transfer-000/rows.parquet")
    shown = table(run, "Transfer", "Mean over items at each dose")
    check(shown["log-prob margin (nats)"], moved.groupby("dose").value.mean())
    slope = line_slopes(moved).mean()
    said = re.search(r"changes by (\S+) per unit of dose", text[text.index("## Transfer") :])
    assert said is not None
    assert close(said[1], slope)


def test_vectors(run: Path) -> None:
    shown = table(run, "Vectors", "Vectors and where they come from")
    vectors = sl.VectorSet.load(run / "vectors/000.safetensors")
    norms = [float(torch.linalg.vector_norm(vector.values.double())) for vector in vectors.values()]
    check(shown["norm"], norms)
    assert shown["pairs"].tolist() == ["4", "4"]
