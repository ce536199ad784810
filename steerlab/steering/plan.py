"""Plans: immutable lists of edits, identified by their content."""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from steerlab.core._hashing import content_hash
from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Number, as_number, shown
from steerlab.core._warning import warn
from steerlab.core.engine import Engine, ModelInfo
from steerlab.core.errors import PlanError
from steerlab.display import Facts, Piece, Shown, Table
from steerlab.steering._finite_range import check_finite_range
from steerlab.steering.conflicts import check_conflicts
from steerlab.steering.operators import operator_from_json
from steerlab.steering.operators._base import Operator
from steerlab.steering.operators._edit import Edit
from steerlab.steering.packing import pack, unpack
from steerlab.steering.positions import condition as conditions
from steerlab.steering.positions import schedule as schedules
from steerlab.steering.positions import where as positions
from steerlab.steering.positions._by_tokens import check_vocabulary, spell
from steerlab.steering.positions.condition import Condition
from steerlab.steering.vectors import SteeringVector, VectorCard, check_width


@runtime_checkable
class HookedEngine(Engine, Protocol):
    """An engine whose model runs in this process and takes hooks."""

    def hooks_of(self, plan: "Plan") -> "HookPairs":
        """The plan, its doses resolved, as (hook name, function) pairs."""
        ...


HookPairs = list[tuple[str, Callable[..., Any]]]

_APPLYING = "steerlab.exploring.applied"  # by name: it is made of plans and of whole models, and lies above both


