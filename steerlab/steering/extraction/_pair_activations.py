"""Reading the activations of contrast pairs: pooled rows, a chunk of pairs at a time, all layers at once."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._hook_points import check_site, resolve_layers
from steerlab.core._progress import progress
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine, ModelInfo
from steerlab.core.errors import InputError
from steerlab.core.results import Activations, check_pool
from steerlab.steering.extraction.responses import (
    Responses,
    check_readable,
    mean_by_prompt,
    read_responses,
    reads_responses,
)
from steerlab.steering.positions._sets import Mask, Where
from steerlab.steering.positions.where import WhereLike, as_where, last_prompt

PAIRS_PER_CHUNK = 64


@dataclass(frozen=True)
class PairActivations:
    """Activations of both sides of contrast pairs, one row per pair, pooled over the positions read.

    Attributes:
        positive: per layer, shape [pairs, d_model].
        negative: per layer, shape [pairs, d_model].
    """

    positive: dict[int, Float[Tensor, "pairs d_model"]]
    negative: dict[int, Float[Tensor, "pairs d_model"]]


@dataclass(frozen=True)
class Reading:
    """Which activations are read of each prompt.

    Attributes:
        site: site within the layers.
        layers: the layers.
        where: positions in the prompt.
        pool: how several positions become one row, `mean` or `last`.
        chat: take strings as user turns of a chat.
        responses: how responses are drawn, if positions of generated tokens are read.
    """

    site: str
    layers: tuple[int, ...]
    where: Where
    pool: str
    chat: bool
    responses: Responses | None = None

    @classmethod
    def on(
        cls,
        engine: Engine,
        site: str,
        layers: Any,
        where: WhereLike,
        pool: str | None,
        chat: bool,
        responses: Responses | None = None,
    ) -> "Reading":
        """A reading, checked against an engine's model; the prompt's last token by default.

        Raises:
            HookPointError: for an unknown layer or site.
            InputError: for positions or a pooling that cannot give one row per prompt.
        """
        where = as_where(where, last_prompt(), argument="read")
        if any(isinstance(leaf, Mask) and len(leaf.rows) > 1 for leaf in where.leaves()):
            raise InputError(
                "A mask with one row per prompt belongs to a single call, and pairs are read in several; use a mask of "
                "one row, or read=sl.where.index(…), ids(…) or span(…)."
            )
        if check_pool(pool) is None:
            raise InputError("extract needs one row per prompt; pool is 'mean' or 'last', got None.")
        resolved = tuple(resolve_layers(layers, engine.info.n_layers))
        if not reads_responses(where):
            if responses is not None:
                raise InputError(f"{where} reads no response; read=sl.where.generated() does.")
            return cls(check_site(site), resolved, where, str(pool), chat)
        check_readable(where)
        return cls(check_site(site), resolved, where, str(pool), chat, responses or Responses())

    def rows(self, engine: Engine, prompts: Sequence[PromptLike]) -> Float[Tensor, "n_layers prompts d_model"]:
        """One row per prompt and layer, float32 on the CPU."""
        options = {"layers": list(self.layers), "site": self.site, "pool": self.pool}
        if self.responses is None:
            return engine.capture(prompts, where=self.where, chat=self.chat, **options).stack()
        found, continued = read_responses(engine, prompts, options, self.where, self.chat, self.responses)
        return mean_by_prompt(found.stack(), continued)

    def chunks(
        self, engine: Engine, firsts: Sequence[PromptLike], seconds: Sequence[PromptLike], size: int
    ) -> Iterator[tuple[Float[Tensor, "n_layers pairs d_model"], Float[Tensor, "n_layers pairs d_model"]]]:
        """Rows of prompts in pairs, at most `size` pairs at a time, in order; a progress bar counts the pairs."""
        with progress(len(firsts), "extract", "pair") as bar:
            for start in range(0, len(firsts), size):
                stop = min(start + size, len(firsts))
                rows = self.rows(engine, [*firsts[start:stop], *seconds[start:stop]])
                yield rows[:, : stop - start], rows[:, stop - start :]
                bar.update(stop - start)


@dataclass(frozen=True)
class Origin:
    """How a set of vectors was extracted; not saved with it.

    Attributes:
        engine: a weak reference to the engine.
        reading: which activations were read.
        seed: of the random pairs.
    """

    engine: "weakref.ref[Engine]"
    reading: Reading
    seed: int


@runtime_checkable
class CapturingEngine(Protocol):
    """What extraction needs of an engine."""

    @property
    def info(self) -> ModelInfo: ...

    def capture(self, prompts: Sequence[PromptLike] | PromptLike, *, layers: Any) -> Activations:
        """Activations at chosen layers and positions."""
        ...


def check_engine(engine: object) -> None:
    """Checks that activations can be read with an engine.

    Raises:
        InputError: if it is no engine.
    """
    if not isinstance(engine, CapturingEngine):
        raise InputError(f"Activations are read with an engine, sl.load(…), got {engine!r:.60}.")


def read_pairs(
    engine: Engine,
    pairs: ContrastPairs,
    *,
    site: str,
    layers: Any,
    read: Where,
    pool: str = "mean",
    chat: bool = False,
    responses: Responses | None = None,
) -> PairActivations:
    """Every pair's rows at once: two float32 rows per pair and layer."""
    reading = Reading.on(engine, site, layers, read, pool, chat, responses)
    chunks = list(reading.chunks(engine, pairs.positives, pairs.negatives, PAIRS_PER_CHUNK))
    positive, negative = (torch.cat(side, dim=1) for side in zip(*chunks, strict=True))
    return PairActivations(
        dict(zip(reading.layers, positive, strict=True)), dict(zip(reading.layers, negative, strict=True))
    )
