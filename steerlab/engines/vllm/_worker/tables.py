"""The buffers that the operator reads and writes; they stay in place for the life of a worker."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.plan_tables import EDIT_WIDTH, TERM_WIDTH

_OF_ALL_POINTS = ("tokens", "origins", "reads", "limits", "answers")

SLOT, POSITION, READ, ANSWERS = 0, 1, 2, 3
"""Columns of `tokens`."""


@dataclass(frozen=True)
class Tables:
    """Per-token and per-slot buffers on the device; index p counts the wired hook points of this rank.

    Attributes:
        tokens: per token of the pass its slot (−1: not edited), its absolute position, the row to read it into
            (−1: not read), and as bits to which of its request's token rules it belongs.
        origins: the position of a slot's first generated token.
        counts: how many edits a slot has at a hook point.
        runs: positions of each edit, as half-open intervals, and as bits with which answers of the token rules each
            interval acts; unused ones are empty.
        edits: what each edit is, see `_wire.plan_tables`.
        terms: the terms they consist of, see there.
        vectors: directions that terms read and write along.
        probes: of each condition that is read here the place of its direction plus one, and 1 if it reads the cosine.
        reads: positions that each condition reads, as half-open intervals.
        limits: of each condition, its limits and how many positions it reads.
        answers: of each condition, sum and count of what it has read.
        tallies: per edit, the tokens it edited, their summed ‖Δx‖/‖x‖, and the tokens that came before its condition
            was answered.
        readings: the stream of tokens that are read, in the model's dtype.
    """

    tokens: Int[Tensor, "tokens 4"]
    origins: Int[Tensor, " slots"]
    counts: Int[Tensor, "points slots"]
    runs: Int[Tensor, "points slots edits runs 3"]
    edits: Float[Tensor, "points slots edits 10"]
    terms: Float[Tensor, "points slots terms 9"]
    vectors: Float[Tensor, "points slots directions d_model"]
    probes: Float[Tensor, "points slots conditions 2"]
    reads: Int[Tensor, "slots conditions runs 2"]
    limits: Float[Tensor, "slots conditions 3"]
    answers: Float[Tensor, "slots conditions 2"]
    tallies: Float[Tensor, "points slots edits 3"]
    readings: Float[Tensor, "points reads d_model"]

    @classmethod
    def make(
        cls,
        config: SteeringConfig,
        *,
        n_points: int,
        n_slots: int,
        n_tokens: int,
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Tables":
        """Empty buffers: nothing is edited or read."""
        lead, room = (n_points, n_slots), config.max_edits

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tokens=torch.full((n_tokens, 4), -1, dtype=torch.int32, device=device),
            origins=zeros(n_slots, dtype=torch.int32),
            counts=zeros(*lead, dtype=torch.int32),
            runs=zeros(*lead, room, config.max_runs, 3, dtype=torch.int32),
            edits=zeros(*lead, room, EDIT_WIDTH),
            terms=zeros(*lead, room, TERM_WIDTH),
            vectors=zeros(*lead, config.max_directions, d_model),
            probes=zeros(*lead, config.max_conditions, 2),
            reads=zeros(n_slots, config.max_conditions, config.max_runs, 2, dtype=torch.int32),
            limits=zeros(n_slots, config.max_conditions, 3),
            answers=zeros(n_slots, config.max_conditions, 2),
            tallies=zeros(*lead, room, 3),
            readings=zeros(n_points, max(1, config.capture_tokens), d_model, dtype=dtype),
        )

    @property
    def n_bytes(self) -> int:
        """The memory they take."""
        return sum(getattr(self, part.name).nbytes for part in fields(self))

    def of_point(self, index: int) -> "PointTables":
        """What the operator takes at one hook point; views of the same memory."""
        tables = {part.name: getattr(self, part.name) for part in fields(PointTables)}
        here = {name: table if name in _OF_ALL_POINTS else table[index] for name, table in tables.items()}
        return PointTables(**here)


@dataclass(frozen=True)
class PointTables:
    """The tables of one hook point, in the order in which the operator takes them."""

    tokens: Int[Tensor, "tokens 4"]
    origins: Int[Tensor, " slots"]
    counts: Int[Tensor, " slots"]
    runs: Int[Tensor, "slots edits runs 3"]
    edits: Float[Tensor, "slots edits 10"]
    terms: Float[Tensor, "slots terms 9"]
    vectors: Float[Tensor, "slots directions d_model"]
    probes: Float[Tensor, "slots conditions 2"]
    reads: Int[Tensor, "slots conditions runs 2"]
    limits: Float[Tensor, "slots conditions 3"]
    answers: Float[Tensor, "slots conditions 2"]
    tallies: Float[Tensor, "slots edits 3"]
    readings: Float[Tensor, "reads d_model"]

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, part.name) for part in fields(self))


def to_device(array: np.ndarray, device: torch.device, out: Tensor | None = None) -> Tensor:
    """Copies to the device without waiting for it."""
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(array, device=device, out=out)