class Plan(Shown):
    """What is done to the stream: edits in order, immutable and hashable by content.

    Edits at one hook point apply in the plan's order, each seeing the result of the one before. Two plans are equal if
    their hashes are: vector values, operators, strengths, positions and order, but not the names of vectors.

    Args:
        edits: made by `add`, `ablate`, `clamp`, `set`, `rotate`, `loreft` or `feature`.

    Raises:
        PlanError: if an argument is not an edit, or two edits contradict each other; see `steerlab.steering.conflicts`.

    Examples:
        >>> v = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
        >>> from steerlab.steering.operators import add
        >>> print(Plan(add(v, coef=2.0)))
        add(coef=2) at blocks.1.hook_resid_post, last_prompt() | generated()
    """

    __slots__ = ("_hash", "edits")
    edits: tuple[Edit, ...]

    def __init__(self, *edits: Edit) -> None:
        for edit in edits:
            if not isinstance(edit, Edit):
                separately = "; pass them one by one, sl.Plan(*edits)" if isinstance(edit, list | tuple) else ""
                raise PlanError(
                    f"A plan is made of edits such as sl.add(v, dose=0.2), got {type(edit).__name__}{separately}."
                )
            edit.vector.unit  # noqa: B018  a zero vector is refused here
        check_conflicts(edits)
        object.__setattr__(self, "edits", tuple(edits))
        object.__setattr__(self, "_hash", content_hash([edit.content() for edit in edits]))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A plan is immutable; make another one instead of setting {name!r}.")

    @property
    def hash(self) -> str:
        """Content hash: 16 hexadecimal digits."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self._hash)

    def __len__(self) -> int:
        return len(self.edits)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self.edits)

    def __add__(self, other: "Plan") -> "Plan":
        if not isinstance(other, Plan):
            raise PlanError(f"A plan adds to a plan, got {type(other).__name__}; wrap edits in Plan(...).")
        return Plan(*self.edits, *other.edits)

    def __str__(self) -> str:
        return "\n".join(map(str, self.edits)) or "(no edits)"

    def describe(self) -> str:
        """The edits in words, one a line: operator and strength, names of vectors, hook point, positions.

        Examples:
            >>> v = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1, name="joy")
            >>> from steerlab.steering.operators import add
            >>> print(Plan(add(v, coef=2.0)).describe())
            add(coef=2) along 'joy' at blocks.1.hook_resid_post, last_prompt() | generated()
        """
        return str(self)

    def _finding(self) -> str:
        return f"{self.hash}: {'; '.join(map(str, self.edits)) or 'no edits'}"

    def _pieces(self) -> Sequence[Piece]:
        if not self.edits:
            return []
        columns = ["", "operator", "strength", "vector", "hook point", "positions", "more"]
        rows = [
            (
                k,
                type(edit.operator).__name__.lower(),
                edit.operator.told(edit.scale),
                edit.vector.name or "",
                edit.hook_point.name,
                str(edit.where),
                "; ".join(filter(None, [str(edit.schedule or ""), str(edit.when or ""), edit.norm or ""])),
            )
            for k, edit in enumerate(self.edits, start=1)
        ]
        used = [k for k in range(len(columns)) if k != 6 or any(row[k] for row in rows)]
        table = Table([columns[k] for k in used], [[row[k] for k in used] for row in rows])
        return [table, Facts([("hash", self.hash)])]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Plan, self.edits)

    @property
    def vector_names(self) -> tuple[tuple[str | None, ...], ...]:
        """Per edit the names of its vectors; plans that differ in nothing else are equal."""
        return tuple(tuple(vector.name for vector in edit.vectors) for edit in self.edits)

    @property
    def hook_points(self) -> list[HookPoint]:
        """Every hook point it touches, in order of first use."""
        return list(dict.fromkeys(edit.hook_point for edit in self.edits))

    @property
    def conditions(self) -> list[Condition]:
        """Every condition its edits have, each once."""
        return list(dict.fromkeys(leaf for edit in self.edits if edit.when is not None for leaf in edit.when.leaves))

    @property
    def sets(self) -> list[positions.Where]:
        """Every set of positions its edits and conditions name."""
        return [edit.where for edit in self.edits] + [condition.read for condition in self.conditions]

    def scaled(self, factor: Number) -> "Plan":
        """The plan h → h + factor·Δ(h); a factor of 0 is the unsteered model.

        Raises:
            PlanError: if the factor is not a finite number.
        """
        number = as_number(factor)
        if number is None:
            raise PlanError(f"A plan is scaled by a finite number, got {shown(factor)}.")
        return Plan(*(edit.scaled(number) for edit in self.edits))

    def with_vectors(self, change: Callable[[SteeringVector], SteeringVector]) -> "Plan":
        """The same edits along other vectors, e.g. a control's."""
        return Plan(*(edit.with_vector(change(edit.vector)) for edit in self.edits))

    def resolved(self, median_norm: Callable[[int, str], float], weights_hash: str | None = None) -> "Plan":
        """The plan with every dose tied to a median norm; edits that have one keep it.

        Args:
            median_norm: from layer and site to the stream's median norm, e.g. an engine's `median_norm`.
            weights_hash: of the model it will run on; a norm that came with a vector of other weights, or of weights
                that its card does not state, is measured anew.

        Raises:
            PlanError: for something that cannot be called so.
        """
        if not callable(median_norm):
            raise PlanError(f"resolved takes engine.median_norm, got {type(median_norm).__name__}.")

        def open_dose(edit: Edit) -> bool:
            card = edit.vector.card
            from_card = card.weights_hash is None and edit.median_norm == card.median_norm  # of a model not stated
            elsewhere = weights_hash is not None and (from_card or card.weights_hash not in (None, weights_hash))
            return edit.needs_median_norm and (edit.median_norm is None or elsewhere)

        if not any(map(open_dose, self.edits)):
            return self
        return Plan(
            *(
                edit.with_median_norm(median_norm(edit.hook_point.layer, edit.hook_point.site))
                if open_dose(edit)
                else edit
                for edit in self.edits
            )
        )

    def check(self, info: ModelInfo) -> "Plan":
        """The plan itself, if it fits a model; warns where a vector comes from elsewhere.

        Raises:
            HookPointError: for a layer that the model lacks.
            VectorMismatchError: for a vector of another width.
        """
        for edit in self.edits:
            probes = () if edit.when is None else tuple(leaf.probe for leaf in edit.when.leaves)
            for vector in (edit.vector, *probes):
                vector.hook_point.check(info.n_layers)
                check_width(vector, info)
                _warn_of_origin(vector, info)
            for name, other in edit.operator.others.items():
                _warn_of_origin(other, info, f"the {name} of {edit.operator}", edit.hook_point)
        for where in self.sets:
            check_vocabulary(where, info.d_vocab, info.name)
        return self

    def spelled(self, tokenizer: Any) -> "Plan":
        """The plan with the texts of events, in `between` and `after`, as the token ids that spell them.

        Args:
            tokenizer: the model's own.

        Raises:
            PlanError: for a text that cannot be written in this model's tokens, or without a tokenizer for it.
        """
        if all(spell(where, tokenizer) is where for where in self.sets):
            return self
        return Plan(*(edit.spelled(tokenizer) for edit in self.edits))

    def ready(self, info: ModelInfo, median_norm: Callable[[int, str], float], tokenizer: Any = None) -> "Plan":
        """The plan as it will run on a model: checked, its doses resolved, and nothing in it beyond the finite range.

        Args:
            info: the model.
            median_norm: of its stream, by layer and site.
            tokenizer: its own, for events that are named by their text.

        Raises:
            HookPointError, VectorMismatchError: as `check`.
            PlanError: for strengths that leave the finite range of the model's dtype.
        """
        resolved = self.spelled(tokenizer).check(info).resolved(median_norm, info.weights_hash)
        check_finite_range(resolved.edits, info)
        return resolved

    def hooks(self, engine: object) -> HookPairs:
        """The plan as (hook name, function) pairs, for `run_with_cache` and the like.

        The functions take each call as whole prompts of full length, without padding or cache: position t of the
        activation is absolute position t, the prompt ends with it, and nothing counts as generated.

        Args:
            engine: the engine whose model the hooks will run on.

        Raises:
            PlanError: for an engine without such hooks (vLLM's model runs in other processes), a model in place of its
                engine, or a condition that is read at another hook point than its edit: one hook does not see it.
        """
        if isinstance(engine, torch.nn.Module):
            raise PlanError(f"hooks takes the engine, not its model: plan.hooks(engine); got {type(engine).__name__}.")
        if not isinstance(engine, HookedEngine):
            raise PlanError(
                f"hooks are functions for the model of sl.load(…), and {type(engine).__name__} has no such model; pass "
                "the plan itself: engine.generate(prompts, plan=plan), and score and capture alike."
            )
        return engine.hooks_of(self.ready(engine.info, engine.median_norm, getattr(engine, "tokenizer", None)))

    def applied(self, model: Any, tokenizer: Any = None) -> AbstractContextManager[Any]:
        """Applies the plan to a model of one's own for as long as a `with` block runs.

        Every call of the model inside is steered: a forward pass, `model.generate`, a pipeline around it. A call
        without a filled cache starts with a prompt, and what follows counts as generated. The model is as it was
        afterwards, also after an error. Other threads that want the model wait.

        Args:
            model: a Hugging Face causal language model, whose layers are edited at `resid_pre` and `resid_post`; or a
                TransformerBridge, at every site.
            tokenizer: the model's tokenizer, for a dose whose unit is not known; by default the one the model came
                with.

        Returns:
            A context manager; `as applied` gives `applied.receipts`, one per row that ran.

        Raises:
            PlanError: for something else than such a model, or positions that look at the prompt's text.
            HookPointError, VectorMismatchError: for a plan that does not fit the model.

        Examples:
            >>> with plan.applied(model):  # doctest: +SKIP
            ...     model.generate(**tokenizer("The film was", return_tensors="pt"))
        """
        return importlib.import_module(_APPLYING).applied(self, model, tokenizer)

    def to_json(self) -> str:
        """Everything needed to rebuild the plan, vectors included, as JSON text."""
        return json.dumps({"format": 1, "edits": [_edit_json(edit) for edit in self.edits]}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            PlanError: if the text is not such a plan.
        """
        try:
            data = json.loads(text)
            if data["format"] != 1:
                raise PlanError(f"The plan has format {data['format']!r}; this version reads format 1.")
            return cls(*(_edit_from_json(edit) for edit in data["edits"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"Not a plan written by Plan.to_json: {error}.") from error


def _warn_of_origin(
    vector: SteeringVector, info: ModelInfo, role: str | None = None, used_at: HookPoint | None = None
) -> None:
    """Warns of a vector from another place or model; `used_at` is the edit's hook point for its further vectors."""
    card, point = vector.card, used_at or vector.hook_point
    origin = card.extracted_at or vector.hook_point.name
    found = []
    if origin != point.name:
        found.append(f"it was extracted at {origin} and is applied at {point.name}")
    if card.weights_hash is not None and card.weights_hash != info.weights_hash:
        found.append(f"it was made on {card.model} (weights {card.weights_hash}), not on {info.name}")
    elif card.weights_hash is None and card.model is not None and card.model != info.name:
        found.append(f"it was made on {card.model}, not {info.name}")
    if card.weight_processing is not None and card.weight_processing != info.weight_processing:
        found.append(f"its model had weight processing {card.weight_processing!r}, this one {info.weight_processing!r}")
    if found:
        about = repr(vector) if role is None else f"{role}, {vector!r}"
        warn(f"About {about}: {'; '.join(found)}.")


def vector_json(vector: SteeringVector) -> dict[str, Any]:
    """A vector with its card as JSON."""
    return {"values": pack(vector.values), **_origin_json(vector)}


def _origin_json(vector: SteeringVector) -> dict[str, Any]:
    return {"hook_point": vector.hook_point.name, "card": vector.card.to_json()}


def vector_from_json(stored: dict[str, Any]) -> SteeringVector:
    """The vector that `vector_json` described."""
    point = HookPoint.parse(stored["hook_point"])
    return SteeringVector(unpack(stored["values"]), point, VectorCard.from_json(stored["card"]))


def _edit_json(edit: Edit) -> dict[str, Any]:
    options = {
        "norm": edit.norm,
        "schedule": None if edit.schedule is None else edit.schedule.to_json(),
        "when": None if edit.when is None else edit.when.to_json(),
        "others": {role: _origin_json(vector) for role, vector in edit.operator.others.items()} or None,
    }
    return {
        "operator": edit.operator.to_json(),
        "where": edit.where.to_json(),
        "scale": edit.scale,
        "median_norm": edit.median_norm,
        "vector": vector_json(edit.vector),
    } | {name: value for name, value in options.items() if value is not None}


def _edit_from_json(data: dict[str, Any]) -> Edit:
    vector = vector_from_json(data["vector"])
    schedule, when = data.get("schedule"), data.get("when")
    return Edit(
        _with_origins(operator_from_json(data["operator"], vector.hook_point), data.get("others", {})),
        vector,
        positions.from_json(data["where"]),
        scale=data["scale"],
        median_norm=data["median_norm"],
        norm=data.get("norm"),
        schedule=None if schedule is None else schedules.from_json(schedule),
        when=None if when is None else conditions.from_json(when),
    )


def _with_origins(operator: Operator, origins: dict[str, Any]) -> Operator:
    """The operator with names, cards and hook points of its further vectors, which its own description leaves out."""
    known = {entry.name for entry in fields(operator)} if is_dataclass(operator) else set()
    told = {
        role: SteeringVector(
            vector.values, HookPoint.parse(origins[role]["hook_point"]), VectorCard.from_json(origins[role]["card"])
        )
        for role, vector in operator.others.items()
        if role in known and role in origins
    }
    return replace(operator, **told) if told else operator  # pyright: ignore[reportArgumentType]  a dataclass
