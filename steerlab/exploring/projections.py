"""Projections on vectors: of the tokens of any text at every layer, and of both sides of contrast pairs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steerlab.core._hook_points import resolve_layers
from steerlab.core._spelling import token_text
from steerlab.core._text import PromptLike, encode_prompt, is_prompt
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError
from steerlab.display import Grid, Histogram, Piece, Shown, Table, count, diverging, figure, visible
from steerlab.steering.extraction.diagnostics import projection_auc
from steerlab.steering.extraction.extract import read_pairs
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where as positions
from steerlab.steering.positions.where import WhereLike, as_where
from steerlab.steering.vectors import SteeringVector, VectorSet, check_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd


@dataclass(frozen=True, repr=False)
class TextProjections(Shown):
    """u·h of every token of a text at several layers.

    Attributes:
        name: of the vector.
        tokens: what each token spells.
        layers: the layers.
        values: shape [tokens, layers].
    """

    name: str
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    values: np.ndarray = field(repr=False)

    def to_frame(self) -> "pd.DataFrame":
        """A row per token: `position`, `token`, and a column per layer."""
        import pandas as pd

        columns = {"position": range(len(self.tokens)), "token": self.tokens}
        return pd.DataFrame(columns | {layer: self.values[:, k] for k, layer in enumerate(self.layers)})

    def _finding(self) -> str:
        place = np.unravel_index(int(np.abs(self.values[self._scaled]).argmax()), self.values[self._scaled].shape)
        largest, layer = float(self.values[self._scaled][place]), self.layers[int(place[1])]
        token = self.tokens[int(place[0]) + self._scaled.start]
        size = f"{count(len(self.tokens), 'token')} × {count(len(self.layers), 'layer')}"
        return f"on {self.name}, {size}, farthest from 0: {figure(largest)} at {token!r}, layer {layer}"

    def _pieces(self) -> "Sequence[Piece]":
        colors = diverging(self.values[self._scaled].ravel().tolist())
        layers = [str(layer) for layer in self.layers]
        tokens, corner = list(map(visible, self.tokens)), "tokens down, layers across"
        return [Grid(tokens, layers, self.values, colors, "u·h", corner=corner, more=".to_frame()")]

    @property
    def _scaled(self) -> slice:
        """The tokens that set the scale: not the first, whose stream is often a hundred times as long as any other."""
        return slice(1 if len(self.tokens) > 1 else 0, len(self.tokens))


def project_text(
    engine: Engine,
    text: PromptLike,
    vectors: SteeringVector | VectorSet,
    *,
    layers: Any = "all",
    plan: Plan | None = None,
    chat: bool = False,
) -> TextProjections:
    """Projects the stream on a direction, token by token and layer by layer.

    Args:
        engine: what runs the model.
        text: a text, chat messages or token ids.
        vectors: a set, whose vectors are each used at its own layer; or one vector, used at every layer.
        layers: the layers: `all`, an index or several; of a set, those that it has.
        plan: a plan that is active meanwhile; the whole text counts as a prompt, as in `capture`.
        chat: take a string as a user turn of a chat.

    Returns:
        u·h per token and layer, u the unit vector, h the stream at the vector's site.

    Raises:
        InputError: for several texts, something else than vectors, or a set without the layers asked for.
        VectorMismatchError: for vectors of another width.

    Examples:
        >>> from steerlab.engines.toy import ToyEngine
        >>> v = SteeringVector.from_tensor([1.0] * 32, layer=1, name="ones")
        >>> project_text(ToyEngine(), "abc", v).values.shape
        (3, 3)
    """
    if not is_prompt(text):
        raise InputError(f"project_text takes one text, chat messages or token ids, got {text!r:.60}.")
    if not isinstance(vectors, SteeringVector | VectorSet):
        raise InputError(f"project_text takes a SteeringVector or a VectorSet, got {type(vectors).__name__}.")
    units = _units(vectors, layers, engine)
    site = vectors.site if isinstance(vectors, SteeringVector) else vectors.by_layer[0].site
    ids = encode_prompt(engine.tokenizer, text, chat=chat, d_vocab=engine.info.d_vocab).token_ids
    found = engine.capture([list(ids)], layers=list(units), site=site, plan=plan)
    columns = [(found.of(0, layer) @ unit).double().numpy() for layer, unit in units.items()]
    tokens = tuple(token_text(engine.tokenizer, token) for token in ids)
    name = vectors.name if isinstance(vectors, SteeringVector) else vectors.by_layer[0].name
    return TextProjections(name or "the vector", tokens, tuple(units), np.stack(columns, axis=1))


@dataclass(frozen=True, repr=False)
class PairProjections(Shown):
    """Projections of both sides of contrast pairs on a vector.

    Attributes:
        name: of the vector.
        positive: u·h per pair, shape [pairs].
        negative: the same for the other side.
    """

    name: str
    positive: np.ndarray = field(repr=False)
    negative: np.ndarray = field(repr=False)

    @property
    def auc(self) -> float:
        """Share of (positive, negative) prompts whose projections are in the right order; 0.5 is chance."""
        return projection_auc(torch.from_numpy(self.positive), torch.from_numpy(self.negative))

    @property
    def ordered(self) -> float:
        """Share of pairs whose positive side lies farther along the vector."""
        return float((self.positive > self.negative).mean())

    def to_frame(self) -> "pd.DataFrame":
        """A row per pair: `pair`, `positive`, `negative`."""
        import pandas as pd

        columns = {"pair": range(len(self.positive)), "positive": self.positive, "negative": self.negative}
        return pd.DataFrame(columns)

    def _finding(self) -> str:
        pairs = count(len(self.positive), "pair")
        return f"on {self.name}, AUC {figure(self.auc)}, {self.ordered:.0%} of {pairs} in the right order"

    def _pieces(self) -> "Sequence[Piece]":
        sides = {"positive": self.positive, "negative": self.negative}
        rows = [(name, float(x.mean()), float(x.std()), float(x.min()), float(x.max())) for name, x in sides.items()]
        shown = Histogram({name: x.tolist() for name, x in sides.items()}, f"projection on {self.name}, u·h")
        return [shown, Table(["side", "mean", "standard deviation", "smallest", "largest"], rows)]


def project_pairs(
    engine: Engine, pairs: ContrastPairs, vector: SteeringVector, *, read: WhereLike = None, chat: bool | None = None
) -> PairProjections:
    """Projects both sides of contrast pairs on a vector; in a notebook, two histograms over one axis.

    Args:
        engine: what runs the model.
        pairs: the pairs, best other ones than the vector was made from.
        vector: the direction.
        read: the positions whose mean is projected; by default those the vector was read at, else the last one.
        chat: take strings as user turns of a chat; by default as the vector was read.

    Raises:
        DataError: if these are no contrast pairs.
        InputError: for something else than one vector.
        VectorMismatchError: for a vector of another width.
    """
    if not isinstance(pairs, ContrastPairs):
        raise DataError(f"project_pairs takes ContrastPairs, got {type(pairs).__name__}.")
    if not isinstance(vector, SteeringVector):
        raise InputError(f"project_pairs takes one SteeringVector, e.g. vectors[14]; got {type(vector).__name__}.")
    check_width(vector, engine.info)
    card = vector.card
    own = positions.last_prompt() if card.read is None else positions.from_json(dict(card.read))
    where = as_where(read, own, argument="read")
    as_chat = card.chat if chat is None else chat
    options: Mapping[str, Any] = {"read": where, "pool": card.pool or "mean", "chat": as_chat}
    found = read_pairs(engine, pairs, site=vector.site, layers=vector.layer, **options)
    sides = [(side[vector.layer] @ vector.unit).double().numpy() for side in (found.positive, found.negative)]
    return PairProjections(vector.name or "the vector", *sides)


def _units(vectors: SteeringVector | VectorSet, layers: Any, engine: Engine) -> dict[int, torch.Tensor]:
    """The direction at each layer."""
    for vector in [vectors] if isinstance(vectors, SteeringVector) else vectors.by_layer:
        check_width(vector, engine.info)
    every = isinstance(layers, str) and layers == "all"
    if isinstance(vectors, SteeringVector):
        chosen = list(engine.traits.layers) if every else resolve_layers(layers, engine.info.n_layers)
        return {layer: vectors.unit for layer in chosen}
    chosen = list(vectors) if every else resolve_layers(layers, engine.info.n_layers)
    missing = [layer for layer in chosen if layer not in vectors]
    if missing or not chosen:
        raise InputError(
            f"There is no vector for layers {missing or 'asked for'}; there are vectors for {list(vectors)}."
        )
    return {layer: vectors[layer].unit for layer in chosen}
