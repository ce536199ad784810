"""Extracting steering vectors from contrast pairs."""

import importlib.metadata
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.hook_points import HookPoint
from steerlab.core.pairs import ContrastPairs
from steerlab.core.results import check_pool
from steerlab.steering.estimators import estimator
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet, model_entries
from steerlab.steering.where import Where, last_prompt

_LIBRARIES = ("steerlab", "torch", "transformers", "transformer-lens")


@dataclass(frozen=True)
class PairActivations:
    """Activations of both sides of contrast pairs, one row per pair, pooled over the positions read.

    Attributes:
        positive: per layer, shape [pairs, d_model].
        negative: per layer, shape [pairs, d_model].
    """

    positive: dict[int, Float[Tensor, "pairs d_model"]]
    negative: dict[int, Float[Tensor, "pairs d_model"]]


def extract(
    engine: Engine,
    pairs: ContrastPairs,
    method: str = "mean_diff",
    site: str = "resid_post",
    layers: Any = "all",
    read: Where | None = None,
    *,
    pool: str = "mean",
    name: str | None = None,
    chat: bool = False,
) -> VectorSet:
    """One steering vector per layer, from the activations that tell positive prompts from negative ones.

    Every prompt runs once, whatever the number of layers. Each vector's card records the model, the data, the method,
    the positions, and the median norm of the stream there, to which a dose refers.

    Args:
        engine: the engine to read activations with.
        pairs: the contrast pairs.
        method: the estimator: `mean_diff`.
        site: `resid_pre`, `resid_mid`, `resid_post`, `attn_out` or `mlp_out`.
        layers: "all", an index, or several; negative ones count from the end.
        read: positions to read in each prompt; its last token by default.
        pool: how several positions of one prompt become one row: `mean` or `last`.
        name: what the vectors are about.
        chat: take strings as user turns of a chat.

    Returns:
        A VectorSet: `vectors[layer]`.

    Raises:
        InputError: for an unknown method, or positions that a prompt lacks.
        HookPointError: for an unknown layer or site.
    """
    estimate = estimator(method)
    if check_pool(pool) is None:
        raise InputError("extract needs one row per prompt; pool is 'mean' or 'last', got None.")
    where = last_prompt() if read is None else read
    found = read_pairs(engine, pairs, site=site, layers=layers, read=where, pool=pool, chat=chat)
    card = VectorCard(
        name=name,
        method=method,
        **model_entries(engine.info),
        read=where.to_json(),
        pool=pool,
        data_hash=pairs.hash,
        n_pairs=len(pairs),
        versions=library_versions(),
    )
    return VectorSet(
        tuple(
            _vector(engine, HookPoint(layer, site), estimate(found.positive[layer], found.negative[layer]), card)
            for layer in found.positive
        )
    )


def read_pairs(
    engine: Engine, pairs: ContrastPairs, *, site: str, layers: Any, read: Where, pool: str = "mean", chat: bool = False
) -> PairActivations:
    """The activations an estimator works on."""
    prompts = [*pairs.positives, *pairs.negatives]
    options = {"chat": True} if chat else {}
    acts = engine.capture(prompts, layers=layers, site=site, where=read, pool=pool, **options)
    half = len(pairs)
    return PairActivations(
        {layer: acts[layer][:half] for layer in acts.layers}, {layer: acts[layer][half:] for layer in acts.layers}
    )


def library_versions() -> dict[str, str]:
    """Versions of the libraries that numbers depend on."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _vector(engine: Engine, point: HookPoint, values: Tensor, card: VectorCard) -> SteeringVector:
    median = engine.median_norm(point.layer, point.site)
    return SteeringVector(values, point, replace(card, extracted_at=point.name, median_norm=median))
