"""What an engine returns: completions, scores and activations."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from steerlab.core._spelling import token_text
from steerlab.core._text import EncodedPair
from steerlab.core.errors import HookPointError, InputError, SteerlabError
from steerlab.core.receipts import Inherited, Receipt, Receipts, receipts_fold
from steerlab.core.token_sets import TokenSets
from steerlab.display import Piece, Remarks, Shown, Table, count, figure, shortened

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

ROWS_SHOWN = 50
"""Rows of a result that a notebook shows."""


@dataclass(frozen=True, repr=False)
class Completion(Shown):
    """One sampled continuation of one prompt.

    Attributes:
        text: the decoded continuation, special tokens left out; cut before a stop string if one ended it.
        token_ids: the sampled ids; the EOS or the token that completed a stop string is the last one.
        finish_reason: `eos`, `stop` (a stop string), `length`, or `error`.
        prompt_index: which prompt it continues.
        sample_index: which of the prompt's n samples it is.
        token_log_probs: log p of each sampled token under the model's softmax, in nats.
        token_log_qs: log q of each sampled token under the sampling policy, in nats (0 when greedy).
        supports: the set of tokens that each sampled token was drawn from; None unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["eos", "stop", "length", "error"]
    prompt_index: int
    sample_index: int
    token_log_probs: list[float]
    token_log_qs: list[float]
    supports: TokenSets | None = field(default=None, repr=False, compare=False)

    @property
    def log_q(self) -> float:
        """Log-probability of the whole completion under the sampling policy, in nats."""
        return math.fsum(self.token_log_qs)

    @property
    def log_prob(self) -> float:
        """Log-probability of the whole completion under the model, in nats."""
        return math.fsum(self.token_log_probs)

    def _finding(self) -> str:
        figures = f"{count(len(self.token_ids), 'token')}, log p {figure(self.log_prob)} nats"
        return f"{shortened(self.text)!r}, {figures}, ended by {self.finish_reason}"

    def _pieces(self) -> Sequence[Piece]:
        return [Table(["text"], [(self.text,)])]


@dataclass(frozen=True, repr=False)
class Generations(Shown, Sequence[Completion]):
    """Completions in order of prompt, then sample.

    Attributes:
        completions: the completions.
        prompt_token_ids: the ids that were run for each prompt, BOS and chat template included.
        engine: what ran: `bridge`, `fast`, `graph` or `compiled` on TransformerLens, joined by `+` if several;
            `vllm-v1` or `vllm-v2`.
        receipts: what the plan edited in each row; empty if nothing ran.
        errors: what was wrong with each prompt, by its index, that did not run to its end: its logits were not finite,
            or it could not run at all.
        inherited: per row, the edited positions that a prefix cache held, written under the same edits; empty on
            engines without one.
    """

    completions: tuple[Completion, ...]
    prompt_token_ids: tuple[tuple[int, ...], ...]
    engine: str = ""
    receipts: tuple[Receipt, ...] = field(default=(), repr=False, compare=False)
    errors: Mapping[int, SteerlabError] = field(default_factory=dict, repr=False, compare=False)
    inherited: tuple[Inherited, ...] = field(default=(), repr=False, compare=False)

    @overload
    def __getitem__(self, index: int) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Completion]: ...
    def __getitem__(self, index: int | slice) -> Completion | Sequence[Completion]:
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.completions)

    @property
    def texts(self) -> list[str]:
        """The text of every completion."""
        return [completion.text for completion in self.completions]

    def __post_init__(self) -> None:
        object.__setattr__(self, "receipts", Receipts(self.receipts))

    def _finding(self) -> str:
        ran = f" on {self.engine}" if self.engine else ""
        return f"{count(len(self), 'completion')} of {count(len(self.prompt_token_ids), 'prompt')}{ran}"

    def _pieces(self) -> Sequence[Piece]:
        edited = _edited(self.receipts, len(self))
        rows = [
            (c.prompt_index, c.sample_index, c.text, len(c.token_ids), c.finish_reason, c.log_prob, *edited[k])
            for k, c in enumerate(self.completions[:ROWS_SHOWN])
        ]
        columns = ["prompt", "sample", "text", "tokens", "ended by", "log p (nats)", *_edited_column(self.receipts)]
        table = Table(columns, rows, ROWS_SHOWN, more=".to_frame()", total=len(self))
        errors = [f"Prompt {index}: {error}" for index, error in list(self.errors.items())[:5]]
        return [Remarks(errors), table, *receipts_fold(self.receipts)]

    def to_frame(self) -> "pd.DataFrame":
        """A row per completion: prompt_index, sample_index, text, num_tokens, finish_reason, log_prob, log_q."""
        import pandas as pd

        columns = ["prompt_index", "sample_index", "text", "num_tokens", "finish_reason", "log_prob", "log_q"]
        rows = [
            (c.prompt_index, c.sample_index, c.text, len(c.token_ids), c.finish_reason, c.log_prob, c.log_q)
            for c in self.completions
        ]
        return pd.DataFrame(rows, columns=columns)


