"""Where a layer's parts hand over what the sites inside it are: found out at load, from what one forward pass showed.

With s the stream before a layer, two of its direct parts put out A and M such that s + A + M is the stream after it: A
is attn_out, M is mlp_out, whatever norms a family puts after attention or MLP. The first part after A that takes in
s + A, in one tensor or in two, takes in resid_mid. A second pass, in which something is added at each of these places,
must come out as these sums say; a family in which it does not is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from steerlab.core.errors import HookPointError

Key: TypeAlias = int | str
"""A positional or a named argument."""

_ROUNDINGS = 8
"""Roundings to the model's dtype that a sum may have gone through; a layer has two, and one for each value added."""


@dataclass(frozen=True)
class Place:
    """Where a part of a layer holds what belongs to a site.

    Attributes:
        part: the name of the layer's direct child.
        takes: the arguments of it whose sum it is; none if it is what the child puts out.
    """

    part: str
    takes: tuple[Key, ...] = ()


Places: TypeAlias = Mapping[str, Place]
"""By site."""


@dataclass
class PartSeen:
    """What one of a layer's children took in and put out."""

    name: str
    given: dict[Key, Tensor]
    output: Tensor | None = None


@dataclass
class PartsSeen:
    """What a layer's children did in one pass, in the order in which they ran."""

    parts: list[PartSeen] = field(default_factory=list)

    def recorders(self, layer: nn.Module) -> list[Any]:
        """Hooks that fill it; the caller removes them."""
        handles = []
        for name, child in layer.named_children():
            handles.append(child.register_forward_pre_hook(self._taking(name), with_kwargs=True))
            handles.append(child.register_forward_hook(self._putting(name)))
        return handles

    def _taking(self, name: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {**dict(enumerate(args)), **kwargs}
            self.parts.append(PartSeen(name, {key: x.clone() for key, x in given.items() if is_stream(x)}))

        return record

    def _putting(self, name: str) -> Any:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            first = first_of(output)
            seen = next((part for part in reversed(self.parts) if part.name == name), None)
            if seen is not None and is_stream(first):
                seen.output = first.clone()

        return record


def is_stream(value: Any) -> bool:
    """Whether it may hold a stream: floating numbers, several per token."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


def first_of(output: Any) -> Any:
    """What a part puts out; attention may put out more beside it."""
    return output[0] if isinstance(output, tuple | list) and output else output


def find_places(seen: PartsSeen, before: Tensor, after: Tensor) -> dict[str, Place]:
    """The sites inside a layer that can be reached.

    Args:
        seen: what its parts did.
        before: the stream before it.
        after: the stream after it.
    """
    put_out = [
        (index, part.name, part.output)
        for index, part in enumerate(seen.parts)
        if part.output is not None and part.output.numel() == before.numel()
    ]
    for second, mlp, its_output in reversed(put_out):
        for first, attention, output in reversed(put_out):
            if first < second and adds_up([before, output, its_output], after):
                found = {"attn_out": Place(attention), "mlp_out": Place(mlp)}
                for part in seen.parts[first + 1 :]:
                    keys = _keys_of(part, before, output)
                    if keys:
                        return {**found, "resid_mid": Place(part.name, keys)}
                return found
    return {}


def _keys_of(part: PartSeen, before: Tensor, output: Tensor) -> tuple[Key, ...]:
    """The arguments of a part whose sum is the stream in the middle of a layer: what came before and one output."""
    given = {key: x for key, x in part.given.items() if x.numel() == before.numel()}
    choices = [(key,) for key in given] + ([tuple(given)] if len(given) == 2 else [])
    return next((keys for keys in choices if adds_up([before, output], *(given[key] for key in keys))), ())


def adds_up(parts: Sequence[Tensor], *total: Tensor) -> bool:
    """Whether the parts have the same sum as a tensor, or as several, but for rounding.

    A sum of large parts that cancel keeps their rounding errors, so what is let pass goes by the parts, element by
    element, and not by their sum.
    """
    dtype, shape = total[0].dtype, total[0].shape
    wide = [part.reshape(shape).float() for part in (*parts, *(-part for part in total))]
    share = max(_ROUNDINGS * torch.finfo(dtype).eps / 2, 1e-5)
    return bool((sum(wide[1:], wide[0]).abs() <= share * torch.stack(wide).abs().sum(dim=0)).all())


def output_of(seen: PartsSeen, place: Place) -> Tensor:
    """What the part at a place put out."""
    (found,) = [part.output for part in seen.parts if part.name == place.part and part.output is not None][-1:]
    return found


def hook(layer: nn.Module, place: Place, act: Callable[[nn.Module, Tensor, Tensor | None], None]) -> Any:
    """Calls `act` with a part and what belongs to a site there: the tensor to change, and what to add to it.

    Returns:
        The hook's handle.
    """
    module = layer.get_submodule(place.part)
    if not place.takes:

        def after(module: Any, _: Any, output: Any) -> Any:
            act(module, first_of(output), None)
            return output

        return module.register_forward_hook(after)
    keys = place.takes

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = [args[key] if isinstance(key, int) else kwargs[key] for key in keys]
        act(module, taken[0], taken[1] if len(taken) == 2 else None)

    return module.register_forward_pre_hook(before, with_kwargs=True)


def refused(family: str, layer: int, site: str) -> HookPointError:
    return HookPointError(
        f"In {family}, layer {layer} has no {site} that can be identified: no two of its parts put out what it adds to "
        "the stream, or none takes in the stream between them. Leave it out of `sites`."
    )
