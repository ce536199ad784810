"""From a `steering` field to a plan that is ready to run: every check that needs no prompt."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError, PlanError, SteerlabError
from steerlab.engines.vllm._client.ready_plans import Planner, ReadyPlan
from steerlab.engines.vllm._server.positions_json import where_of
from steerlab.engines.vllm._server.registry import VectorRegistry
from steerlab.engines.vllm._server.request_json import EditJson, parse_steering
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.steering import operators
from steerlab.steering.operators._edit import Edit
from steerlab.steering.plan import Plan

REMEMBERED = 256
"""Distinct `steering` fields whose plans are kept ready."""


class PlanMaker:
    """Makes plans of `steering` fields.

    Args:
        registry: the vectors.
        config: what is wired.
        info: the model.
        tokenizer: its own, for events that are named by their text.
    """

    def __init__(
        self, registry: VectorRegistry, config: SteeringConfig, info: ModelInfo, tokenizer: Any = None
    ) -> None:
        self.registry, self.config, self.info, self.tokenizer = registry, config, info, tokenizer
        self._of_text = lru_cache(maxsize=REMEMBERED)(self._make)

    def make(self, steering: Any) -> ReadyPlan:
        """The plan of a `steering` field.

        Raises:
            SteerlabError: one sentence about what is wrong with it, naming the key.
        """
        return self._of_text(json.dumps(steering))

    def plan(self, steering: Any) -> Plan:
        """The plan of a `steering` field, for a call that has its doses resolved itself.

        Raises:
            SteerlabError: one sentence about what is wrong with it, naming the key.
        """
        edits = []
        for index, given in enumerate(parse_steering(steering).edits):
            with _blame(f"steering.edits[{index}]"):
                edits.append(self._edit(given))
        with _blame("steering"):
            return Plan(*edits)

    def ready(self, plan: Plan) -> ReadyPlan:
        """A plan, checked against the model and what is wired, its doses resolved.

        Raises:
            SteerlabError: if it cannot run here.
        """
        (made,) = self.planner().plans(plan, 1)
        if isinstance(made, SteerlabError):
            raise made
        if made.compiled is None:
            raise PlanError("A plan without edits steers nothing.")
        return made

    def planner(self) -> Planner:
        """For a request's positions."""
        return Planner(self.config, self.info, _unknown_norm, tokenizer=self.tokenizer)

    def _make(self, text: str) -> ReadyPlan:
        edits = []
        for index, given in enumerate(parse_steering(json.loads(text)).edits):
            with _blame(f"steering.edits[{index}]"):
                edit = self._edit(given)
                self.ready(Plan(edit))
                edits.append(edit)
        with _blame("steering"):
            return self.ready(Plan(*edits))

    def _edit(self, given: EditJson) -> Edit:
        vector = self.registry.find(given.vector, given.layer)
        where = where_of(given.where, self.info)
        if given.operator == "ablate":
            edit = operators.ablate(vector, where=where)
        elif given.operator == "clamp":
            edit = operators.clamp(vector, given.lo, given.hi, unit=given.unit, where=where)
        elif given.operator == "set":
            edit = operators.set(vector, dose=given.dose, coef=given.coef, where=where)
        else:
            edit = operators.add(vector, dose=given.dose, coef=given.coef, where=where)
        return edit.scaled(given.scale)


@contextmanager
def _blame(key: str) -> Iterator[None]:
    """Puts a key before the message of an error raised inside."""
    try:
        yield
    except SteerlabError as error:
        raise InputError(f"{key}: {error}") from error


def _unknown_norm(layer: int, site: str) -> float:
    """A server measures no text of its own, so only a vector's card can say what a dose is."""
    raise PlanError(
        f"A dose at blocks.{layer}.hook_{site} is measured in median norms of the stream there, and the vector's card "
        "states none that was measured on this model's weights; send coef instead of dose, or have the vector "
        "extracted on this model."
    )
