"""Which tokens a direction stands for: through the model's final norm and its unembedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from steerlab.core._numbers import Integer, check_integer
from steerlab.core._spelling import token_text
from steerlab.core.engine import ModelInfo, UnembeddingEngine
from steerlab.core.errors import InputError, VectorShapeError
from steerlab.display import Grid, Piece, Remarks, Shown, Table, sequential, visible
from steerlab.steering.vectors import SteeringVector

if TYPE_CHECKING:
    import pandas as pd

_BOTH = "Logits of the direction alone, and of its opposite, behind the model's final norm, which sets their length."


@dataclass(frozen=True)
class TokenLogit:
    """A token and its logit.

    Attributes:
        token: what it spells.
        token_id: its id.
        logit: its logit.
    """

    token: str
    token_id: int
    logit: float


@dataclass(frozen=True, repr=False)
class TopTokens(Shown, Sequence[TokenLogit]):
    """The tokens that a direction raises most, the highest first; and those that its opposite does.

    Attributes:
        name: of the vector, or its hook point.
        highest: the tokens with the highest logits of the direction.
        opposite: the tokens with the highest logits of the opposite direction.
    """

    name: str
    highest: tuple[TokenLogit, ...]
    opposite: tuple[TokenLogit, ...]

    @overload
    def __getitem__(self, index: int) -> TokenLogit: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogit]: ...
    def __getitem__(self, index: int | slice) -> TokenLogit | Sequence[TokenLogit]:
        return self.highest[index]

    def __len__(self) -> int:
        return len(self.highest)

    @property
    def tokens(self) -> list[str]:
        """What the highest tokens spell."""
        return [one.token for one in self.highest]

    def to_frame(self) -> "pd.DataFrame":
        """A row per token: `side` (`direction` or `opposite`), `rank` from 1, `token`, `token_id`, `logit`."""
        import pandas as pd

        sides = {"direction": self.highest, "opposite": self.opposite}
        rows = [
            (side, k, one.token, one.token_id, one.logit)
            for side, found in sides.items()
            for k, one in enumerate(found, start=1)
        ]
        return pd.DataFrame(rows, columns=["side", "rank", "token", "token_id", "logit"])

    def _finding(self) -> str:
        return f"{self.name}: {', '.join(map(repr, self.tokens[:5]))}"

    def _pieces(self) -> Sequence[Piece]:
        rows = [
            (k, visible(a.token), a.logit, visible(b.token), b.logit)
            for k, (a, b) in enumerate(zip(self.highest, self.opposite, strict=True), start=1)
        ]
        columns = ["rank", "direction", "logit", "opposite", "logit"]
        return [Table(columns, rows, limit=100, more=".to_frame()"), Remarks([_BOTH])]


@dataclass(frozen=True, repr=False)
class LayerTopTokens(Shown):
    """The tokens that the vector of each layer raises most.

    Attributes:
        by_layer: per layer, in order.
    """

    by_layer: dict[int, TopTokens]

    def __getitem__(self, layer: int) -> TopTokens:
        return self.by_layer[layer]

    def __len__(self) -> int:
        return len(self.by_layer)

    def to_frame(self) -> "pd.DataFrame":
        """The rows of `TopTokens.to_frame`, each with its `layer`."""
        import pandas as pd

        frames = [found.to_frame() for found in self.by_layer.values()]
        for layer, frame in zip(self.by_layer, frames, strict=True):
            frame.insert(0, "layer", layer)
        return pd.concat(frames, ignore_index=True)

    def _finding(self) -> str:
        best = ", ".join(f"{layer} {found.tokens[0]!r}" for layer, found in list(self.by_layer.items())[:8])
        return f"highest token of layer {best}{' …' if len(self) > 8 else ''}"

    def _pieces(self) -> Sequence[Piece]:
        logits = torch.tensor([[one.logit for one in found] for found in self.by_layer.values()]).numpy()
        texts = [[visible(one.token) for one in found] for found in self.by_layer.values()]
        ranks = [str(k + 1) for k in range(logits.shape[1])]
        layers, colors = [f"layer {layer}" for layer in self.by_layer], sequential(logits.ravel())
        return [Grid(layers, ranks, logits, colors, "logit", texts, "layers down, ranks across", ".to_frame()")]


def top_tokens(vector: SteeringVector, engine: Any, k: Integer = 10) -> TopTokens:
    """See `SteeringVector.top_tokens`."""
    (found,) = _found([vector], engine, k)
    return found


def layer_top_tokens(vectors: Sequence[SteeringVector], engine: Any, k: Integer = 10) -> LayerTopTokens:
    """See `VectorSet.top_tokens`."""
    return LayerTopTokens({v.layer: found for v, found in zip(vectors, _found(vectors, engine, k), strict=True)})


def check_streams(streams: Tensor, info: ModelInfo) -> Tensor:
    """The streams themselves, if they are [rows, d_model].

    Raises:
        VectorShapeError: otherwise.
    """
    if streams.dim() != 2 or streams.shape[1] != info.d_model:
        raise VectorShapeError(
            f"Streams to unembed are [rows, {info.d_model}] for {info.name}, got {list(streams.shape)}."
        )
    return streams


def check_unembeds(engine: object) -> None:
    """Checks that an engine can apply its model's final norm and unembedding.

    Raises:
        InputError: otherwise.
    """
    if not isinstance(engine, UnembeddingEngine):
        raise InputError(
            f"{type(engine).__name__} cannot apply its unembedding to a vector; load the model with sl.load(name)."
        )


def highest_tokens(tokenizer: Any, logits: Tensor, k: int) -> list[tuple[TokenLogit, ...]]:
    """Per row of logits [rows, d_vocab] the k highest tokens."""
    found = logits.float().topk(min(k, logits.shape[-1]), dim=-1)
    return [
        tuple(TokenLogit(token_text(tokenizer, token), token, logit) for token, logit in zip(ids, values, strict=True))
        for ids, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def _found(vectors: Sequence[SteeringVector], engine: Any, k: Integer) -> list[TopTokens]:
    check_unembeds(engine)
    number = check_integer(k, "k", least=1)
    units = torch.stack([vector.unit for vector in vectors])
    rows = highest_tokens(engine.tokenizer, engine.unembed(torch.cat([units, -units])), number)
    sides = zip(vectors, rows[: len(vectors)], rows[len(vectors) :], strict=True)
    return [TopTokens(v.name or v.hook_point.name, up, down) for v, up, down in sides]
