"""Fewer kernels in a pass over one token per row: what modules of known kinds compute in many, done in one.

Each replacement is compared once with what it replaces, on random values, and left out where they differ. Only the
modules of a program's own copy of the model are changed, and only where Triton runs.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steerlab._runtime.self_comparison import is_out_of_memory
from steerlab.engines.lens._residual_sums import FusedNorm, fuse_sums

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}
_COARSE = 2e-2  # two roundings in bfloat16
_ROTARY = "apply_rotary_pos_emb"
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies no pass changes; `dynamic` and `longrope` look at the highest position."""


def fuse_linears(model: nn.Module) -> None:
    """Lets the linear maps of a model that read the same rows run together."""
    for linears in _linears(model):
        together = _Together(linears)
        for k, linear in enumerate(linears):
            linear.__dict__["forward"] = together.forward_of(k)


def fuse_between(model: nn.Module, n_positions: int) -> list[Callable[[], None]]:
    """Lets what lies between the linear maps of a model run in fewer kernels; positions are below a number.

    Returns:
        What makes tables anew in their places, before each use: what they come from may have changed in place.
    """
    renewals: list[Callable[[], None]] = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            renewals += _tabulate_angles(module, next(model.parameters()).dtype, n_positions)
        if type(module).__name__.endswith("RMSNorm"):
            _fuse_norm(module)
        if _has_rotary(module):
            _fuse_rotary(module)
        if {"gate_proj", "up_proj", "down_proj", "act_fn"} == set(module._modules):
            _fuse_gate(module)
    fuse_sums(model)
    return renewals


def _fuse_norm(module: Any) -> None:
    """Root-mean-square norms by one kernel."""
    eps, weight = getattr(module, "variance_epsilon", getattr(module, "eps", None)), getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.dim() != 1:
        return
    forward = type(module).forward.__get__(module)
    norm, rows = FusedNorm(forward, weight, eps), _random(weight, 2, *weight.shape)
    if _agree(forward, norm, rows, of_each=True):
        module.__dict__["forward"] = norm


def _fuse_gate(module: Any) -> None:
    """A gated MLP's product by one kernel."""
    from steerlab._kernels.elementwise import can_gate, silu_gate

    forward = type(module).forward

    def mlp(hidden_states: Tensor) -> Tensor:
        gate, value = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        return module.down_proj(silu_gate(gate, value) if can_gate(gate, value) else module.act_fn(gate) * value)

    rows = _random(module.up_proj.weight, 2, 1, module.up_proj.in_features)
    if _is_silu(module.act_fn, rows.device) and _agree(lambda x: forward(module, x), mlp, rows):
        module.__dict__["forward"] = mlp


@torch.no_grad()
def _is_silu(function: Callable[[Tensor], Tensor], device: torch.device) -> bool:
    """Whether an activation is x / (1 + e⁻ˣ); near 0 and far from it others are close, and so is what they lead to."""
    x = torch.linspace(-8.0, 8.0, 257, device=device)
    return bool((function(x) - nn.functional.silu(x)).abs().amax() <= _CLOSE[torch.float32])


def _has_rotary(module: Any) -> bool:
    return _ROTARY in getattr(getattr(type(module).forward, "__code__", None), "co_names", ())


def _fuse_rotary(module: Any) -> None:
    """Rotary embedding by a kernel for queries and keys at once, in attention that calls Hugging Face's function."""
    from steerlab._kernels.rotary import can_rotate, rotate

    forward = type(module).forward
    original = forward.__globals__.get(_ROTARY)
    width, weight = getattr(module, "head_dim", None), next(module.parameters(), None)
    if original is None or not isinstance(width, int) or weight is None:
        return

    def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not can_rotate(query, key, cos, sin):
            return original(query, key, cos, sin, *args, **kwargs)
        return rotate(query, key, cos, sin)

    heads, angles = _random(weight, 2, 4, 1, width), _random(weight, 2, 1, width)
    if can_rotate(heads, heads, angles, angles) and _agree(
        lambda q: original(q, q[:, :2], angles, angles.flip(0)),
        lambda q: rotary(q, q[:, :2], angles, angles.flip(0)),
        heads,
    ):
        known = {**forward.__globals__, _ROTARY: rotary}
        del known["__name__"]  # by which a compiler would look for the function in its module, and find the original
        made = types.FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
        made.__kwdefaults__ = forward.__kwdefaults__
        module.__dict__["forward"] = types.MethodType(made, module)


