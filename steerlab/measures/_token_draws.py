"""Drawing tokens, each with noise of its own, so that rounding elsewhere does not move a draw.

A draw is the argmax of log q + G over the nucleus, with independent Gumbel noise G for each token. That is a draw from
q (the Gumbel-max trick). G is a hash of the draw's key and the token's id alone: no other token's probability enters,
and neither does the batch, the device, or the size of the vocabulary. A change of ε in the logits changes a draw only
if the two highest sums lay within 2ε of each other, or if the token that wins is itself on the nucleus's edge. With one
uniform number and cumulated probabilities, the changes of all tokens with lower ids add up instead.

Source:
    Maddison, Tarlow and Minka 2014, A* Sampling (arXiv:1411.0030), section 2, for the trick. The hash mixes 32-bit
    words as the finaliser of Appleby's MurmurHash3 does.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_BELOW_ONE = 1 - 2.0**-24


def draw(log_q: Float[Tensor, "batch d_vocab"], keys: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """One token per row, of the nucleus; a function of the row and its key alone.

    Args:
        log_q: log-probabilities under the policy, −inf outside the nucleus.
        keys: 64 random bits per row; see `steerlab.core._seeds.draw_keys`.
    """
    return (log_q + gumbel_noise(keys, log_q.shape[-1])).argmax(dim=-1)


def gumbel_noise(keys: Int[Tensor, " batch"], d_vocab: int) -> Float[Tensor, "batch d_vocab"]:
    """Gumbel noise of every token, float32: −log(−log(1 − v)) with v the token's number in (0, 1).

    v is a multiple of 2⁻³¹ plus 2⁻³², so that small ones, which decide, are fine: a token's chance to be drawn is right
    to about 10⁻⁹.
    """
    numbers = _hash(keys, d_vocab).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    uniform = numbers.mul_(2.0**-31).add_(2.0**-32).clamp_max_(_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _hash(keys: Int[Tensor, " batch"], d_vocab: int) -> Int[Tensor, "batch d_vocab"]:
    """32 bits for each key and token, in integers that wrap around, so alike on every device."""
    words = torch.stack([keys & 0xFFFFFFFF, (keys >> 32) & 0xFFFFFFFF], dim=-1)
    low, high = (words - ((words >> 31) << 32)).to(torch.int32).unbind(-1)  # as signed 32-bit integers
    tokens = torch.arange(d_vocab, dtype=torch.int32, device=keys.device) * _GOLDEN
    return _mix(_mix(tokens + low[:, None]).bitwise_xor_(high[:, None]))


def _mix(x: Tensor) -> Tensor:
    """Spreads every bit of each number over all of its bits, in place."""
    for shift, factor in ((16, _FIRST), (13, _SECOND)):
        x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, places: int) -> Tensor:
    """The bits moved to the right, zeros coming in."""
    return (x >> places).bitwise_and_((1 << (32 - places)) - 1)
