"""Which plans the workers hold, so that vectors travel once and not with every call."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from steerlab.engines.vllm.client.compiled_plan import CompiledPlan

BUDGET = 1 << 29
"""Bytes of vectors that workers keep for later calls, each in its own host memory."""


class HeldPlans:
    """The plans that workers hold, the longest unused first.

    Args:
        budget: bytes of vectors to keep beyond those of the call at hand.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def take(self, plans: Mapping[str, CompiledPlan]) -> tuple[dict[str, CompiledPlan], list[str]]:
        """Notes that a call uses these plans.

        Returns:
            The plans that workers lack, and the names of those that they can drop.
        """
        missing = {name: plan for name, plan in plans.items() if name not in self._sizes}
        for name, plan in plans.items():
            self._sizes[name] = plan.units.nbytes
            self._sizes.move_to_end(name)
        dropped = []
        unused = [name for name in self._sizes if name not in plans]
        while unused and sum(self._sizes.values()) > self._budget:
            dropped.append(unused.pop(0))
            del self._sizes[dropped[-1]]
        return missing, dropped

    def lose(self, names: Iterable[str]) -> None:
        """Notes that these plans did not arrive."""
        for name in names:
            self._sizes.pop(name, None)