def _tabulate_angles(module: Any, dtype: torch.dtype, n_positions: int) -> list[Callable[[], None]]:
    """Cosines and sines of one position per row out of a table, where they depend on nothing else; what renews it."""
    forward, frequencies = type(module).forward.__get__(module), getattr(module, "inv_freq", None)
    if getattr(module, "rope_type", None) not in _FIXED_ROTARY or not isinstance(frequencies, Tensor):
        return []
    like = frequencies.new_empty(0, dtype=dtype)
    positions = torch.arange(n_positions, device=like.device)[None]
    table = torch.stack(forward(like, positions)).squeeze(1)

    def renew() -> None:
        torch.stack(forward(like, positions), out=table.unsqueeze(1))

    def angles(x: Tensor, position_ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        is_one = position_ids.dim() == 2 and position_ids.shape[1] == 1
        if options or not is_one or (x.dtype, x.device) != (table.dtype, table.device):
            return forward(x, position_ids, **options)
        cos, sin = table.index_select(1, position_ids[:, 0]).unsqueeze(2)
        return cos, sin

    some = torch.arange(n_positions - 1, -1, -1 - n_positions // 16, device=like.device)[:, None]
    if not all(torch.equal(a, b) for a, b in zip(forward(like, some), angles(like, some), strict=True)):
        return []
    module.__dict__["forward"] = angles
    return [renew]


def _linears(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Every linear map, with those that read the same rows in one list."""
    grouped: set[int] = set()
    for module in model.modules():
        children = dict(module.named_children())
        for names in _TOGETHER:
            if all(type(children.get(name)) is nn.Linear for name in names):
                found: list[Any] = [children[name] for name in names]
                grouped.update(map(id, found))
                yield found
    for module in model.modules():
        if type(module) is nn.Linear and id(module) not in grouped:
            yield [module]


class _Together:
    """Linear maps that are asked for the same rows one after the other, and computed when the first is."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = list(linears)
        self._rows: Tensor | None = None
        self._found: dict[int, Tensor] = {}

    def forward_of(self, k: int) -> Callable[[Tensor], Tensor]:
        """What the k-th map is to call."""

        def forward(rows: Tensor) -> Tensor:
            if self._rows is not rows:
                self._compute(rows)
            if k in self._found:
                found = self._found.pop(k)
                self._rows = self._rows if self._found else None  # as before the first, or compiled code would not do
                return found
            return nn.functional.linear(rows, self._linears[k].weight, self._linears[k].bias)

        return forward

    def _compute(self, rows: Tensor) -> None:
        from steerlab._kernels.linear import can_map, linear_maps

        weights, biases = [m.weight for m in self._linears], [m.bias for m in self._linears]
        is_known = can_map(rows, weights, biases)
        self._rows = rows if is_known else None
        self._found = dict(enumerate(linear_maps(rows, weights, biases))) if is_known else {}


def _random(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(like)


@torch.no_grad()
def _agree(
    wanted: Callable[[Tensor], Any], found: Callable[[Tensor], Any], values: Tensor, *, of_each: bool = False
) -> bool:
    """Whether two functions take the same and give the same, up to rounding.

    That is of the largest value, or of each where nothing cancels.
    """
    bound = _CLOSE.get(values.dtype, _COARSE)
    try:
        pairs = list(zip(_several(wanted(values)), _several(found(values)), strict=True))
    except (TypeError, ValueError, RuntimeError) as error:  # a function of that name that takes something else
        if is_out_of_memory(error):
            raise
        return False
    for right, ours in pairs:
        if right.shape != ours.shape or right.dtype != ours.dtype:
            return False
        size = right.abs() if of_each else right.abs().amax()
        if not bool(((right - ours).abs() <= bound * size).all()):
            return False
    return True


def _several(values: Any) -> tuple[Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)
