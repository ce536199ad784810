"""The logit lens: what each layer's stream would predict, were it the last."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steerlab.core._numbers import Integer, check_integer
from steerlab.core._spelling import token_text
from steerlab.core._text import PromptLike, encode_prompt, is_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.display import Grid, Piece, Scale, Shown, count, visible
from steerlab.steering.plan import Plan
from steerlab.steering.top_tokens import check_unembeds

if TYPE_CHECKING:
    import pandas as pd

_ROWS = 64  # of logits held at once


@dataclass(frozen=True, repr=False)
class LogitLens(Shown):
    """The most probable next tokens after every token, by the stream of every layer.

    Attributes:
        tokens: what each token of the text spells.
        layers: the layers.
        token_ids: the most probable next tokens, the first first; shape [tokens, layers, k].
        probs: their probabilities, likewise.
        spelled: what those tokens spell, by id.
    """

    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    token_ids: np.ndarray = field(repr=False)
    probs: np.ndarray = field(repr=False)
    spelled: dict[int, str] = field(repr=False)

    def to_frame(self) -> "pd.DataFrame":
        """A row per token of the text, layer and rank: `position`, `token`, `layer`, `rank`, `next_token`, `prob`."""
        import pandas as pd

        n_tokens, n_layers, k = self.token_ids.shape
        position, layer, rank = (part.ravel() for part in np.indices((n_tokens, n_layers, k)))
        return pd.DataFrame(
            {
                "position": position,
                "token": [self.tokens[t] for t in position],
                "layer": [self.layers[n] for n in layer],
                "rank": rank + 1,
                "next_token_id": self.token_ids.ravel(),
                "next_token": [self.spelled[token] for token in self.token_ids.ravel().tolist()],
                "prob": self.probs.ravel(),
            }
        )

    def _finding(self) -> str:
        last = self.spelled[int(self.token_ids[-1, -1, 0])]
        same = self.token_ids[-1, :, 0] == self.token_ids[-1, -1, 0]
        first = self.layers[int(np.flatnonzero(~same).max(initial=-1)) + 1]
        size = f"{count(len(self.tokens), 'token')} × {count(len(self.layers), 'layer')}"
        return f"{size}; after the last token {last!r}, from layer {first} on"

    def _pieces(self) -> Sequence[Piece]:
        texts = [[visible(self.spelled[token]) for token in row] for row in self.token_ids[:, :, 0].tolist()]
        layers, colors = [str(layer) for layer in self.layers], Scale(0.0, 1.0, False)
        corner = "tokens down, layers across: the most probable next token"
        tokens, probs = list(map(visible, self.tokens)), self.probs[:, :, 0]
        return [Grid(tokens, layers, probs, colors, "probability", texts, corner, ".to_frame()")]


@torch.no_grad()
def logit_lens(
    engine: Engine,
    text: PromptLike,
    *,
    layers: Any = "all",
    plan: Plan | None = None,
    k: Integer = 5,
    chat: bool = False,
) -> LogitLens:
    """Reads the stream after every layer through the model's final norm and unembedding.

    Args:
        engine: what runs the model.
        text: a text, chat messages or token ids.
        layers: the layers: `all`, an index or several.
        plan: a plan that is active meanwhile; the whole text counts as a prompt, as in `capture`.
        k: how many next tokens are kept.
        chat: take a string as a user turn of a chat.

    Returns:
        A `LogitLens`; a notebook shows the most probable next token after each token at each layer. At the last layer
        it is the model's own prediction.

    Raises:
        InputError: for several texts, or an engine that cannot apply its unembedding.

    Examples:
        >>> from steerlab.engines.toy import ToyEngine
        >>> logit_lens(ToyEngine(), "abc", k=2).token_ids.shape
        (3, 3, 2)

    Source:
        nostalgebraist 2020, interpreting GPT: the logit lens.
    """
    check_unembeds(engine)
    if not is_prompt(text):
        raise InputError(f"logit_lens takes one text, chat messages or token ids, got {text!r:.60}.")
    number = min(check_integer(k, "k", least=1), engine.info.d_vocab)
    ids = encode_prompt(engine.tokenizer, text, chat=chat, d_vocab=engine.info.d_vocab).token_ids
    found = engine.capture([list(ids)], layers=layers, plan=plan)
    streams = torch.stack([found.of(0, layer) for layer in found.layers], dim=1)
    best = [_best(engine, rows, number) for rows in streams.flatten(0, 1).split(_ROWS)]
    shape = (len(ids), len(found.layers), number)
    probs, chosen = (torch.cat(part).reshape(shape).numpy() for part in zip(*best, strict=True))
    spelled = {token: token_text(engine.tokenizer, token) for token in sorted(set(chosen.ravel().tolist()))}
    tokens = tuple(token_text(engine.tokenizer, token) for token in ids)
    return LogitLens(tokens, found.layers, chosen, probs, spelled)


def _best(engine: Any, streams: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the k most probable tokens of each row."""
    found = engine.unembed(streams).softmax(dim=-1).topk(k, dim=-1)
    return found.values, found.indices
