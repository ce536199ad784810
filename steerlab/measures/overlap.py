"""How much of one set of tokens is left in another, e.g. of a nucleus once a model is steered."""

from jaxtyping import Bool, Float
from torch import Tensor


def kept_share(
    before: Bool[Tensor, "*batch d_vocab"], after: Bool[Tensor, "*batch d_vocab"]
) -> Float[Tensor, "*batch"]:
    """Share of the tokens of the first set that are in the second: |A ∩ B| / |A|; NaN for an empty first set.

    Examples:
        >>> import torch
        >>> kept_share(torch.tensor([True, True, False]), torch.tensor([True, False, True])).item()
        0.5
    """
    return (before & after).sum(dim=-1) / before.sum(dim=-1)


def jaccard(a: Bool[Tensor, "*batch d_vocab"], b: Bool[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch"]:
    """Tokens in both sets over tokens in either: |A ∩ B| / |A ∪ B|; NaN for two empty sets.

    Source:
        Jaccard 1912.

    Examples:
        >>> import torch
        >>> round(jaccard(torch.tensor([True, True, False]), torch.tensor([True, False, True])).item(), 4)
        0.3333
    """
    return (a & b).sum(dim=-1) / (a | b).sum(dim=-1)
