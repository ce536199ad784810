"""The step context: what a hook may know about the pass it runs in."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from steerlab.core.errors import InputError
from steerlab.steering.positions._rows import RowPositions


@dataclass(frozen=True)
class Step:
    """One forward pass of a batch. All tensors are on the device where token ids go.

    Attributes:
        tokens: positions and prompt lengths of the pass's tokens.
        index: 0 in the pass over the prompts, then 1, 2, … for each token fed back.
        rows: which of the call's rows these are, shape [batch]; rows that have ended may be dropped from the batch.

    Examples:
        A hook that adds a vector at absolute position 5 only, with or without a cache::

            def hook(value, hook):
                at_five = (current_step().positions == 5)[..., None]
                return torch.where(at_five, value + vector, value)
    """

    tokens: RowPositions
    index: int
    rows: Int[Tensor, " batch"]

    @property
    def positions(self) -> Int[Tensor, "batch pos"]:
        """Absolute position of each token in its row; −1 for padding and in rows that have ended."""
        return self.tokens.positions

    @property
    def prompt_lens(self) -> Int[Tensor, " batch"]:
        """Prompt length of each row."""
        return self.tokens.prompt_lens

    @property
    def prompt_mask(self) -> Bool[Tensor, "batch pos"]:
        return (self.positions >= 0) & (self.positions < self.prompt_lens[:, None])

    @property
    def generated_mask(self) -> Bool[Tensor, "batch pos"]:
        """Tokens fed back after they were generated."""
        return self.positions >= self.prompt_lens[:, None]

    @property
    def live(self) -> Bool[Tensor, " batch"]:
        """Rows that have not ended."""
        return (self.positions >= 0).any(dim=-1)


_current: ContextVar[Step | None] = ContextVar("steerlab_step", default=None)


def current_step() -> Step:
    """The pass that is running; for use inside a hook.

    Raises:
        InputError: outside a pass of a steerlab engine.
    """
    step = current_step_or_none()
    if step is None:
        raise InputError("current_step() is for hooks while a steerlab engine runs; nothing runs now.")
    return step


def current_step_or_none() -> Step | None:
    """The pass that is running, if one is."""
    return _current.get()


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Makes a step the current one while the body runs."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)
