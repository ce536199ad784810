"""Parameters moved along a direction, θ + η·v, as a mapping for one call; the live model stays as it is."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steerlab._runtime.sharding import is_distributed, is_sharded
from steerlab.core.errors import InputError
from steerlab.sequences.config import FunctionalPrecision

_PREFIXES = ("module.", "_orig_mod.")


class Overrides:
    """Makes mappings of a model's parameters.

    Args:
        root: the model out of its wrappers; its parameter names are the ones to use.
        precision: whether, and how far, parameters are widened.
    """

    def __init__(self, root: nn.Module, precision: FunctionalPrecision) -> None:
        self.root, self.precision = root, precision
        self._zero: dict[str, Tensor] = {}

    def moved(self, v_named: Mapping[str, Tensor], eta: float | Tensor) -> dict[str, Tensor]:
        """Every parameter by name: θ + η·v where v has that name, θ elsewhere.

        Differentiable in η, v and θ under autograd. Weights that are tied have one name in the result; v may use any.

        Raises:
            InputError: for an unknown name, another shape, or two different directions for one tied weight.
        """
        check_unsharded(self.root)
        directions = self._canonical(v_named)
        moved = {}
        for name, parameter in self.root.named_parameters():
            value = self._widened(parameter)
            if name in directions:
                value = value + eta * directions[name].to(value)
            moved[name] = value
        return moved

    @torch.inference_mode(False)  # a copy made in inference mode could not be filled anew outside it
    @torch.no_grad()
    def at_zero(self) -> dict[str, Tensor]:
        """The parameters as they are now, detached and widened: the mapping of calls without an override.

        Widened copies are kept between calls and filled anew in each, so that they follow an optimiser whatever way it
        writes; parameters that need no widening are shared, not copied.
        """
        fresh = {}
        for name, parameter in self.root.named_parameters():
            own = parameter.detach()
            dtype = self._dtype_of(own)
            if own.dtype == dtype:
                fresh[name] = own
                continue
            kept = self._zero.get(name)
            fits = kept is not None and (kept.shape, kept.dtype, kept.device) == (own.shape, dtype, own.device)
            fresh[name] = kept.copy_(own) if kept is not None and fits else own.to(dtype)
        self._zero = fresh
        return fresh

    @property
    def widens_any(self) -> bool:
        """Whether the precision widens a parameter, so that the model as it is runs otherwise."""
        parameters = self.root.parameters() if self.precision.cast_params else ()
        return any(self._dtype_of(parameter) != parameter.dtype for parameter in parameters)

    def complete(self, override: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A user's mapping, checked and completed by the parameters that it leaves out.

        Raises:
            InputError: for an unknown name or another shape.
        """
        check_unsharded(self.root)
        given = self._canonical(override)
        return {name: given[name] if name in given else self._widened(p) for name, p in self.root.named_parameters()}

    def check_buffers(self, override: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A user's mapping of buffers, checked.

        Raises:
            InputError: for an unknown name or another shape.
        """
        own = dict(self.root.named_buffers())
        checked = {}
        for name, value in override.items():
            plain = _plain(name, own)
            _check_shape(name, value, own.get(plain), own)
            checked[plain] = value
        return checked

    def _canonical(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mapping under the names that `named_parameters` uses, one per tied weight."""
        every = dict(self.root.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in self.root.named_parameters()}
        found: dict[str, Tensor] = {}
        given: dict[str, str] = {}
        for name, value in named.items():
            plain = _plain(name, every)
            _check_shape(name, value, every.get(plain), every)
            canonical = first[id(every[plain])]
            if canonical in found and found[canonical] is not value and not torch.equal(found[canonical], value):
                raise InputError(
                    f"{name!r} and {given[canonical]!r} are one weight, but have two values; pass it under one name."
                )
            found[canonical], given[canonical] = value, name
        return found

    def _widened(self, parameter: Tensor) -> Tensor:
        return parameter.to(self._dtype_of(parameter))

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        if not self.precision.cast_params or not parameter.dtype.is_floating_point:
            return parameter.dtype
        assert isinstance(self.precision.dtype, torch.dtype)
        return torch.promote_types(parameter.dtype, self.precision.dtype)


def state_override(
    root: nn.Module,
    v_named: Mapping[str, Tensor],
    eta: float | Tensor,
    *,
    param_dtype: torch.dtype | None,
    include_buffers: bool,
    buffer_dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters θ + η·v in a stated dtype, and copies of the buffers if asked; see `SequenceProcessor`."""
    check_unsharded(root)
    moved = Overrides(root, FunctionalPrecision(cast_params=False))._canonical(v_named)
    params: dict[str, Tensor] = {}
    for name, parameter in root.named_parameters():
        value = parameter if param_dtype is None else parameter.to(param_dtype)
        params[name] = value + eta * moved[name].to(value) if name in moved else value
    buffers = {
        name: buffer.detach()
        .clone()
        .to(buffer_dtype if buffer.dtype.is_floating_point and buffer_dtype else buffer.dtype)
        for name, buffer in (root.named_buffers() if include_buffers else ())
    }
    return params, buffers


def check_unsharded(root: nn.Module) -> None:
    """Nothing, if a model can run as a function of its parameters.

    Raises:
        InputError: if `fully_shard` wraps it: other tensors in the place of its shards would leave it unusable.
    """
    if is_sharded(root):
        raise InputError(
            "A model sharded by fully_shard runs with its own parameters only, inside its own forward; for "
            "params_override, build_state_override and functional_logits make a processor on an unsharded copy."
        )


def _plain(name: str, known: Mapping[str, Any]) -> str:
    """A name without the prefix of a wrapper."""
    for prefix in _PREFIXES:
        if name not in known and name.startswith(prefix):
            name = name.removeprefix(prefix)
    return name


def _check_shape(name: str, value: Any, own: Tensor | None, known: Mapping[str, Any]) -> None:
    if own is None:
        import difflib

        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"The model has no parameter {name!r}.{hint}")
    if not isinstance(value, Tensor) or value.shape != own.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name!r} has shape {tuple(own.shape)} in the model, got {found}.")
    if is_distributed(own) and not is_distributed(value):
        raise InputError(
            f"{name!r} is a DTensor, spread over processes, and what was given for it is not. Spread that alike: "
            "torch.distributed.tensor.distribute_tensor(value, weight.device_mesh, weight.placements)."
        )
