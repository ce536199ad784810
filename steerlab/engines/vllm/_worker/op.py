"""The custom operator `steerlab::edit`, one call per wired hook point: opaque to the compiler, kept inside CUDA graphs.

It changes `hidden` in place. It also counts into `tallies` and reads into `readings` and `answers`, which nothing else
in the graph touches; these are not declared as mutated, because the compiler would then copy whole buffers around every
call.
"""

import torch
from torch import Tensor

from steerlab.engines.vllm._worker.op_torch import edit_rows

_SCHEMA = (
    "edit(Tensor(a!) hidden, Tensor? residual, Tensor tokens, Tensor origins, Tensor counts, Tensor runs, "
    "Tensor edits, Tensor terms, Tensor vectors, Tensor probes, Tensor reads, Tensor limits, Tensor answers, "
    "Tensor tallies, Tensor readings) -> ()"
)
_LIBRARY = torch.library.Library("steerlab", "FRAGMENT")


def _on_gpu(hidden: Tensor, residual: Tensor | None, *tables: Tensor) -> None:
    from steerlab.engines.vllm._worker.op_triton import launch

    launch(hidden, residual, *tables)


def _on_cpu(hidden: Tensor, residual: Tensor | None, *tables: Tensor) -> None:
    edit_rows(hidden, residual, *tables)


def _nothing(hidden: Tensor, residual: Tensor | None, *tables: Tensor) -> None:
    """What the compiler runs on shapes alone: there is no output."""


_LIBRARY.define(_SCHEMA)
_LIBRARY.impl("edit", _on_cpu, "CPU")
_LIBRARY.impl("edit", _on_gpu, "CUDA")
torch.library.register_fake("steerlab::edit", _nothing, lib=_LIBRARY)
