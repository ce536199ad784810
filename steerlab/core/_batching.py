"""Cutting many sequences into batches under a token budget."""

from collections.abc import Sequence


def batches_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in batches whose padded size (rows × longest row) stays within a budget.

    Sequences of like length share a batch, so that little is padded; a sequence longer than the budget gets a batch of
    its own. Every index appears exactly once.

    Args:
        lengths: tokens per sequence.
        budget: tokens per batch, padding included.

    Examples:
        >>> batches_by_tokens([2, 9, 2, 3], budget=9)
        [[0, 2, 3], [1]]
    """
    batches: list[list[int]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if current and (len(current) + 1) * lengths[index] > budget:
            batches.append(current)
            current = []
        current.append(index)
    if current:
        batches.append(current)
    return batches
