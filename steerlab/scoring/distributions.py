"""Full next-token distributions of a text on disk, one file per window."""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save
from torch import Tensor

from steerlab.core._files import remove_leftovers, write_atomic
from steerlab.core.errors import DataError, InputError, RunError
from steerlab.scoring._journal import check_fingerprint

DistributionDtype = Literal["float16", "float32"]
INDEX, COMPLETE = "index.json", "complete.json"
_LOG = logging.getLogger(__name__)
_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class DistributionShard:
    """The distributions of the tokens that one window scores.

    Attributes:
        positions: absolute position in the text of each token, shape [tokens].
        token_ids: the token that stands there, shape [tokens].
        log_probs: log-probability in nats of every token there, given all before it; shape [tokens, d_vocab].
    """

    positions: np.ndarray
    token_ids: np.ndarray
    log_probs: Float[Tensor, "tokens d_vocab"] = field(repr=False)


class DistributionWriter:
    """Writes distributions into a folder, each file whole or not at all.

    Args:
        folder: the folder; made if it is not there.
        dtype: `float16` or `float32`.
        fingerprint: what is measured.
        resume: go on with a folder that was begun with the same fingerprint.

    Raises:
        InputError: for another dtype, or a folder in use for something else.
        RunError: if a folder to go on with belongs to another measurement.
    """

    def __init__(self, folder: str | Path, dtype: str, fingerprint: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = Path(folder)
        self.dtype = _dtype(dtype)
        index = self.folder / INDEX
        remove_leftovers(self.folder, INDEX)
        if index.exists() and not resume:
            raise InputError(f"{self.folder} already holds distributions; name another folder, or resume that run.")
        if index.exists():
            check_fingerprint(index, json.loads(index.read_text()), fingerprint)
            remove_leftovers(self.folder, COMPLETE, "*.safetensors")
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(f"{self.folder} is not an empty folder; name another one for the distributions.")
        else:
            write_atomic(index, json.dumps(dict(fingerprint), sort_keys=True))

    def write(self, first_scored: int, token_ids: Sequence[int], log_probs: Float[Tensor, "tokens d_vocab"]) -> None:
        """Writes the distributions of one window."""
        shard = {
            "positions": torch.arange(first_scored, first_scored + len(token_ids)),
            "token_ids": torch.tensor(token_ids),
            "log_probs": log_probs.to(self.dtype).contiguous(),
        }
        write_atomic(self._path(first_scored), save(shard))

    def require(self, first_scored: Iterable[int]) -> None:
        """Checks that the distributions of these windows are there.

        Raises:
            RunError: otherwise.
        """
        missing = [start for start in first_scored if not self._path(start).is_file()]
        if missing:
            raise RunError(
                f"{self.folder} lacks the distributions of {len(missing)} windows that are finished (the first scores "
                f"token {missing[0]}); start again with a new file to resume from."
            )

    def finish(self, n_tokens: int) -> None:
        """Notes that all of the text is there."""
        write_atomic(self.folder / COMPLETE, json.dumps({"num_tokens": n_tokens}))

    def _path(self, first_scored: int) -> Path:
        return self.folder / f"{first_scored:012d}.safetensors"


def read_distributions(folder: str | Path) -> Iterator[DistributionShard]:
    """The distributions that `perplexity(distributions=…)` wrote, window after window, each read when it is reached.

    Raises:
        DataError: if there are none, or the run that wrote them has not come to its end.

    Examples:
        >>> for shard in read_distributions("wikitext-distributions"):  # doctest: +SKIP
        ...     entropy = -(shard.log_probs.float().exp() * shard.log_probs.float()).sum(-1)
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise DataError(f"{folder} holds no distributions: there is no {INDEX} in it.")
    if not (folder / COMPLETE).is_file():
        raise DataError(f"{folder} holds the beginning of a text only; resume the run that wrote it.")
    for path in sorted(folder.glob("*.safetensors")):
        found = load_file(path)
        yield DistributionShard(found["positions"].numpy(), found["token_ids"].numpy(), found["log_probs"])


def distributions_bytes(n_tokens: int, d_vocab: int, dtype: DistributionDtype | str = "float16") -> int:
    """Size on disk, in bytes, of the distributions of so many tokens."""
    return n_tokens * d_vocab * _dtype(dtype).itemsize


def announce(folder: str | Path, n_tokens: int, d_vocab: int, dtype: str) -> None:
    """Announces, before any work, how much will be written.

    Raises:
        InputError: if the disk has no room for it.
    """
    size = distributions_bytes(n_tokens, d_vocab, dtype)
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    sizes = f"{n_tokens} tokens × {d_vocab} log-probs in {dtype} take {size / 1e9:.3f} GB"
    if size > free:
        raise InputError(f"{sizes}, and {place} has {free / 1e9:.3f} GB free. Score less text, or use float16.")
    _LOG.warning("%s in %s.", sizes, folder)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise InputError(f"Distributions are stored in {' or '.join(_DTYPES)}, got {name!r}.")
    return _DTYPES[name]
