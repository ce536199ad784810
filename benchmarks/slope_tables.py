"""Item slopes of a model as a table from which thousands of experiments can be drawn; see `verdict_rates.py`.

    python benchmarks/slope_tables.py --out slope_tables
    python benchmarks/slope_tables.py --model DIRECTORY --layer 11 --device cuda --out slope_tables_of_another

An experiment spends nearly all its time on the model, and the next one, on other items and control vectors, repeats
most of it. But an item's slope is nearly linear in the direction that is added: slope = median norm × gradient of the
item's log-prob margin by the stream × unit direction. So one backward pass per item gives its slope under every
direction, at the default positions (the last prompt token) and at all positions alike (the sum of the gradients over
positions). All shipped sentiment targets are single tokens, so nothing after the last prompt token matters.

Two files: `gradients.npz` holds the gradients of the shipped sentiment items at one layer, scaled to a unit of dose,
with the differences of the shipped pairs, of which the true vector and its label flips are made. `measured.parquet`
holds, beside what the gradients give, slopes measured at doses -0.2 and 0.2 under random directions, label flips and
the true vector: how linear the model is at the doses of the other benchmarks.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.core._files import write_atomic
from steerlab.core.contrast_pairs import balanced_flips
from steerlab.core.shipped import shipped_vectors
from steerlab.models import resolve

DOSE, ROWS_PER_CALL = 0.2, 64
POSITIONS = ("default", "all")
CHECKED = {"default": (24, 8), "all": (6, 2)}
"""Random directions and label flips whose slopes are measured too."""


@dataclass(frozen=True)
class Item:
    """A prompt with the targets of one token.

    Attributes:
        ids: token ids of the prompt.
        positives: ids of its positive targets.
        negatives: ids of its negative ones.
        group: its group.
    """

    ids: list[int]
    positives: list[int]
    negatives: list[int]
    group: str


@dataclass(frozen=True)
class Slopes:
    """What gives the slope of every item under every direction, to first order.

    Attributes:
        gradients: per positions, nats per unit of dose for each coordinate of a unit direction: [items, d_model].
        groups: the group of each item.
        differences: activations of positive minus negative of each pair, [pairs, d_model].
        pair_groups: the group of each pair.
    """

    gradients: dict[str, np.ndarray]
    groups: list[str]
    differences: np.ndarray
    pair_groups: list[str]

    @classmethod
    def load(cls, folder: Path) -> "Slopes":
        """Reads `gradients.npz`."""
        with np.load(folder / "gradients.npz") as found:
            gradients = {positions: found[positions] for positions in POSITIONS}
            groups, pair_groups = found["groups"].tolist(), found["pair_groups"].tolist()
            return cls(gradients, groups, found["differences"], pair_groups)

    def of(self, directions: np.ndarray, positions: str = "default") -> np.ndarray:
        """Slopes under unit directions [n, d_model]: [n, items]."""
        return directions @ self.gradients[positions].T

    @property
    def true(self) -> np.ndarray:
        """The unit vector of the true labels."""
        return unit(self.differences.mean(axis=0))

    def random(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Isotropic random directions, [n, d_model]."""
        return unit(rng.standard_normal((n, self.differences.shape[1])))

    def signs(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Balanced label flips, [n, pairs]: -1 for exactly half the pairs of every group, 1 for the others."""
        return np.array([np.where(balanced_flips(self.pair_groups, rng), -1.0, 1.0) for _ in range(n)])

    def relabelled(self, signs: np.ndarray) -> np.ndarray:
        """Unit vectors extracted after label flips, [n, d_model]."""
        return unit(signs @ self.differences)


def unit(values: np.ndarray) -> np.ndarray:
    """Vectors at length 1."""
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def main() -> None:
    """Measures what is missing."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    if not (options.out / "gradients.npz").exists():
        with sl.load(options.model, dtype=options.dtype, device=options.device) as engine:
            differences, groups = pair_differences(engine, options.layer)
            size = engine.median_norm(options.layer)
        model = Model(options, size)
        found = {"groups": np.array([item.group for item in model.items]), "differences": differences, "size": size}
        write_arrays(options.out / "gradients.npz", found | model.gradients() | {"pair_groups": np.array(groups)})
    slopes = Slopes.load(options.out)
    if not (options.out / "measured.parquet").exists():
        with np.load(options.out / "gradients.npz") as found:
            model = Model(options, float(found["size"]))
        write_table(options.out / "measured.parquet", pd.concat(checked(model, slopes), ignore_index=True))
    print(pd.read_parquet(options.out / "measured.parquet").groupby(["positions", "kind"]).apply(agreement))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--layer", type=int, default=14)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=Path("slope_tables"), help="folder of the tables")
    return parser.parse_args(arguments)


def pair_differences(engine: Any, layer: int) -> tuple[np.ndarray, list[str]]:
    """Activations of positive minus negative of each shipped training pair, and the pairs' groups."""
    path = shipped_vectors() / "sentiment" / "pairs.jsonl"
    pairs = sl.ContrastPairs.from_jsonl(path, group="group", split="train")
    sides = [
        engine.capture(list(texts), layers=[layer], where=sl.where.last_prompt(), pool="mean")[layer].double()
        for texts in (pairs.positives, pairs.negatives)
    ]
    return (sides[0] - sides[1]).numpy(), list(pairs.groups)


def shipped_items(tokenizer: Any) -> list[Item]:
    """The shipped sentiment items, as far as their targets are single tokens."""
    found = []
    for item in sl.Targets.from_jsonl(shipped_vectors() / "sentiment" / "targets.jsonl"):
        sides = [[tokenizer.encode(text) for text in side] for side in (item.positives, item.negatives)]
        positives, negatives = ([ids[0] for ids in side if len(ids) == 1] for side in sides)
        if positives and negatives:
            found.append(Item(tokenizer.encode(item.prompt), positives, negatives, item.group))
    if not found:
        raise SystemExit("No shipped item has a positive and a negative target of one token in this tokenizer.")
    return found


class Model:
    """A Hugging Face model that gives slopes of items under directions added to the stream after a layer.

    Args:
        options: model, layer, device and dtype.
        size: norm that a direction has at dose 1: the median norm of the stream there.
    """

    def __init__(self, options: argparse.Namespace, size: float) -> None:
        path = resolve(options.model).path
        made = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype))
        self._model = made.to(options.device).eval().requires_grad_(False)
        self.items = shipped_items(AutoTokenizer.from_pretrained(path))
        self._size, self._added = size, self._zeros(1, 1, 1)
        self._model.model.layers[options.layer].register_forward_hook(self._add)

    def _zeros(self, *shape: int, **options: Any) -> torch.Tensor:
        return torch.zeros(shape, device=self._model.device, dtype=self._model.dtype, **options)

    def _ids(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self._model.device)

    def gradients(self) -> dict[str, np.ndarray]:
        """Slopes per coordinate of a unit direction, to first order: per positions [items, d_model]."""
        found = [self._gradient(item) for item in self.items]
        return {positions: np.stack([one[positions] for one in found]) for positions in POSITIONS}

    def _gradient(self, item: Item) -> dict[str, np.ndarray]:
        self._added = self._zeros(1, len(item.ids), self._model.config.hidden_size, requires_grad=True)
        margin = self._margins(self._model(self._ids(item.ids), logits_to_keep=1, use_cache=False), item)
        (gradient,) = torch.autograd.grad(margin.sum(), self._added)
        by_position = self._size * gradient[0].double().cpu().numpy()
        return {"default": by_position[-1], "all": by_position.sum(axis=0)}

    @torch.no_grad()
    def measured(self, directions: np.ndarray, positions: str) -> np.ndarray:
        """Slopes between doses -0.2 and 0.2 under unit directions [n, d_model]: [n, items]."""
        rows = torch.from_numpy(directions).to(self._model.device, self._model.dtype)
        return np.stack([self._measured(item, rows, positions) for item in self.items], axis=1)

    def _measured(self, item: Item, directions: torch.Tensor, positions: str) -> np.ndarray:
        ids, before = self._ids(item.ids), None
        if positions == "default":  # nothing changes before the last token, so the rest runs once
            self._added = self._zeros(1, 1, 1)
            before = self._model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
            ids = ids[:, -1:]
        found = []
        for rows in (directions * self._size * DOSE).split(ROWS_PER_CALL // 2):
            self._added = torch.cat([rows, -rows])[:, None]
            cache = copy.deepcopy(before)
            if cache is not None:
                cache.batch_repeat_interleave(len(self._added))
            out = self._model(ids.repeat(len(self._added), 1), past_key_values=cache, logits_to_keep=1)
            up, down = self._margins(out, item).chunk(2)
            found.append((up - down) / (2 * DOSE))
        return torch.cat(found).cpu().numpy()

    @staticmethod
    def _margins(out: Any, item: Item) -> torch.Tensor:
        log_probs = out.logits[:, -1].double().log_softmax(-1)
        return log_probs[:, item.positives].mean(1) - log_probs[:, item.negatives].mean(1)

    def _add(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + self._added, *output[1:])
        return output + self._added


def checked(model: Model, slopes: Slopes) -> Iterator[pd.DataFrame]:
    """Measured slopes beside those that the gradients give."""
    rng = np.random.default_rng(0)
    for positions, (n_random, n_flipped) in CHECKED.items():
        flipped = slopes.relabelled(slopes.signs(n_flipped, rng))
        directions = np.concatenate([slopes.random(n_random, rng), flipped, slopes.true[None]])
        kinds = np.repeat(["random", "flipped", "true"], [n_random, n_flipped, 1])
        measured, linear = model.measured(directions, positions), slopes.of(directions, positions)
        for draw, kind in enumerate(kinds):
            columns = {"positions": positions, "kind": kind, "draw": draw, "item": range(len(slopes.groups))}
            yield pd.DataFrame(columns | {"measured": measured[draw], "linear": linear[draw]})


def agreement(rows: pd.DataFrame) -> pd.Series:
    """How well the gradients give the measured slopes: of items, and of means over items."""
    means = rows.groupby("draw")[["measured", "linear"]].mean()
    found = {
        "directions": len(means),
        "correlation of items": rows.measured.corr(rows.linear),
        "rms of mean slopes, measured": float(np.sqrt((means.measured**2).mean())),
        "rms of mean slopes, linear": float(np.sqrt((means.linear**2).mean())),
        "rms of their difference": float(np.sqrt(((means.measured - means.linear) ** 2).mean())),
    }
    return pd.Series(found).round(3)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes arrays, whole or not at all."""
    buffer = BytesIO()
    np.savez(buffer, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Writes a table, whole or not at all."""
    buffer = BytesIO()
    table.to_parquet(buffer, index=False)
    write_atomic(path, buffer.getvalue())


if __name__ == "__main__":
    main()
