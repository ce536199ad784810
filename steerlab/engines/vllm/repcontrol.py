"""RepControl: RepE's calling habit on the same engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import resolve_layer
from steerlab.core._numbers import as_integer, shown
from steerlab.core._text import PromptLike
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Generations
from steerlab.engines.vllm.engine import VLLMEngine, check_vllm_engine
from steerlab.steering._row_values import row_of
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where
from steerlab.steering.positions._sets import Where
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
        self.engine = check_vllm_engine(engine, "RepControl")

    @explains_arguments
    def __call__(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        activations: Mapping[int, Any] | None = None,
        coefficient: float = 1.0,
        token_pos: int | str | None = None,
        **sampling: Any,
    ) -> Generations:
        """Continuations of the prompts with coefficient · vector added at each layer's output.

        Args:
            prompts: strings, chat messages or token ids.
            activations: layer → vector (`[d_model]`, `[1, d_model]` or `[1, 1, d_model]`, a tensor, an array or a
                `SteeringVector`); negative layers count from the end. None or empty leaves the model as it is.
            coefficient: multiplies every vector.
            token_pos: None edits all positions, prompt and generated; an int one absolute position (negative from the
                prompt's end); "start" the first position, "end" the prompt's last.
            **sampling: temperature, top_p, top_k, min_p, repetition_penalty, and arguments of `engine.generate`;
                max_tokens is vLLM's name of its max_new_tokens.

        Raises:
            InputError: for another `token_pos`.
            PlanError: for a layer that is not wired.
        """
        if "max_tokens" in sampling and "max_new_tokens" in sampling:
            raise InputError("max_tokens and max_new_tokens are two names of one number; pass one.")
        if "max_tokens" in sampling:
            sampling["max_new_tokens"] = sampling.pop("max_tokens")
        given = {name: sampling.pop(name) for name in _POLICY if name in sampling}
        if given and "policy" in sampling:
            raise InputError(
                f"policy= holds all of {', '.join(_POLICY)}; pass it or them ({', '.join(given)}), not both."
            )
        policy = sampling.pop("policy", None) or SamplingPolicy(**given)
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
        row = row_of(values, squeeze=True)
        return SteeringVector.from_tensor(values if row is None else row, layer=place)


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