@dataclass(frozen=True, repr=False)
class Score(Shown):
    """The exact log-probability of one target after one prompt.

    Attributes:
        prompt_index: which prompt.
        target_index: which of the prompt's targets.
        token_ids: the ids scored.
        token_log_probs: log p of each, given all before it, in nats.
        boundary: `clean`, or `merged` if the tokenizer joined prompt and target across the cut.
        variant: the prefix that was put before the target's text to make the string that was scored.
        num_bytes: UTF-8 bytes of the target's text, or of what a target of ids spells, special tokens none; after a
            merged boundary the prompt's characters that were scored again count too. None if the engine has no
            tokenizer.
    """

    prompt_index: int
    target_index: int
    token_ids: tuple[int, ...]
    token_log_probs: tuple[float, ...]
    boundary: Literal["clean", "merged"]
    variant: str = ""
    num_bytes: int | None = None

    @classmethod
    def of_pair(cls, prompt_index: int, target_index: int, pair: EncodedPair, log_probs: Iterable[float]) -> "Score":
        """The score of a pair, given the log p of each of its target tokens in nats."""
        return cls(
            prompt_index,
            target_index,
            pair.target_ids,
            tuple(log_probs),
            pair.boundary,
            variant=pair.variant,
            num_bytes=pair.num_bytes,
        )

    @property
    def log_prob(self) -> float:
        """Log-probability of the whole target, in nats."""
        return math.fsum(self.token_log_probs)

    @property
    def num_tokens(self) -> int:
        """How many tokens were scored."""
        return len(self.token_ids)

    @property
    def mean_log_prob(self) -> float:
        """Log-probability per token, in nats."""
        return self.log_prob / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Exp of minus the mean log-probability: per token; infinite past the largest float."""
        return exp_or_inf(-self.mean_log_prob)

    @property
    def bits_per_byte(self) -> float:
        """Minus the log-probability in bits, per byte of scored text; NaN if the tokens spell none, or are unread."""
        return -self.log_prob / math.log(2) / self.num_bytes if self.num_bytes else math.nan

    def _finding(self) -> str:
        figures = f"log p {figure(self.log_prob)} nats, {count(self.num_tokens, 'token')}"
        return f"{figures}, perplexity {figure(self.perplexity)}, {self.boundary} boundary"

    def _pieces(self) -> Sequence[Piece]:
        return Scores((self,))._pieces()


@dataclass(frozen=True, repr=False)
class Scores(Shown, Sequence[Score]):
    """Scores in order of prompt, then target, then variant.

    `scores[k]` is the k-th of them; `scores.log_prob` and its like are arrays over all, in the same order.

    Attributes:
        rows: the scores.
        dtype: of the weights and activations that they were computed with, e.g. `bfloat16`; frames carry it in `attrs`.
        receipts: what the plan edited in each row; empty where scores were not made by this call but read from a run.
        inherited: per row, the edited positions that a prefix cache held, written under the same edits; empty on
            engines without one.
    """

    rows: tuple[Score, ...]
    dtype: str | None = None
    receipts: tuple[Receipt, ...] = field(default=(), repr=False, compare=False)
    inherited: tuple[Inherited, ...] = field(default=(), repr=False, compare=False)

    @overload
    def __getitem__(self, index: int) -> Score: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Score]: ...
    def __getitem__(self, index: int | slice) -> Score | Sequence[Score]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Score]:
        return iter(self.rows)

    def of(self, prompt_index: int) -> list[Score]:
        """The scores of one prompt, in order of its targets."""
        return [row for row in self.rows if row.prompt_index == prompt_index]

    def __post_init__(self) -> None:
        object.__setattr__(self, "receipts", Receipts(self.receipts))

    def _finding(self) -> str:
        prompts = count(len({row.prompt_index for row in self.rows}), "prompt")
        weights = f", {self.dtype}" if self.dtype else ""
        first = f", log p {figure(self.rows[0].log_prob)} nats" if len(self.rows) == 1 else ""
        return f"{count(len(self.rows), 'target')} of {prompts}{first}{weights}"

    def _pieces(self) -> Sequence[Piece]:
        shown = {
            "prompt_index": "prompt",
            "target_index": "target",
            **dict.fromkeys(self._variant_column, "variant"),
            "log_prob": "log p (nats)",
            "num_tokens": "tokens",
            "mean_log_prob": "per token",
            "perplexity": "perplexity",
            "bits_per_byte": "bits per byte",
            "boundary": "boundary",
        }
        edited = _edited(self.receipts, len(self))
        rows = [(*(getattr(row, name) for name in shown), *edited[k]) for k, row in enumerate(self.rows[:ROWS_SHOWN])]
        columns = [*shown.values(), *_edited_column(self.receipts)]
        table = Table(columns, rows, ROWS_SHOWN, more=".to_frame()", total=len(self))
        return [table, *receipts_fold(self.receipts)]

    @property
    def log_prob(self) -> np.ndarray:
        """Log-probability of each target, in nats, shape [pairs]."""
        return np.array([row.log_prob for row in self.rows])

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens scored in each target, shape [pairs]."""
        return np.array([row.num_tokens for row in self.rows])

    @property
    def mean_log_prob(self) -> np.ndarray:
        """Log-probability per token of each target, in nats, shape [pairs]."""
        return np.array([row.mean_log_prob for row in self.rows])

    @property
    def perplexity(self) -> np.ndarray:
        """Perplexity per token of each target, shape [pairs]."""
        return np.array([row.perplexity for row in self.rows])

    @property
    def bits_per_byte(self) -> np.ndarray:
        """Bits per byte of scored text of each target, shape [pairs]; NaN where the tokens spell no text."""
        return np.array([row.bits_per_byte for row in self.rows])

    @property
    def boundary(self) -> list[str]:
        """`clean` or `merged`, per pair."""
        return [row.boundary for row in self.rows]

    @property
    def variant(self) -> list[str]:
        """The prefix that was put before the target's text, per pair."""
        return [row.variant for row in self.rows]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The ids scored, per pair."""
        return [row.token_ids for row in self.rows]

    @property
    def token_log_probs(self) -> list[tuple[float, ...]]:
        """Log p of each scored token in nats, per pair."""
        return [row.token_log_probs for row in self.rows]

    def to_frame(self) -> "pd.DataFrame":
        """A row per (prompt, target), with its indices, the four figures, and the boundary.

        A last column `variant` is there if a variant other than "" was scored; rows are then per (prompt, target,
        variant).
        """
        import pandas as pd

        columns = [
            "prompt_index",
            "target_index",
            "log_prob",
            "num_tokens",
            "mean_log_prob",
            "perplexity",
            "boundary",
            *self._variant_column,
        ]
        frame = pd.DataFrame([[getattr(row, name) for name in columns] for row in self.rows], columns=columns)
        frame.attrs["dtype"] = self.dtype
        return frame

    def tokens_frame(self, tokenizer: Any = None) -> "pd.DataFrame":
        """A row per scored token: prompt_index, target_index, position, token_id, log_prob, surprisal_bits.

        `position` counts from 0 in the target; `log_prob` is in nats. A column `token` holds each token's text if a
        tokenizer is given, and `variant` is there as in `to_frame`.

        Args:
            tokenizer: the model's own, e.g. `engine.tokenizer`.

        Examples:
            >>> Scores((Score(0, 0, (7, 9), (-0.5, -1.0), "clean"),)).tokens_frame().position.tolist()
            [0, 1]
        """
        import pandas as pd

        variant = self._variant_column
        columns = ["prompt_index", "target_index", *variant, "position", "token_id", "log_prob"]
        rows = [
            (*(getattr(row, name) for name in columns[: 2 + len(variant)]), position, token_id, log_prob)
            for row in self.rows
            for position, (token_id, log_prob) in enumerate(zip(row.token_ids, row.token_log_probs, strict=True))
        ]
        frame = pd.DataFrame(rows, columns=columns)
        frame.attrs["dtype"] = self.dtype
        frame["surprisal_bits"] = -frame.log_prob / math.log(2)
        if tokenizer is not None:
            spelled = {token: token_text(tokenizer, token) for token in frame.token_id.unique().tolist()}
            frame.insert(columns.index("log_prob"), "token", frame.token_id.map(spelled))
        return frame

    @property
    def _variant_column(self) -> list[str]:
        return ["variant"] if any(row.variant for row in self.rows) else []


class Measured(list[dict[str, np.ndarray]]):
    """What `measure` found, a dictionary per (prompt, target): name → array [target tokens] or [target tokens, values].

    Attributes:
        receipts: what the plan edited in each row.
        inherited: per row, the edited positions that a prefix cache held; empty on engines without one.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, np.ndarray]] = (),
        receipts: Sequence[Receipt] = (),
        inherited: Sequence[Inherited] = (),
    ) -> None:
        super().__init__(rows)
        self.receipts = Receipts(receipts)
        self.inherited = tuple(inherited)


