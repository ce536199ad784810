"""RepControl: RepE's calling habit on the same engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steerlab.core.errors import InputError
from steerlab.core.hook_points import resolve_layer
from steerlab.core.numbers import as_integer, shown
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Generations
from steerlab.core.text import PromptLike
from steerlab.engines.vllm.engine import VLLMEngine
from steerlab.steering import where
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.sets import Where
from steerlab.steering.vectors import SteeringVector

_POLICY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class RepControl:
    """Adds vectors at layers while prompts are continued.

    Args:
        engine: the engine to run on; the layers must be wired there.

    Examples:
        >>> RepControl(engine)(["Once upon"], {14: v}, coefficient=2.0, temperature=0)  # doctest: +SKIP

    Source:
        The calling habit is that of Zou et al. 2023, Representation Engineering (arXiv:2310.01405).
    """

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine

    def __call__(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        activations: Mapping[int, "Tensor | Sequence[float] | SteeringVector"] | None = None,
        coefficient: float = 1.0,
        token_pos: int | str | None = None,
        **sampling: Any,
    ) -> Generations:
        """Continuations of the prompts with coefficient · vector added at each layer's output.

        Args:
            prompts: strings, chat messages or token ids.
            activations: layer → vector; negative layers count from the end. None or empty leaves the model as it is.
            coefficient: multiplies every vector.
            token_pos: None edits all positions, prompt and generated; an int one absolute position (negative from the
                prompt's end); "start" the first position, "end" the prompt's last.
            **sampling: temperature, top_p, top_k, min_p, repetition_penalty, and arguments of `engine.generate`.

        Raises:
            InputError: for another `token_pos`.
            PlanError: for a layer that is not wired.
        """
        policy = SamplingPolicy(**{name: sampling.pop(name) for name in _POLICY if name in sampling})
        plan = self.plan(activations, coefficient, token_pos)
        return self.engine.generate(prompts, plan=plan, policy=policy, **sampling)

    def plan(
        self, activations: Mapping[int, Any] | None, coefficient: float = 1.0, token_pos: int | str | None = None
    ) -> Plan | None:
        """What a call does, as a plan; None without activations."""
        if not activations:
            return None
        positions = _positions(token_pos)
        return Plan(
            *(
                add(self._vector(layer, values), coef=coefficient, where=positions)
                for layer, values in activations.items()
            )
        )

    def _vector(self, layer: int, values: Any) -> SteeringVector:
        place = resolve_layer(layer, self.engine.info.n_layers)
        if isinstance(values, SteeringVector):
            values = values.values
        return SteeringVector.from_tensor(torch.as_tensor(values, dtype=torch.float32), layer=place)


def _positions(token_pos: int | str | None) -> Where:
    if token_pos is None:
        return where.all()
    named = {"start": 0, "end": -1}
    if isinstance(token_pos, str) and token_pos in named:
        return where.index(named[token_pos])
    position = as_integer(token_pos)
    if position is None:
        raise InputError(f"token_pos is None, an integer, 'start' or 'end', got {shown(token_pos)}.")
    return where.index(position)
