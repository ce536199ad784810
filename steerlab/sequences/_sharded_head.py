"""A head whose vocabulary is spread over processes (tensor parallelism, a `DTensor` weight).

Every process makes the logits of its own tokens and gathers those of a chunk of rows from the others, so that all
measure the same whole rows; the weight itself stays where it is. Each takes its own columns of the gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steerlab._runtime.sharding import is_distributed
from steerlab.core.errors import InputError


@dataclass(frozen=True)
class VocabularyShards:
    """Which tokens are whose.

    Attributes:
        group: the processes.
        d_vocab: tokens of all.
        size: tokens of each process but the last.
        rank: this process's place.
    """

    group: Any
    d_vocab: int
    size: int
    rank: int

    @property
    def own(self) -> slice:
        """The tokens of this process."""
        start = min(self.rank * self.size, self.d_vocab)
        return slice(start, min(start + self.size, self.d_vocab))

    def gathered(self, logits: Tensor) -> Tensor:
        """Logits of all tokens, [..., d_vocab], from those of this process's own."""
        padded = torch.nn.functional.pad(logits, (0, self.size - logits.shape[-1])).contiguous()
        found = [torch.empty_like(padded) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(found, padded, group=self.group)
        return torch.cat(found, dim=-1)[..., : self.d_vocab].contiguous()

    def summed(self, part: Tensor) -> Tensor:
        """The sum over processes, in float32 or wider."""
        total = part.to(torch.promote_types(part.dtype, torch.float32)).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(part.dtype)


class _Gathered(torch.autograd.Function):
    """Logits of all tokens from each process's own; each gets its own columns of the gradient back."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shards: VocabularyShards) -> Tensor:
        ctx.shards = shards
        return shards.gathered(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient[..., ctx.shards.own].contiguous(), None


@contextmanager
def whole_logits(head: nn.Linear) -> Iterator[None]:
    """Runs the body with a head whose own forward gives the logits of all tokens on every process.

    By default `ColwiseParallel` leaves each process those of its own tokens, from which a sampler would draw without
    knowing that there are others.
    """
    shards = local_head(head.weight, head.bias)[2]
    if shards is None:
        yield
        return

    def gather(_: nn.Module, args: Any, output: Any) -> Tensor:
        if is_distributed(output):
            return output.full_tensor()
        return output if output.shape[-1] == shards.d_vocab else _Gathered.apply(output, shards)  # pyright: ignore[reportReturnType]

    hook = head.register_forward_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def local_head(weight: Any, bias: Any) -> tuple[Tensor, Tensor | None, VocabularyShards | None]:
    """This process's part of a head, and whose the others are; None for a head that is whole on every process.

    Raises:
        InputError: for a head that is cut otherwise than by its vocabulary, along one dimension of the mesh.
    """
    if not is_distributed(weight):
        return weight, bias, None
    cut = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(cut) > 1 or any(not weight.placements[dim].is_shard(0) for dim in cut):
        raise InputError(
            f"The head's weight is placed as {tuple(map(str, weight.placements))} on its mesh; its vocabulary must be "
            "sharded along one dimension at most. Parallelise the head with ColwiseParallel()."
        )
    is_cut = bias is not None and is_distributed(bias)
    local: Any = bias.to_local() if is_cut else bias  # pyright: ignore[reportOptionalMemberAccess]
    if not cut:
        return weight.to_local(), local, None
    (dim,) = cut
    mesh = weight.device_mesh
    size = -(-weight.shape[0] // mesh.size(dim))
    shards = VocabularyShards(mesh.get_group(dim), weight.shape[0], size, mesh.get_local_rank(dim))
    if local is not None and not is_cut:
        local = local[shards.own]
    return weight.to_local(), local, shards
