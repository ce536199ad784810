"""The directions that AxBench compares, each as long as its largest activation in texts that show the concept."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._hook_points import HookPoint
from steerlab.core.engine import Engine
from steerlab.core.errors import VectorValueError
from steerlab.experiment._store.run import Run
from steerlab.protocols.axbench_data import Concept
from steerlab.steering.extraction._making import made_vector
from steerlab.steering.extraction.extract import extract
from steerlab.steering.positions.where import all as every_token
from steerlab.steering.positions.where import index
from steerlab.steering.vectors import SteeringVector, VectorSet

WHERE: Final = every_token() & ~index(0)
"""Positions read and steered: every token but the first, whose norm is often hundreds of times larger."""
Rows = Float[Tensor, "tokens d_model"]


def mean_difference(positive: Rows, negative: Rows, seed: int) -> Float[Tensor, " d_model"]:
    """Mean over all tokens of positive texts minus mean over all tokens of negative ones."""
    return positive.mean(dim=0) - negative.mean(dim=0)


def first_component(positive: Rows, negative: Rows, seed: int) -> Float[Tensor, " d_model"]:
    """The first principal component of the tokens of positive texts, in the sign of the mean difference."""
    centred = positive - positive.mean(dim=0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    top = axes[:, -1]
    return top if float(top @ mean_difference(positive, negative, seed)) >= 0 else -top


def random_direction(positive: Rows, negative: Rows, seed: int) -> Float[Tensor, " d_model"]:
    """A direction drawn from an isotropic normal distribution."""
    return torch.randn(positive.shape[1], generator=torch.Generator().manual_seed(seed), dtype=positive.dtype)


READ: Final[Mapping[str, Callable[[Tensor, Tensor, int], Tensor]]] = {
    "diff_mean": mean_difference,
    "pca": first_component,
    "random": random_direction,
}
"""Methods that read activations."""


def concept_vector(
    run: Run,
    concept: Concept,
    method: str,
    layer: int,
    *,
    trainer: Engine | None,
    training: Mapping[str, Any],
) -> SteeringVector:
    """A method's vector for a concept: read back from the run if it has it.

    Args:
        run: the run.
        concept: its texts.
        method: a name in `READ`, or `reft_r1`.
        layer: the layer, at `resid_post`.
        trainer: the engine that ReFT-r1 is trained on; the run's own if None.
        training: options of `extract(method="reft_r1")`.
    """
    options = {name: training[name] for name in sorted(training)} if method == "reft_r1" else {}
    what = ["axbench", concept.hash, method, layer, options]
    found = run.find("vectors", what)
    if found is not None:
        return found[layer]
    if method in READ:
        return run.keep("vectors", what, VectorSet((_read(run, concept, method, layer),)))[layer]
    engine = run.session.engine if trainer is None else trainer
    given = {"where": WHERE, **options}
    found = extract(engine, concept.records(), method, layers=layer, name=concept.name, seed=run.session.seed, **given)
    return run.keep("vectors", what, found)[layer]


def _read(run: Run, concept: Concept, method: str, layer: int) -> SteeringVector:
    engine = run.session.engine
    positive, negative = (_tokens(engine, side, layer) for side in (concept.positives, concept.negatives))
    direction = READ[method](positive, negative, _seed_of(run, concept))
    unit = direction / direction.norm()
    largest = float((positive @ unit).max())
    if not largest > 0:
        raise VectorValueError(
            f"{method}: no token of the texts that show {concept.name!r:.60} has a positive activation, so there is no "
            "largest one to scale by."
        )
    return made_vector(
        engine,
        HookPoint(layer, "resid_post"),
        (unit * largest).float(),
        name=concept.name,
        method=f"axbench {method}",
        read=WHERE.to_json(),
        data_hash=concept.hash,
        notes="as long as its largest activation in texts that show the concept",
    )


def _seed_of(run: Run, concept: Concept) -> int:
    """A seed of its own for every concept, so that random directions differ between concepts."""
    return int(np.random.default_rng([run.session.seed, *concept.hash.encode()]).integers(2**31))


def _tokens(engine: Engine, pairs: Sequence[tuple[str, str]], layer: int) -> Rows:
    """Activations of every token but the first of instruction and response, float64."""
    texts = [f"{instruction}\n{response}" for instruction, response in pairs]
    return engine.capture(texts, layers=[layer], where=WHERE)[layer].double()
