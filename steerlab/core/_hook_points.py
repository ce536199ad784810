"""Hook points: where in the residual stream something is read or edited."""

import difflib
import re
from dataclasses import dataclass
from typing import Any, Final

from steerlab.core._numbers import as_integer, as_list, shown
from steerlab.core.errors import HookPointError

SITES: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
HEADS: Final = "z"
"""What the attention heads of a layer put out, before W_O mixes them: read by some engines, edited by none."""

_ALIASES: Final = {"hook_in": "hook_resid_pre", "hook_out": "hook_resid_post"}
_NAME: Final = re.compile(r"blocks\.(\d+)\.(hook_\w+)")


@dataclass(frozen=True, order=True)
class HookPoint:
    """A site of one layer, e.g. the residual stream after layer 14.

    Attributes:
        layer: layer index from 0.
        site: one of `SITES`: `resid_pre` (before the layer), `resid_mid` (after attention), `resid_post` (after the
            layer), `attn_out`, `mlp_out` (what the two sublayers add to the stream).

    Examples:
        >>> HookPoint(14, "resid_post").name
        'blocks.14.hook_resid_post'
        >>> HookPoint.parse("blocks.3.hook_out")
        HookPoint(layer=3, site='resid_post')
    """

    layer: int
    site: str = "resid_post"

    def __post_init__(self) -> None:
        layer = as_integer(self.layer)
        if layer is None or layer < 0:
            raise HookPointError(f"A hook point's layer is an integer from 0, got {shown(self.layer)}.")
        object.__setattr__(self, "layer", layer)
        check_site(self.site)

    @property
    def name(self) -> str:
        """The name users of TransformerLens know, `blocks.{layer}.hook_{site}`."""
        return f"blocks.{self.layer}.hook_{self.site}"

    @classmethod
    def parse(cls, name: str) -> "HookPoint":
        """Reads `blocks.{i}.hook_{site}`; `hook_in` and `hook_out` mean `hook_resid_pre` and `hook_resid_post`.

        Raises:
            HookPointError: if the name does not have that form or the site is unknown.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise HookPointError(f"{name!r} is not a hook point; write e.g. 'blocks.14.hook_resid_post'.")
        hook = _ALIASES.get(match.group(2), match.group(2))
        return cls(int(match.group(1)), hook.removeprefix("hook_"))

    def check(self, n_layers: int) -> "HookPoint":
        """This hook point, if a model with `n_layers` layers has it.

        Raises:
            HookPointError: if the layer is past the model's last one.
        """
        if self.layer >= n_layers:
            raise HookPointError(
                f"Layer {self.layer} does not exist: the model has {n_layers} layers, numbered 0 to {n_layers - 1}."
            )
        return self


@dataclass(frozen=True, order=True)
class HeadPoint:
    """What the attention heads of one layer put out, z: read head by head.

    Attributes:
        layer: layer index from 0.

    Examples:
        >>> HeadPoint(9).name
        'blocks.9.attn.hook_z'
    """

    layer: int

    @property
    def name(self) -> str:
        """The name users of TransformerLens know."""
        return f"blocks.{self.layer}.attn.hook_z"


def read_point(layer: int, site: str) -> HookPoint | HeadPoint:
    """Where an engine that knows heads apart reads: a site of the stream, or `z`.

    Raises:
        HookPointError: for an unknown site.
    """
    return HeadPoint(layer) if site == HEADS else HookPoint(layer, site)


def check_site(site: str) -> str:
    """The site itself, if it is one of `SITES`.

    Raises:
        HookPointError: otherwise, with the nearest known site.
    """
    if site not in SITES:
        if site == HEADS:
            raise HookPointError(
                f"The site {HEADS!r} is what attention heads put out; it is read only, by "
                f"sl.load(…).capture(site={HEADS!r}). sl.head_vector makes a vector at attn_out of a head's values, "
                f"which every engine edits. The sites here are {', '.join(SITES)}."
            )
        near = difflib.get_close_matches(str(site), SITES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise HookPointError(f"Unknown site {site!r}; the sites are {', '.join(SITES)}.{hint}")
    return site


def resolve_layer(layer: Any, n_layers: int) -> int:
    """A layer index with negative values counted from the end.

    Raises:
        HookPointError: if the model has no such layer.
    """
    found = as_integer(layer)
    if found is None:
        raise HookPointError(f"A layer is an integer, got {shown(layer)}.")
    if not -n_layers <= found < n_layers:
        raise HookPointError(
            f"Layer {shown(found)} does not exist: the model has {n_layers} layers, numbered 0 to {n_layers - 1} "
            f"(or -{n_layers} to -1 from the end)."
        )
    return found % n_layers


def resolve_layers(layers: Any, n_layers: int) -> list[int]:
    """Layer indices from "all", one index, or several; negative ones count from the end, duplicates are errors.

    Raises:
        HookPointError: for an unknown layer, no layer, or the same layer twice.
    """
    if isinstance(layers, str) and layers == "all":
        return list(range(n_layers))
    wanted = [layers] if as_integer(layers) is not None else as_list(layers)
    if wanted is None:
        raise HookPointError(f"layers is 'all', an index or a list of indices, got {shown(layers)}.")
    resolved = [resolve_layer(layer, n_layers) for layer in wanted]
    if not resolved:
        raise HookPointError("layers is empty; name at least one layer, or 'all'.")
    if len(set(resolved)) < len(resolved):
        raise HookPointError(f"layers names a layer twice: {wanted}.")
    return resolved
