"""Autocast switched off for the length of a block."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_autocast(*kinds: str) -> Iterator[None]:
    """Runs the body with autocast off, whatever the caller has switched on.

    Args:
        kinds: types of devices, such as "cuda". One that does not know autocast has none to switch off.
    """
    with ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
