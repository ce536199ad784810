"""The buffers that the operator reads and writes; they stay in place for the life of a worker."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab.engines.vllm.wire.config import SteeringConfig

SLOT, POSITION, READ = 0, 1, 2
"""Columns of `tokens`."""


@dataclass(frozen=True)
class Tables:
    """Per-token and per-slot buffers on the device; index l counts the wired layers of this rank.

    Attributes:
        tokens: per token of the pass its slot (−1: not edited), its absolute position, and the row to read it into
            (−1: not read).
        counts: how many directions a slot has at a layer.
        runs: positions of each direction, as half-open intervals; unused ones are empty.
        units: unit directions.
        params: a, g, lo, hi, s of each direction.
        tallies: per direction, the tokens it edited and their summed ‖Δx‖/‖x‖.
        readings: the stream of tokens that are read, in the model's dtype.
    """

    tokens: Int[Tensor, "tokens 3"]
    counts: Int[Tensor, "layers slots"]
    runs: Int[Tensor, "layers slots directions runs 2"]
    units: Float[Tensor, "layers slots directions d_model"]
    params: Float[Tensor, "layers slots directions 5"]
    tallies: Float[Tensor, "layers slots directions 2"]
    readings: Float[Tensor, "layers reads d_model"]

    @classmethod
    def make(
        cls,
        config: SteeringConfig,
        *,
        n_layers: int,
        n_slots: int,
        n_tokens: int,
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Tables":
        """Empty buffers: nothing is edited or read."""
        lead, k = (n_layers, n_slots), config.max_directions

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tokens=torch.full((n_tokens, 3), -1, dtype=torch.int32, device=device),
            counts=zeros(*lead, dtype=torch.int32),
            runs=zeros(*lead, k, config.max_runs, 2, dtype=torch.int32),
            units=zeros(*lead, k, d_model, dtype=torch.float32),
            params=zeros(*lead, k, 5, dtype=torch.float32),
            tallies=zeros(*lead, k, 2, dtype=torch.float32),
            readings=zeros(n_layers, max(1, config.capture_tokens), d_model, dtype=dtype),
        )

    @property
    def n_bytes(self) -> int:
        """The memory they take."""
        return sum(getattr(self, part.name).nbytes for part in fields(self))

    def of_layer(self, index: int) -> "LayerTables":
        """What one layer's operator takes; views of the same memory."""
        return LayerTables(
            self.tokens,
            self.counts[index],
            self.runs[index],
            self.units[index],
            self.params[index],
            self.tallies[index],
            self.readings[index],
        )


@dataclass(frozen=True)
class LayerTables:
    """The tables of one layer, in the order in which the operator takes them."""

    tokens: Int[Tensor, "tokens 3"]
    counts: Int[Tensor, " slots"]
    runs: Int[Tensor, "slots directions runs 2"]
    units: Float[Tensor, "slots directions d_model"]
    params: Float[Tensor, "slots directions 5"]
    tallies: Float[Tensor, "slots directions 2"]
    readings: Float[Tensor, "reads d_model"]


def to_device(array: np.ndarray, device: torch.device, out: Tensor | None = None) -> Tensor:
    """Copies to the device without waiting for it."""
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(array, device=device, out=out)
