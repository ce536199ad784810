"""Whether the unhooked model is the bridge's equal on this very model: a short comparison, made once.

A family's name says little: versions of the libraries and options of a configuration change what runs. So a dozen
tokens go through both, read at every hook point that both have; then again with something added at each of them, since
a hook may be called and its answer ignored.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steerlab._runtime.backend import Backend
from steerlab._runtime.self_comparison import is_out_of_memory, rounding_of
from steerlab.core.errors import HookPointError

N_TOKENS = 12
_SHARE = 1 / 4
"""Of what rounding may do: both run one kind of attention, and of 26 families in half precision none comes to more."""

_STEP = 0.5
"""Of an activation's root mean square: what is added to it."""


def first_difference(bridge: Backend, fast: Backend, quick: Backend, names: Sequence[str], ids: Tensor) -> str | None:
    """What is different, in words; None if nothing is.

    Args:
        bridge: the model with its wrappers.
        fast: the model without them, with the bridge's kind of attention.
        quick: the same with the attention that generates.
        names: hook points that both have.
        ids: token ids [1, tokens].

    Raises:
        torch.OutOfMemoryError: if memory does not suffice, which says nothing of the model.
    """
    rounding = rounding_of(fast.model)
    try:
        for is_moved in (False, True):
            wanted, found = (_pass(backend, names, ids, is_moved=is_moved) for backend in (bridge, fast))
            different = [
                name
                for name in (*names, "logits")
                if name not in found or name not in wanted or rounding.excess(found[name], wanted[name]) > _SHARE
            ]
            if different:
                return f"the {'edited' if is_moved else 'unedited'} {different[0]}"
        plain, quickly = (_pass(backend, (), ids, is_moved=False)["logits"] for backend in (fast, quick))
    except HookPointError as error:
        return str(error).rstrip(".")
    except Exception as error:  # foreign code, which may fail in any way; the bridge then runs, and what is wrong shows
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"
    return None if rounding.explains(quickly, plain) else "the logits under the attention kernel that generates"


@torch.no_grad()
def _pass(backend: Backend, names: Sequence[str], ids: Tensor, *, is_moved: bool) -> dict[str, Tensor]:
    """What hook points hold, and the logits."""
    seen: dict[str, Tensor] = {}
    places = {name: place for place, name in enumerate(names)}

    def read(value: Any, hook: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        seen[hook.name] = value.detach().clone()
        return value + _step(value, places[hook.name]) if is_moved else None

    with backend.attached([(name, read) for name in names]):
        # with a cache, as calls do: without, TransformerLens multiplies float32 by half precision in some families
        seen["logits"] = backend.model(input_ids=ids, use_cache=True).logits.detach()
    return seen


def _step(value: Tensor, place: int) -> Tensor:
    direction = torch.randn(value.shape[-1], generator=torch.Generator("cpu").manual_seed(place), device="cpu")
    return (_STEP * value.float().square().mean().sqrt() * direction.to(value.device)).to(value.dtype)
