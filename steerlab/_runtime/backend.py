"""How the runtime sees a model: something to call, with hook points by name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from steerlab._runtime.hooks import HookPair


class Backend(ABC):
    """A callable model with hooks."""

    name: str
    model: Any

    @abstractmethod
    def attached(self, hooks: Sequence[HookPair]) -> AbstractContextManager[None]:
        """Runs the body with hooks, in the order given; they are gone afterwards, also after an error.

        Other threads that want the model wait.

        Raises:
            HookPointError: for an unknown hook point, or one that never fired while the body ran.
        """


class HookedModel(Protocol):
    """A causal language model with named hook points, on whichever backend its hooks need."""

    @property
    def causal(self) -> Any:
        """The Hugging Face causal language model: its configuration, embeddings and dtype."""
        ...

    def exact_backend(self, hooks: Sequence[HookPair]) -> Backend:
        """The backend for scores and captures with these hooks."""
        ...
