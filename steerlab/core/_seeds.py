"""Random draws keyed by seed, prompt and completion, so that they depend on nothing else."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from steerlab.core._numbers import as_integer, as_list, shown
from steerlab.core.errors import InputError

SeedLike = int | Sequence[int]


def row_key(seed: SeedLike, prompt_index: int, sample_index: int) -> tuple[int, int, int]:
    """The key of one completion's draws.

    An integer seed gives prompt i the key (seed, i, sample). A list holds one seed per prompt and gives it the key
    (seed[i], 0, sample), so that a row keeps its draws whatever the batch around it: `generate([p], seed=s)` draws
    what `generate([a, b, p], seed=[7, 8, s])` draws for its last prompt.
    """
    if isinstance(seed, Sequence):
        return (int(seed[prompt_index]), 0, sample_index)
    return (int(seed), prompt_index, sample_index)


def check_seed(seed: Any, n_prompts: int) -> SeedLike:
    """The seed as an int, or as a list of one int per prompt, if all are integers ≥ 0.

    Raises:
        InputError: otherwise.
    """
    listed = as_list(seed, ordered=True)
    if listed is not None and len(listed) != n_prompts:
        raise InputError(f"A list of seeds holds one per prompt: got {len(listed)} seeds for {n_prompts} prompts.")
    return check_single_seed(seed) if listed is None else [check_single_seed(value) for value in listed]


def check_single_seed(seed: Any) -> int:
    """The seed as an int.

    Raises:
        InputError: for anything but an integer ≥ 0.
    """
    found = as_integer(seed)
    if found is None or found < 0:
        raise InputError(f"A seed is an integer ≥ 0, got {shown(seed)}.")
    return found


def draw_keys(key: tuple[int, ...], n: int) -> np.ndarray:
    """N random int64, one for each token drawn, a function of the key alone; the first do not depend on n."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key[0], spawn_key=key[1:])))
    bounds = np.iinfo(np.int64)
    return generator.integers(bounds.min, bounds.max, size=n, dtype=np.int64, endpoint=True)
