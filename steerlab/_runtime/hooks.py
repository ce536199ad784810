"""Forward hooks on a torch model: put on for a call, one thread at a time, and checked for what they return."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from steerlab._runtime.model_state import state_of
from steerlab.core.errors import HookPointError, VectorShapeError

HookFunction = Callable[..., Any]
HookPair = tuple[str, HookFunction]


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """Runs the body while no other thread runs such a body with this model.

    A hook on a model acts on every pass of it, whichever thread makes the pass, so that another's call would be edited
    and read too.
    """
    with state_of(model).lock:
        yield


@contextmanager
def require_fired(hooks: Sequence[tuple[str, HookFunction]]) -> Iterator[list[tuple[str, HookFunction]]]:
    """Gives the same hooks to attach in the body, each of which must fire there.

    Raises:
        HookPointError: after the body, for hook points that never fired.
    """
    fired = [False] * len(hooks)

    def listening(index: int, function: HookFunction) -> HookFunction:
        def hook(value: Any, hook: Any) -> Any:
            fired[index] = True
            return function(value, hook=hook)

        return hook

    yield [(name, listening(index, function)) for index, (name, function) in enumerate(hooks)]
    silent = [name for (name, _), heard in zip(hooks, fired, strict=True) if not heard]
    if silent:
        raise HookPointError(f"These hook points never fired on this model: {', '.join(sorted(set(silent)))}.")


def install_output_hook(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Any:
    """A forward hook that edits a module's output, or its first part if it returns a tuple."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        whole = isinstance(output, Tensor)
        changed = edit(output if whole else output[0])
        if changed is None:
            return None
        return changed if whole else (changed, *output[1:])

    return module.register_forward_hook(hook)


def install_input_hook(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Any:
    """A forward pre-hook that edits a module's first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = edit(args[0] if args else kwargs["hidden_states"])
        if changed is None:
            return None
        return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def same_shape_hook(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook whose result keeps the activation's dtype and device, and must have its shape."""

    def hook(value: Any, hook: Any) -> Any:
        changed = function(value, hook=hook)
        if changed is None or not isinstance(value, Tensor):
            return changed
        if not isinstance(changed, Tensor) or changed.shape != value.shape:
            found = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise VectorShapeError(
                f"The hook at {hook.name} got an activation of shape {tuple(value.shape)} and returned {found}; "
                "return the same shape, or None to leave it as it is."
            )
        return changed.to(device=value.device, dtype=value.dtype)

    return hook
