"""Controls: plans that differ from the real one in just what it claims."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from steerlab.core._arguments import explains_fields
from steerlab.core._numbers import check_flag, check_integer
from steerlab.core._warning import warn
from steerlab.core.contrast_pairs import ContrastPairs, balanced_flips
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError
from steerlab.measures.intervals import rank_floor
from steerlab.steering.extraction.estimators import ESTIMATORS, estimator
from steerlab.steering.extraction.extract import PairActivations, read_pairs
from steerlab.steering.extraction.responses import Responses
from steerlab.steering.operators import Edit, Loreft
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where as positions
from steerlab.steering.vectors import SteeringVector

RANK_LEVEL = 0.05


@explains_fields
@dataclass(frozen=True)
class Controls:
    """Which control arms an effect is measured against.

    Attributes:
        random: draws of isotropic random directions with the vector's norm.
        shuffled: draws of the vector extracted again after flipping exactly half the pairs in each group, with the
            vector's norm.
        wrong_layer: also show the same vector at another layer, half as deep (for the first layers, half the model's
            depth further); shown, not ranked.

    With n draws no rank can be below 1 / (1 + n), so a family needs 19 draws before a verdict of `effect` is possible.

    Raises:
        InputError: for a count that is no integer ≥ 0.
    """

    random: int = 20
    shuffled: int = 0
    wrong_layer: bool = False

    def __post_init__(self) -> None:
        for name in ("random", "shuffled"):
            count = check_integer(getattr(self, name), f"Controls({name}=…)", least=0)
            object.__setattr__(self, name, count)
            if 0 < count and rank_floor(count) > RANK_LEVEL:
                warn(
                    f"{count} {name} draws cannot rank below {rank_floor(count):.3f}, so the verdict cannot be "
                    f"'effect'; use at least 19."
                )
        object.__setattr__(self, "wrong_layer", check_flag(self.wrong_layer, "Controls(wrong_layer=…)"))


@dataclass(frozen=True)
class Arm:
    """One plan under test.

    Attributes:
        family: `vector` (the real one), `random`, `shuffled` or `wrong_layer`.
        draw: number within the family.
        plan: what is run, scaled by each dose.
    """

    family: str
    draw: int
    plan: Plan


def control_arms(
    engine: Engine, plan: Plan, controls: Controls, *, pairs: ContrastPairs | None, seed: int
) -> list[Arm]:
    """The control arms of a plan, doses resolved as in the plan.

    Raises:
        DataError: for shuffled controls without the pairs, or with vectors that no known method made.
    """
    check_pairs(controls, pairs)
    arms = [Arm("random", k, random_plan(plan, _rng(seed, 1, k))) for k in range(controls.random)]
    if controls.shuffled and pairs is not None:
        relabelled = LabelFlips(engine, plan, pairs)
        arms += [Arm("shuffled", k, relabelled.plan(_rng(seed, 2, k))) for k in range(controls.shuffled)]
    if controls.wrong_layer:
        arms.append(Arm("wrong_layer", 0, moved_plan(engine, plan)))
    return arms


def check_pairs(controls: Controls, pairs: ContrastPairs | None) -> None:
    """Checks that the pairs that the controls need are there.

    Raises:
        DataError: if they are not.
    """
    if controls.shuffled and pairs is None:
        raise DataError("Shuffled controls extract the vector again; pass pairs= (the training pairs).")


def labels_made(plan: Plan) -> bool:
    """Whether the labels of pairs made a direction of the plan, so that label flips are a null for it."""
    return any(edit.vector.card.method in ESTIMATORS for edit in plan)


def random_plan(plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan along isotropic random directions of the same norms; low-rank edits are turned at random as a whole."""
    return Plan(*(_random_edit(edit, rng) for edit in plan))


def _random_edit(edit: Edit, rng: np.random.Generator) -> Edit:
    vector = edit.vector
    values = torch.from_numpy(rng.standard_normal(vector.d_model)).float()
    drawn = vector.with_values(values / values.norm() * vector.norm, method="random_direction")
    made = edit.with_vector(drawn)
    if isinstance(made.operator, Loreft):
        return replace(made, operator=Loreft(made.operator.low_rank.turned(rng)))
    return made


def moved_plan(engine: Engine, plan: Plan) -> Plan:
    """The same vectors at another layer, doses measured there.

    Half as deep; for the first layers, half the model's depth further. Never the last layer, where an addition acts on
    the logits directly.
    """
    n_layers = engine.info.n_layers
    moved = plan.with_vectors(lambda vector: vector.at(_wrong_layer(vector.layer, n_layers)))
    return moved.resolved(engine.median_norm, engine.info.weights_hash)


def _wrong_layer(layer: int, n_layers: int) -> int:
    """A layer that is neither this one nor, if there is a choice, the last."""
    if n_layers < 2:
        raise InputError("The model has one layer; there is no wrong one to compare with.")
    if layer >= 2:
        return layer // 2
    further = min(layer + max(1, n_layers // 2), max(n_layers - 2, 1))
    return further if further != layer else (layer + 1) % n_layers


class LabelFlips:
    """Vectors extracted again after balanced label flips; activations are read once.

    Args:
        engine: the engine to read activations with.
        plan: the real plan; each vector's card says how it was made.
        pairs: the pairs it was made from.
    """

    def __init__(self, engine: Engine, plan: Plan, pairs: ContrastPairs) -> None:
        if len(pairs) < 2:
            raise DataError("Label flips need at least two pairs; with one the flipped vector is the vector itself.")
        self._plan, self._pairs = plan, pairs
        self._acts = {edit.vector.hash: _activations(engine, edit.vector, pairs) for edit in plan}

    def plan(self, rng: np.random.Generator) -> Plan:
        """The plan with every vector extracted after one draw of flips."""
        flips = balanced_flips(self._pairs.groups, rng)
        return self._plan.with_vectors(lambda vector: self._relabelled(vector, flips))

    def _relabelled(self, vector: SteeringVector, flips: Sequence[bool]) -> SteeringVector:
        acts = self._acts[vector.hash]
        flip = torch.tensor(flips)[:, None]
        positive, negative = acts.positive[vector.layer], acts.negative[vector.layer]
        estimate = estimator(str(vector.card.method))
        values = estimate(torch.where(flip, negative, positive), torch.where(flip, positive, negative))
        if values.norm() == 0:
            raise DataError("Label flips cancel to a zero vector, so they are no null; the pairs are all alike.")
        return vector.with_values(
            values / values.norm() * vector.norm, method=f"{vector.card.method} of flipped labels"
        )


def _activations(engine: Engine, vector: SteeringVector, pairs: ContrastPairs) -> PairActivations:
    card = vector.card
    if card.method not in ESTIMATORS or card.read is None:
        raise DataError(
            f"Label flips are a null for {', '.join(ESTIMATORS)}, whose direction the labels make; {vector!r} was made "
            f"by {card.method!r}. Use Controls(shuffled=0) for it."
        )
    if card.data_hash != pairs.hash:
        warn(f"The pairs given are not those {vector!r} was extracted from.")
    return read_pairs(
        engine,
        pairs,
        site=vector.site,
        layers=[vector.layer],
        read=positions.from_json(dict(card.read)),
        pool=card.pool or "mean",
        chat=card.chat,
        responses=None if card.responses is None else Responses.from_json(card.responses),
    )


def _rng(seed: int, family: int, draw: int) -> np.random.Generator:
    return np.random.default_rng([seed, family, draw])
