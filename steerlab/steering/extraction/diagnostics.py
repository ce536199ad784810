"""Diagnostics of vectors on held-out pairs, before anything is steered with them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._numbers import check_integer
from steerlab.core._warning import warn
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError
from steerlab.steering.extraction._pair_activations import PAIRS_PER_CHUNK, Reading, check_engine
from steerlab.steering.extraction.estimators import METHODS, estimate
from steerlab.steering.extraction.responses import Responses
from steerlab.steering.positions import where as positions
from steerlab.steering.vector_diagnostics import Diagnostics, LayerDiagnostics
from steerlab.steering.vectors import SteeringVector, VectorSet, check_width


def diagnose(
    vectors: VectorSet, dev: ContrastPairs, engine: Engine | None, *, chat: bool | None, n_splits: int, seed: int = 0
) -> Diagnostics:
    """See `VectorSet.diagnostics`; `seed` is of the splits."""
    n_splits = check_integer(n_splits, "n_splits", least=1)
    if not isinstance(dev, ContrastPairs):
        raise DataError(f"diagnostics takes held-out ContrastPairs, got {type(dev).__name__}.")
    engine = _engine(vectors, engine)
    card = vectors.by_layer[0].card
    if card.data_hash == dev.hash:
        warn("These are the pairs the vectors were made from, so the AUC is not a held-out one; pass other pairs.")
    reading = _reading(vectors, engine, chat)
    chunks = list(reading.chunks(engine, dev.positives, dev.negatives, PAIRS_PER_CHUNK))
    positive, negative = (torch.cat(side, dim=1) for side in zip(*chunks, strict=True))
    mean_differences = estimate("mean_diff", positive, negative)
    reliability = split_half_cosines(str(card.method), positive, negative, dev.groups, n_splits, seed)
    found = []
    for place, vector in enumerate(vectors.by_layer):
        median = _median_norm(vector, engine)
        found.append(
            LayerDiagnostics(
                layer=vector.layer,
                norm=vector.norm,
                relative_norm=vector.norm / median,
                auc=projection_auc(positive[place] @ vector.unit, negative[place] @ vector.unit),
                split_half_cosine=reliability[place],
                cosine_to_mean_diff=_cosine(vector.values, mean_differences[place]),
            )
        )
    return Diagnostics(reading.site, card.method, len(dev), n_splits, tuple(found))


def projection_auc(positive: Float[Tensor, " n_positive"], negative: Float[Tensor, " n_negative"]) -> float:
    """Share of (positive, negative) pairs in which the positive one is larger, ties counted half.

    Examples:
        >>> projection_auc(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0]))
        0.75
    """
    from sklearn.metrics import roc_auc_score

    labels = np.repeat([1, 0], [len(positive), len(negative)])
    return float(roc_auc_score(labels, torch.cat([positive, negative]).double().numpy()))


def split_half_cosines(
    method: str,
    positive: Float[Tensor, "n_layers pairs d_model"],
    negative: Float[Tensor, "n_layers pairs d_model"],
    groups: Sequence[str],
    n_splits: int,
    seed: int,
) -> list[float]:
    """Per layer the mean cosine between a method's vectors of two halves; a group is never divided.

    NaN with fewer than two groups, and for methods that make no vector of rows.
    """
    names = sorted(set(groups))
    if len(names) < 2 or method not in METHODS:
        return [float("nan")] * positive.shape[0]
    rng = np.random.default_rng(seed)
    cosines = []
    for _ in range(n_splits):
        first = set(rng.permutation(names)[: len(names) // 2].tolist())
        inside = torch.tensor([group in first for group in groups])
        halves = [estimate(method, positive[:, half], negative[:, half]) for half in (inside, ~inside)]
        cosines.append([_cosine(a, b) for a, b in zip(*halves, strict=True)])
    return np.mean(cosines, axis=0).tolist()


def _cosine(a: Float[Tensor, " d_model"], b: Float[Tensor, " d_model"]) -> float:
    """Cosine of two vectors; NaN if one is zero."""
    wide = a.double(), b.double()
    return float(wide[0] @ wide[1] / (wide[0].norm() * wide[1].norm()))


def _median_norm(vector: SteeringVector, engine: Engine) -> float:
    """Median norm of the stream where the vector is: its card's, if the card names the engine's weights."""
    if vector.card.median_norm and vector.card.weights_hash == engine.info.weights_hash:
        return vector.card.median_norm
    return engine.median_norm(vector.layer, vector.site)


def _engine(vectors: VectorSet, engine: Engine | None) -> Engine:
    found: Any = engine
    if found is None and vectors.origin is not None:
        found = vectors.origin.engine()
    if found is None:
        raise InputError("These vectors remember no engine (it is gone, or they come from a file); pass engine=.")
    check_engine(found)
    for vector in vectors.values():
        check_width(vector, found.info)
    return found


def _reading(vectors: VectorSet, engine: Engine, chat: bool | None) -> Reading:
    """How the vectors were read, at the layers that they are at."""
    card, layers = vectors.by_layer[0].card, list(vectors)
    read = None if card.read is None else positions.from_json(dict(card.read))
    as_chat = card.chat if chat is None else chat
    drawn = None if card.responses is None else Responses.from_json(card.responses)
    return Reading.on(engine, vectors.by_layer[0].site, layers, read, card.pool or "mean", as_chat, drawn)
