"""Inputs of a run, stored by content: the plans and the data that its cells name by hash, and the code behind them."""

import json
from collections.abc import Sequence
from typing import Any

from steerlab.core._hashing import content_hash
from steerlab.core._text import PromptLike
from steerlab.core.errors import RunError, UnknownOperatorError
from steerlab.core.targets import TargetItem, Targets
from steerlab.experiment._store.operator_identity import changed_parts, operator_identity
from steerlab.experiment._store.run_folder import RunFolder, read_bytes
from steerlab.steering.operators._base import Operator
from steerlab.steering.operators.registry import is_shipped
from steerlab.steering.plan import Plan


class Inputs:
    """Plans and data, each stored under its hash; users' own operators, each under the hash of its description.

    Args:
        folder: the run directory; None for memory only.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder = folder
        self._memory: dict[str, str] = {}
        self._plans: dict[str, Plan] = {}

    def add_plan(self, plan: Plan) -> str:
        """Stores a plan, and a description of its operators if they are a user's own; returns its hash.

        Raises:
            RunError: if such an operator was stored with the same description and other code.
        """
        for edit in plan:
            if not is_shipped(edit.operator):
                self._add_operator(edit.operator)
        self._plans[plan.hash] = plan
        return self._add(f"inputs/plans/{plan.hash}.json", plan.hash, plan.to_json)

    def plan(self, plan_hash: str) -> Plan:
        """A plan: the one that was given here, else as it was written.

        Raises:
            RunError: if it is missing, or is not the plan of that hash.
            UnknownOperatorError: if an operator in it is not known here; see `steerlab.register_operator`.
        """
        return self._plans[plan_hash] if plan_hash in self._plans else self.stored_plan(plan_hash)

    def stored_plan(self, plan_hash: str) -> Plan:
        """A plan as it was written; errors as in `plan`."""
        place = f"inputs/plans/{plan_hash}.json"
        found = Plan.from_json(self._read(place))
        if found.hash != plan_hash:
            raise RunError(f"{place} holds another plan ({found.hash}) than its name says.")
        return found

    def add_targets(self, targets: Targets) -> str:
        """Stores targets; returns their hash."""
        return self._add(f"inputs/data/{targets.hash}.json", targets.hash, lambda: _data_json(_target_rows(targets)))

    def targets(self, data_hash: str) -> Targets:
        """Stored targets.

        Raises:
            RunError: if they are missing, or are not those of that hash.
        """
        rows = self.data(data_hash)
        return Targets(tuple(TargetItem(p, tuple(good), tuple(bad), group) for p, good, bad, group in rows))

    def add_data(self, rows: list[Any]) -> str:
        """Stores a JSON-serialisable list, e.g. of texts; returns its hash."""
        data_hash = content_hash(rows)
        return self._add(f"inputs/data/{data_hash}.json", data_hash, lambda: _data_json(rows))

    def data(self, data_hash: str) -> list[Any]:
        """A stored list.

        Raises:
            RunError: if it is missing, or is not the one of that hash.
        """
        place = f"inputs/data/{data_hash}.json"
        rows = json.loads(self._read(place))
        if content_hash(rows) != data_hash:
            raise RunError(f"{place} holds other data ({content_hash(rows)}) than its name says.")
        return rows

    def check(self, place: str) -> None:
        """Checks that a stored input is what its name says.

        Raises:
            RunError: if it is not.
            UnknownOperatorError: for a plan whose operator is not known here.
        """
        folder, name = place.rsplit("/", 1)
        readers = {"inputs/plans": self.stored_plan, "inputs/operators": self._operator}
        try:
            readers.get(folder, self.data)(name.removesuffix(".json"))
        except UnknownOperatorError:
            raise
        except ValueError as error:
            raise RunError(f"{place} is damaged: {error}.") from error

    def stored(self) -> list[str]:
        """Places of everything stored, in order."""
        if self._folder is None:
            return sorted(self._memory)
        return [name for name in self._folder.files() if name.startswith("inputs/")]

    def _add_operator(self, operator: Operator) -> None:
        """Stores what identifies an operator under its description; one stored before must be the same."""
        description, identity = operator.to_json(), operator_identity(operator)
        name = content_hash(description)
        place = f"inputs/operators/{name}.json"
        self._add(place, name, lambda: _data_json({"description": description, **identity}))
        kept = self._operator(name)
        changed = changed_parts(kept, identity)
        if changed:
            raise RunError(
                f"The operator {identity['class']} ({description!r:.120}) is not the one that this run was measured "
                f"with: {', '.join(changed)} changed, and its description did not. Give it another description in "
                "to_json, e.g. with a version, or measure anew with overwrite=True (on the command line --overwrite)."
            )

    def _operator(self, name: str) -> dict[str, Any]:
        place = f"inputs/operators/{name}.json"
        kept = json.loads(self._read(place))
        if not isinstance(kept, dict) or not {"description", "python", "parts"} <= kept.keys():
            raise RunError(f"{place} does not say what an operator is.")
        if content_hash(kept["description"]) != name:
            raise RunError(f"{place} holds another operator ({kept['description']!r:.60}) than its name says.")
        return kept

    def _add(self, place: str, name: str, text: Any) -> str:
        if self._folder is None:
            self._memory.setdefault(place, text())
        elif not (self._folder.path / place).exists():
            self._folder.write(place, text())
        return name

    def _read(self, place: str) -> str:
        if self._folder is None:
            if place not in self._memory:
                raise RunError(f"{place} was not kept.")
            return self._memory[place]
        try:
            return read_bytes(self._folder.path / place).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RunError(f"{place} is damaged: {error}.") from error


def texts_hash(texts: Sequence[PromptLike]) -> str:
    """Content hash of texts or prompts, in order."""
    return content_hash(list(texts))


def _target_rows(targets: Targets) -> list[Any]:
    return [[item.prompt, item.positives, item.negatives, item.group] for item in targets]


def _data_json(rows: Any) -> str:
    return json.dumps(rows, ensure_ascii=False) + "\n"
