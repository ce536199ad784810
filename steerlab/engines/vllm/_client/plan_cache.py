"""Which plans the workers hold, so that vectors travel once and not with every call."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from steerlab.engines.vllm._client.compiled_plan import CompiledPlan

BUDGET = 1 << 29
"""Bytes of vectors that workers keep for later calls, each in its own host memory."""


def n_bytes(plan: CompiledPlan) -> int:
    """The memory that a plan's vectors take."""
    return plan.tables.vectors.nbytes


class PlanCache:
    """The plans that workers hold, the longest unused first.

    Args:
        budget: their total size at most, except that plans in use always stay.
        size: what a plan counts for.
    """

    def __init__(self, budget: int = BUDGET, size: Callable[[CompiledPlan], int] = n_bytes) -> None:
        self._budget, self._size = budget, size
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def take(self, plans: Mapping[str, CompiledPlan]) -> tuple[dict[str, CompiledPlan], list[str]]:
        """Notes that a call uses these plans, and no others are in use.

        Returns:
            The plans that workers lack, and the names of those that they can drop.
        """
        missing = self.add(plans)
        return missing, self.drop(plans, self._budget - sum(self._sizes[name] for name in plans))

    def add(self, plans: Mapping[str, CompiledPlan]) -> dict[str, CompiledPlan]:
        """Notes that these plans are used now; returns those that workers lack."""
        missing = {name: plan for name, plan in plans.items() if name not in self._sizes}
        for name, plan in plans.items():
            self._sizes[name] = self._size(plan)
            self._sizes.move_to_end(name)
        return missing

    def drop(self, in_use: Collection[str], room: int) -> list[str]:
        """Forgets plans that are not in use, the longest unused first, until the others of them fit; their names."""
        unused = [name for name in self._sizes if name not in in_use]
        excess = sum(self._sizes[name] for name in unused) - room
        dropped = []
        while unused and excess > 0:
            dropped.append(unused.pop(0))
            excess -= self._sizes.pop(dropped[-1])
        return dropped

    def lose(self, names: Iterable[str]) -> None:
        """Notes that these plans did not arrive."""
        for name in names:
            self._sizes.pop(name, None)
