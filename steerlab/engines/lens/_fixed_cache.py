"""A key-value cache of fixed size whose layers all write to the same slot."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from steerlab._kernels.availability import runs_kernels


class FixedLayer(StaticLayer):
    """A layer's keys and values, every slot from the first on.

    Sliding windows are left to the mask: what lies outside is kept and not looked at.

    Args:
        capacity: tokens that fit.
        filled: by device, how many of them are there, shape []; shared by all layers, and not changed here.
    """

    def __init__(self, capacity: int, filled: dict[torch.device, Tensor]) -> None:
        super().__init__(max_cache_len=capacity)
        self._filled = filled

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the tensors, on the layer's device."""
        super().lazy_initialization(key_states, value_states)
        self.cumulative_length = self._filled[key_states.device]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the tokens of a pass after those that are there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        slots = self.cumulative_length.view(1)
        if runs_kernels(key_states):
            from steerlab._kernels.elementwise import can_write, write

            if can_write(key_states, value_states, self.keys, self.values):
                write(key_states, value_states, self.keys, self.values, slots)
                return self.keys, self.values
        if key_states.shape[2] > 1:
            slots = slots + torch.arange(key_states.shape[2], device=slots.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values


class FixedCache(Cache):
    """A cache of such layers.

    Args:
        config: of the text model.
        capacity: tokens that fit in each row.
        filled: see `FixedLayer`.
    """

    def __init__(self, config: Any, capacity: int, filled: dict[torch.device, Tensor]) -> None:
        self.filled = filled
        n_layers = len(StaticCache(config=config, max_cache_len=capacity).layers)
        self._fixed = [FixedLayer(capacity, self.filled) for _ in range(n_layers)]
        super().__init__(layers=[*self._fixed])

    def clear(self) -> None:
        """Empties it; the values go too, since NaN would pass the mask: 0 times NaN is NaN."""
        for filled in self.filled.values():
            filled.zero_()
        for layer in self._fixed:
            if layer.keys is not None and layer.values is not None:
                layer.keys.zero_()
                layer.values.zero_()

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values that exist so far, on all devices."""
        tensors = [t for layer in self._fixed for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def advance(self, n_tokens: int) -> None:
        """States that a pass over this many tokens is done."""
        for filled in self.filled.values():
            filled.add_(n_tokens)


def fits(config: Any) -> bool:
    """Whether a model keeps nothing but keys and values, at most with sliding windows."""
    try:
        layers = StaticCache(config=config, max_cache_len=1).layers
    except Exception:  # foreign code: kinds of layers that have no cache of fixed size
        return False
    return all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in layers)
