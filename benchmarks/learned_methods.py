"""Learned edits beside the mean difference: held-out loss, effect on items never seen, and cost.

Sentiment on SmolLM2-135M-Instruct at layer 14. The learned methods are fitted on the shipped targets of the split
`dev`, the first wanted and unwanted completion of each, a quarter of them held out; `mean_diff` reads the shipped
contrast pairs. All are measured on the split `test`, every completion:

    python benchmarks/learned_methods.py [--steps 60] [--items 12] [--out table.csv]
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import steerlab as sl
from steerlab.core._files import write_atomic
from steerlab.core.shipped import shipped_vectors

LAYER = 14
NEUTRAL = (
    "The library opens at nine on weekdays and at ten on Saturdays. Books may be kept for four weeks and renewed "
    "twice, unless another reader has asked for them. The reading room on the second floor has forty seats."
)


def learned(
    engine: "sl.LensEngine", steps: int
) -> Iterator[tuple[str, sl.Plan, "sl.SteeringVector", Mapping[str, Any]]]:
    """Each method's name, plan, vector, and cost."""
    folder = shipped_vectors() / "sentiment"
    pairs = sl.ContrastPairs.from_jsonl(folder / "pairs.jsonl", group="group", split="train")
    targets = sl.Targets.from_jsonl(folder / "targets.jsonl", split="dev").to_frame()
    targets = sl.Targets.from_frame(targets.groupby(["prompt", "label"], sort=False).head(1))
    start = time.monotonic()
    mean = sl.extract(engine, pairs, layers=LAYER)[LAYER]
    cost = {"steps": 0, "seconds": time.monotonic() - start}
    for dose in (0.1, 0.2, 0.4):
        yield (
            f"mean_diff, dose {dose:g}",
            sl.Plan(sl.add(mean, dose=dose)),
            mean.scaled(dose * (mean.card.median_norm or 1) / mean.norm),
            cost,
        )
    for method in ("reft_r1", "reps", "loreft"):
        options = {"steps": steps, "batch_size": 4, "evaluate_every": 10, "validation": 0.25}
        vector = sl.extract(engine, targets, method, layers=LAYER, **options)[LAYER]
        edit = sl.loreft(vector) if method == "loreft" else sl.add(vector, coef=1.0)
        yield method, sl.Plan(edit), vector, dict(vector.card.training or {})


def margins(engine: "sl.LensEngine", plan: sl.Plan | None, test: sl.Targets) -> tuple[np.ndarray, float]:
    """Per item, log p of positive minus negative targets; and nats per token of the positive ones."""
    frame = engine.score(test.prompts, [item.targets for item in test], plan=plan).to_frame()
    sides = test.to_frame().label.to_numpy()
    frame["side"] = sides
    means = frame.groupby(["prompt_index", "side"]).log_prob.mean().unstack()
    wanted = frame[frame.side == 1]
    return (means[1] - means[-1]).to_numpy(), float(-wanted.log_prob.sum() / wanted.num_tokens.sum())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--items", type=int, default=12)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    engine = sl.load("smollm2-135m", dtype="float32")
    test = sl.Targets.from_jsonl(shipped_vectors() / "sentiment" / "targets.jsonl", split="test")
    test = test.take(range(min(arguments.items, len(test))))
    plain, loss = margins(engine, None, test)
    calm = sl.perplexity(engine, NEUTRAL).perplexity
    rows = [{"method": "unsteered", "test_loss": loss, "margin": plain.mean(), "change": 0.0, "perplexity_ratio": 1.0}]
    for name, plan, vector, cost in learned(engine, arguments.steps):
        steered, loss = margins(engine, plan, test)
        change = steered - plain
        rows.append(
            {
                "method": name,
                "held_out_loss": cost.get("held_out_loss"),
                "unsteered_loss": cost.get("unsteered_loss"),
                "test_loss": loss,
                "margin": steered.mean(),
                "change": change.mean(),
                "standard_error": change.std(ddof=1) / np.sqrt(len(change)),
                "dose": vector.norm / (vector.card.median_norm or np.nan),
                "perplexity_ratio": sl.perplexity(engine, NEUTRAL, plan=plan).perplexity / calm,
                **{key: cost.get(key) for key in ("steps", "best_step", "tokens", "seconds")},
            }
        )
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format="%.3g"))
    if arguments.out:
        write_atomic(arguments.out, table.to_csv(index=False))


if __name__ == "__main__":
    main()
