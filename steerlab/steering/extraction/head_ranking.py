"""Which attention heads tell positive prompts from negative ones: probes of every head, judged on held-out groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HEADS
from steerlab.core._numbers import Integer, check_integer
from steerlab.core._progress import progress
from steerlab.core._splitting import check_groups_apart
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine, HeadsEngine
from steerlab.core.errors import DataError, InputError
from steerlab.display import Grid, Piece, Remarks, Scale, Shown, Table, count, figure
from steerlab.steering.extraction._pair_activations import PAIRS_PER_CHUNK, Reading
from steerlab.steering.heads import head_vector, weights_at_hand
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector, VectorSet

HEADS_SHOWN = 20
_ITERATIONS = 5000


@dataclass(frozen=True, repr=False)
class HeadRanking(Shown):
    """How well each attention head's output tells the sides of contrast pairs apart, on groups held out of the fit.

    Attributes:
        rows: a row per head, the best first: `layer`, `head`, `accuracy` (the share of held-out prompts that a logistic
            regression on the head's z puts on their side; 0.5 is chance), and `se`, its standard error over groups.
        n_pairs: contrast pairs.
        n_groups: groups of them; none was ever on both sides of a fit.
        folds: how many parts were held out in turn.
        shifts: by (layer, head), σ·θ: the unit direction from the mean of negative to the mean of positive prompts,
            times the standard deviation of all prompts along it; float32 [d_head]. It is fitted on all pairs.
    """

    rows: pd.DataFrame
    n_pairs: int
    n_groups: int
    folds: int
    shifts: Mapping[tuple[int, int], Tensor] = field(repr=False)

    def best(self, k: Integer) -> list[tuple[int, int]]:
        """The k most accurate heads as (layer, head), the best first.

        Raises:
            InputError: if there are not that many.
        """
        k = check_integer(k, "k", least=1)
        if k > len(self.rows):
            raise InputError(f"There are {len(self.rows)} heads, and k={k}.")
        top = self.rows[:k]
        return list(zip(top.layer.tolist(), top["head"].tolist(), strict=True))

    def vectors(self, engine: HeadsEngine, k: Integer) -> VectorSet:
        """The shifts of the k best heads as one vector per layer at attn_out, the sum over its heads.

        `sl.Plan(*(sl.add(v, coef=15.0) for v in ranking.vectors(engine, 48).values()))` is inference-time intervention
        with α = 15 on the 48 best heads.

        Raises:
            HookPointError: for a model in which attn_out is not the sum of its heads; see `sl.head_vector`.
        """
        made: dict[int, SteeringVector] = {}
        for layer, head in self.best(k):
            vector = head_vector(engine, layer, head, self.shifts[layer, head])
            made[layer] = made[layer] + vector if layer in made else vector
        return VectorSet(tuple(made.values()))

    def to_frame(self) -> pd.DataFrame:
        """A row per head, the best first: `layer`, `head`, `accuracy`, `se`."""
        return self.rows.copy()

    def _finding(self) -> str:
        first = self.rows.iloc[0]
        data = f"{count(self.n_pairs, 'pair')} in {count(self.n_groups, 'group')}, {self.folds} folds"
        best = (
            f"best: head {int(first['head'])} of layer {int(first.layer)}, held-out accuracy {figure(first.accuracy)}"
        )
        return f"{count(len(self.rows), 'head')}, {data}; {best}"

    def _pieces(self) -> Sequence[Piece]:
        by_layer = self.rows.pivot(index="layer", columns="head", values="accuracy")
        layers, heads = [f"layer {layer}" for layer in by_layer.index], [str(head) for head in by_layer.columns]
        scale, corner = Scale(0.5, 1.0, False), "layers down, heads across: held-out accuracy"
        note = (
            f"Every accuracy is on groups that the probe was not fitted on. The best of {len(self.rows)} heads is still"
            " a maximum, chosen on these pairs: expect less on others."
        )
        return [
            Table.of_frame(self.rows, limit=HEADS_SHOWN, more=".to_frame()"),
            Remarks([note]),
            Grid(layers, heads, by_layer.to_numpy(), scale, "accuracy", corner=corner, more=".to_frame()"),
        ]


@explains_arguments
def rank_heads(
    engine: HeadsEngine,
    pairs: ContrastPairs,
    *,
    layers: Any = "all",
    read: WhereLike = None,
    pool: str = "mean",
    folds: Integer = 5,
    chat: bool = False,
) -> HeadRanking:
    """Ranks attention heads by how well a probe on their output tells positive prompts from negative ones.

    For every head, a logistic regression (C = 1, on coordinates standardised within the fit) is fitted on all groups
    but some, and judged on those; each group is held out once. Pairs of one group stay together, and so do the two
    prompts of a pair. Every prompt runs once; its heads' outputs stay in memory (4·2·pairs·layers·n_heads·d_head
    bytes).

    Args:
        engine: a `LensEngine`, which reads heads.
        pairs: contrast pairs; name the groups of pairs that share a template or a subject.
        layers: "all", an index, or several; negative ones count from the end.
        read: positions to read in each prompt; its last token by default.
        pool: how several positions of one prompt become one row: `mean` or `last`.
        folds: how many parts the groups are divided into.
        chat: take strings as user turns of a chat.

    Raises:
        DataError: for fewer groups than folds, or a text that stands in two groups.
        InputError: for an engine that does not read heads.

    Examples:
        >>> ranking = rank_heads(engine, pairs)  # doctest: +SKIP
        >>> plan = sl.Plan(*(sl.add(v, coef=10.0) for v in ranking.vectors(engine, 12).values()))  # doctest: +SKIP

    Source:
        Li et al. 2023, Inference-Time Intervention (arXiv:2306.03341), section 3: a probe per head, the best by
        accuracy on held-out data, shifted along the difference of means in standard deviations.
    """
    weights_at_hand(engine)
    if not isinstance(pairs, ContrastPairs):
        raise DataError(f"Heads are ranked on ContrastPairs, got {type(pairs).__name__}.")
    folds = check_integer(folds, "folds", least=2)
    _check_groups(pairs, folds)
    reading = Reading.on(cast(Engine, engine), "attn_out", layers, read, pool, chat)  # which heads make up
    options = {
        "layers": list(reading.layers),
        "site": HEADS,
        "where": reading.where,
        "pool": reading.pool,
        "chat": chat,
    }
    positive, negative = (_read(engine, side, options) for side in (pairs.positives, pairs.negatives))
    found, shifts = [], {}
    n_heads = positive.shape[2]
    with progress(len(reading.layers) * n_heads, "rank heads", "head") as bar:
        for place, layer in enumerate(reading.layers):
            for head in range(n_heads):
                sides = positive[:, place, head], negative[:, place, head]
                found.append((layer, head, *held_out_accuracy(*sides, pairs.groups, folds)))
                shifts[layer, head] = _shift(*sides)
                bar.update()
    rows = pd.DataFrame(found, columns=["layer", "head", "accuracy", "se"])
    rows = rows.sort_values(["accuracy", "layer", "head"], ascending=[False, True, True], ignore_index=True)
    return HeadRanking(rows, len(pairs), len(set(pairs.groups)), folds, shifts)


def held_out_accuracy(
    positive: Float[Tensor, "pairs d_head"],
    negative: Float[Tensor, "pairs d_head"],
    groups: Sequence[str],
    folds: int,
) -> tuple[float, float]:
    """Accuracy of a logistic regression on groups that it was not fitted on, and its standard error over groups."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = torch.cat([positive, negative]).double().numpy()
    sides = np.repeat([1, 0], [len(positive), len(negative)])
    named = np.array([*groups, *groups])
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=_ITERATIONS))
    told = cross_val_predict(probe, rows, sides, groups=named, cv=GroupKFold(folds))
    return _clustered(told == sides, named)