@dataclass(frozen=True, repr=False)
class Activations(Shown):
    """Activations of the stream, of sublayers or of attention heads, read at chosen positions.

    Attributes:
        site: the site they were read at.
        layers: the layers, in the order of `values`.
        values: per layer, a float32 tensor on the CPU: [prompts, d_model] if pooled; else [positions, d_model], all
            prompts one after the other (`of` cuts out one prompt). At the site `z`, [..., head, d_head].
        positions: per prompt, the absolute positions that were read.
        pool: how positions were pooled (`mean`, `last`), or None.
        prompt_token_ids: the ids that were run for each prompt.
        completion_token_ids: the ids generated after each prompt, if the capture generated.
        receipts: what the plan edited in each row.
        inherited: per row, the edited positions that a prefix cache held; empty on engines without one.
    """

    site: str
    layers: tuple[int, ...]
    values: tuple["Tensor", ...]
    positions: tuple[tuple[int, ...], ...]
    pool: str | None
    prompt_token_ids: tuple[tuple[int, ...], ...] = field(repr=False)
    completion_token_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    receipts: tuple[Receipt, ...] = field(default=(), repr=False, compare=False)
    inherited: tuple[Inherited, ...] = field(default=(), repr=False, compare=False)

    def __getitem__(self, layer: int) -> "Tensor":
        """The values of one layer.

        Raises:
            HookPointError: if that layer was not captured.
        """
        if layer not in self.layers:
            raise HookPointError(f"Layer {layer} was not captured; captured layers: {list(self.layers)}.")
        return self.values[self.layers.index(layer)]

    def of(self, prompt_index: int, layer: int) -> "Tensor":
        """One prompt's activations at one layer: [d_model] if pooled, else [positions, d_model]."""
        if self.pool is not None:
            return self[layer][prompt_index]
        start, stop = self._cuts[prompt_index]
        return self[layer][start:stop]

    def __post_init__(self) -> None:
        object.__setattr__(self, "receipts", Receipts(self.receipts))

    def _finding(self) -> str:
        layers = ", ".join(map(str, self.layers))
        read = f"{self.pool} of positions" if self.pool else count(sum(map(len, self.positions)), "position")
        n_prompts = count(len(self.prompt_token_ids), "prompt")
        return f"{self.site} of layer{'s' * (len(self.layers) > 1)} {layers}, {n_prompts}, {read}"

    def _pieces(self) -> Sequence[Piece]:
        norms = [values.norm(dim=-1) for values in self.values]
        rows = [
            (layer, " × ".join(map(str, values.shape)), float(norm.median()), float(norm.max()))
            for layer, values, norm in zip(self.layers, self.values, norms, strict=True)
        ]
        table = Table(["layer", "shape", "median norm", "largest norm"], rows)
        return [table, *receipts_fold(self.receipts)]

    @cached_property
    def _cuts(self) -> list[tuple[int, int]]:
        """Where each prompt's positions begin and end in `values`."""
        stops = list(accumulate(len(row) for row in self.positions))
        return list(pairwise([0, *stops]))

    def stack(self) -> "Tensor":
        """All layers as one tensor: [n_layers, prompts, d_model] if pooled, else [n_layers, positions, d_model]."""
        import torch

        return torch.stack(self.values)


def _edited(receipts: Sequence[Receipt], n_rows: int) -> list[tuple[int, ...]]:
    """The column of edited tokens, empty where no row was steered."""
    return [(receipt.edited,) for receipt in receipts] if _edited_column(receipts) else [()] * n_rows


def _edited_column(receipts: Sequence[Receipt]) -> list[str]:
    return ["edited tokens"] if any(receipt.edits for receipt in receipts) else []


def exp_or_inf(value: float) -> float:
    """The exponential, infinite where a float cannot hold it."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def check_pool(pool: str | None) -> str | None:
    """The pooling itself, if it is None, `mean` or `last`.

    Raises:
        InputError: otherwise.
    """
    if pool not in (None, "mean", "last"):
        raise InputError(f"pool is None, 'mean' or 'last', got {pool!r}.")
    return pool
