"""Whether logits of two ways through one model differ by rounding alone.

Another attention kernel, another order of sums or another dtype rounds otherwise, and so does a pass token by token
from a cache. How much that may be is one rule, here, for every comparison of a model with itself.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_FACTOR = 4.0
"""What a model makes of its roundings. Of trained and of random models with 4 to 96 layers, in bfloat16 and float16
against float32 and between attention kernels, it is 2 at most where the text is not chosen for it."""

_ROW_FACTOR, _MOST = 3.0, 1.0
"""One row may differ by more than all do on average, but not by the spread of its logits: others differ that much."""

_STEPS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
_FINE = 2.0**-15
"""Of float32, and of float64, whose models make angles and norms in float32. Its own step is 2⁻²³: exponentials and
long sums of kernels are off by more than the last bit, and no fault is as small as what lies between."""

_MATMULS = {"high": 2.0**-10, "medium": 2.0**-7, "tf32": 2.0**-10, "bf16": 2.0**-7}
"""By torch's setting: the step of the numbers that float32 is multiplied as."""


@dataclass(frozen=True)
class Rounding:
    """How a model rounds.

    Attributes:
        dtype: the coarsest that it computes in.
        n_layers: its layers; 0 for what differs behind them only.
    """

    dtype: torch.dtype
    n_layers: int

    @property
    def allowed(self) -> float:
        """By how much logits may differ, of their spread, on average.

        Each layer adds to the stream twice, and the head comes after: 2·layers + 1 roundings, each by about a step of
        the dtype, which add up as a random walk does, to the square root of their number.
        """
        return min(_FACTOR * _step(self.dtype) * math.sqrt(2 * self.n_layers + 1), _MOST / 2)

    def explains(self, found: Tensor, wanted: Tensor) -> bool:
        """Whether logits [rows, positions, d_vocab] are those wanted, up to rounding.

        What is not finite in one must not be in the other.
        """
        return self.excess(found, wanted) <= 1

    def excess(self, found: Tensor, wanted: Tensor) -> float:
        """The difference of logits or activations [rows, positions, size], over what rounding may do; or infinity."""
        if found.shape != wanted.shape:
            return math.inf
        # row by row, since wide copies of all logits would be as large as a model
        shares = [_share(*row) for row in zip(found, wanted, strict=True)]
        row_limit = min(_ROW_FACTOR * self.allowed, _MOST)
        return max(sum(shares) / len(shares) / self.allowed, max(shares) / row_limit)


def _share(found: Tensor, wanted: Tensor) -> float:
    """The difference of logits [positions, d_vocab], of their spread, on average over the positions."""
    step = max(_step(found.dtype), _step(wanted.dtype))
    found, wanted = found.double(), wanted.to(found.device).double()
    is_finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), is_finite):
        return math.inf
    count = is_finite.sum(dim=-1).clamp_min(1)
    found, wanted = found.where(is_finite, 0.0), wanted.where(is_finite, 0.0)
    mean = (wanted.sum(dim=-1) / count)[..., None]
    spread = _root_mean_square((wanted - mean).where(is_finite, 0.0), count)
    # the last rounding is of the logits themselves: its size is theirs, where they are far from 0
    off = (_root_mean_square(found - wanted, count) - step * _root_mean_square(wanted, count)).clamp_min(0)
    return float((off / spread.clamp_min(torch.finfo(torch.float64).tiny)).mean())


def _root_mean_square(values: Tensor, count: Tensor) -> Tensor:
    return (values.square().sum(dim=-1) / count).sqrt()


def _step(dtype: torch.dtype) -> float:
    """The relative distance of neighbouring numbers, with room for what is computed otherwise."""
    if dtype in _STEPS:
        return _STEPS[dtype]
    return max(_FINE, _matmul_step()) if dtype == torch.float32 else _FINE


def _matmul_step() -> float:
    """The step of the numbers that torch is set to multiply float32 as; 0 for float32 itself."""
    try:
        setting = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the name of newer versions, for each kind of device
        setting = str(torch.backends.cuda.matmul.fp32_precision)
    return _MATMULS.get(setting, 0.0)