def _clustered(right: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Share that is right, and its standard error, where rows of one group may be right together."""
    accuracy = float(right.mean())
    surplus = np.array([(right[groups == name] - accuracy).sum() for name in np.unique(groups)]) / len(right)
    n = len(surplus)
    return accuracy, float(np.sqrt(n / (n - 1) * np.square(surplus).sum()))


def _shift(
    positive: Float[Tensor, "pairs d_head"], negative: Float[Tensor, "pairs d_head"]
) -> Float[Tensor, " d_head"]:
    """σ·θ; zero where the sides have one mean."""
    rows = torch.cat([positive, negative]).double()
    difference = positive.double().mean(dim=0) - negative.double().mean(dim=0)
    length = difference.norm()
    if length == 0:
        return difference.float()
    direction = difference / length
    return ((rows @ direction).std(correction=0) * direction).float()


def _read(engine: Any, prompts: Sequence[PromptLike], options: Mapping[str, Any]) -> Tensor:
    """What every head puts out, float32 [prompts, layers, n_heads, d_head]."""
    size = 2 * PAIRS_PER_CHUNK
    parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return torch.cat([engine.capture(part, **options).stack().transpose(0, 1) for part in parts])


def _check_groups(pairs: ContrastPairs, folds: int) -> None:
    n_groups = len(set(pairs.groups))
    if n_groups < folds:
        raise DataError(
            f"{folds} folds need {folds} groups, and the {len(pairs)} pairs are in {n_groups}: pass folds= (at least "
            "2), or name more groups."
        )
    check_groups_apart([*pairs.positives, *pairs.negatives], [*pairs.groups, *pairs.groups])
