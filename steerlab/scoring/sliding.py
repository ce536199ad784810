"""Perplexity of texts in sliding windows: token-weighted, every token scored exactly once."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steerlab.core._arguments import explains_arguments
from steerlab.core._progress import progress
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, RunError
from steerlab.core.results import exp_or_inf
from steerlab.display import Facts, Histogram, Piece, Shown, count, figure
from steerlab.measures.quantities import LogDistribution, TokenLogProb
from steerlab.scoring._journal import Journal, Record
from steerlab.scoring._source import TextLike, count_tokens
from steerlab.scoring._stream import TextWindows, batched, window_values
from steerlab.scoring.distributions import DistributionDtype, DistributionWriter, announce
from steerlab.scoring.texts import window_nlls
from steerlab.scoring.windows import TextWindow, WindowSizes, window_sizes

BATCH_TOKENS = 1 << 15  # per call of an engine that states no budget of its own
WINDOW_BYTES = 4 << 30  # of one window's distributions in memory


@dataclass(frozen=True, repr=False)
class Perplexity(Shown):
    """How well a model predicts a text.

    Attributes:
        nll: mean negative log-probability per scored token, in nats.
        num_tokens: tokens scored.
        num_bytes: UTF-8 bytes of the text that the scored tokens stand for: names of special tokens in it count as they
            are written, special tokens among token ids count none; a character split over the first, unscored
            token and the next counts whole.
        context_length: tokens per window.
        stride: new tokens per window.
        token_nlls: negative log-probability of each scored token, in nats, float32, in order.
        dtype: of the weights and activations that it was computed with, e.g. `bfloat16`.
    """

    nll: float
    num_tokens: int
    num_bytes: int
    context_length: int
    stride: int
    token_nlls: np.ndarray = field(repr=False)
    dtype: str | None = None

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-probability per token; infinite past the largest float."""
        return exp_or_inf(self.nll)

    @property
    def bits_per_byte(self) -> float:
        """Total negative log-probability in bits, per byte of scored text; NaN if the tokens spell no text."""
        total = self.nll * self.num_tokens / math.log(2)
        return total / self.num_bytes if self.num_bytes else math.nan

    def _finding(self) -> str:
        tokens = count(self.num_tokens, "token")
        return f"{figure(self.perplexity, 4)} per token, {figure(self.bits_per_byte)} bits per byte, {tokens}"

    def _pieces(self) -> Sequence[Piece]:
        windows = f"{count(self.context_length, 'token')}, a new one every {figure(self.stride)}"
        facts = Facts(
            [
                ("perplexity per token", figure(self.perplexity, 4)),
                ("nats per token", self.nll),
                ("bits per byte", self.bits_per_byte),
                ("tokens scored", self.num_tokens),
                ("windows", windows),
                ("dtype", self.dtype),
            ]
        )
        return [facts, Histogram({"tokens": self.token_nlls.tolist()}, "−log p of each token (nats)")]


@explains_arguments
def perplexity(
    engine: Engine,
    text_or_ids: TextLike,
    *,
    context_length: int | None = None,
    stride: int | None = None,
    bos_each_window: bool = False,
    plan: Any = None,
    resume: str | Path | None = None,
    distributions: str | Path | None = None,
    distribution_dtype: DistributionDtype = "float16",
    batch_tokens: int | None = None,
) -> Perplexity:
    """Perplexity of one text: exp(Σ nll / N) over all its tokens but the first.

    With a plan the text's first token counts as the prompt and the rest as generated, so that the default positions
    edit every token. Positions that would mean something else in a later window (`index`, `prompt`, a stretch of
    `generated`) are refused if the text needs several windows.

    Windows run in batches, and of each token only its score is kept, so a text may be longer than memory: pass its
    path, or an iterator over it in chunks.

    Args:
        engine: the engine to score with.
        text_or_ids: the text, its token ids, the path of a text file, or an iterator of strings that make up the text.
        context_length: tokens per window; the model's context by default.
        stride: new tokens per window; the context length by default.
        bos_each_window: put BOS before every window; the text's first token is then scored too.
        plan: a plan, or None.
        resume: a file (or a folder for it) to which finished windows are written; with the same file, model, text,
            plan and windows a later call goes on where an earlier one ended.
        distributions: a folder into which the full next-token distribution at every scored position is written, one
            file per window; `steerlab.scoring.read_distributions` reads them. Their size is logged before the start.
        distribution_dtype: `float16` or `float32` on disk.
        batch_tokens: tokens per call of the engine; its own budget by default.

    Raises:
        PromptError: for a text too short to score, several texts, or a text that cannot be tokenised in pieces.
        InputError: for a context or stride outside its range, `bos_each_window` on a model without BOS, or
            distributions that have no room.
        PlanError: for positions that several windows cannot honour.
        RunError: if the file to resume from belongs to another measurement, or is in use.

    Source:
        Jelinek et al. 1977, Perplexity: a measure of the difficulty of speech recognition tasks.
    """
    sizes = window_sizes([engine], context_length, stride, bos_each_window=bos_each_window)
    text = TextWindows(engine, text_or_ids, sizes, plan)
    fingerprint = _fingerprint(engine, plan, sizes, text.source.identity, distributions and distribution_dtype)
    with ExitStack() as stack:
        journal = None if resume is None else stack.enter_context(Journal(resume, fingerprint))
        writer = None
        if distributions is not None:
            n_tokens = _total(engine, text, text_or_ids)
            _check_window(engine, sizes)
            writer = DistributionWriter(distributions, distribution_dtype, fingerprint, resume=resume is not None)
            writer.require(record.first_scored for record in (journal.records if journal else ()))
            announce(distributions, n_tokens, engine.info.d_vocab, distribution_dtype)
        budget = 1 if writer else batch_tokens or max(getattr(engine, "batch_tokens", BATCH_TOKENS), sizes.context)
        bar = stack.enter_context(progress(text.n_scored, "perplexity", "token"))
        nlls = list(_resumed(text, journal, bar.update))
        for batch in batched(iter(text), budget):
            found = _score(engine, batch, sizes, plan, writer)
            nlls.append(found)
            if journal is not None:
                journal.append(Record(batch[0].first_scored, batch[-1].stop, batch[-1].digest, found))
            bar.update(len(found))
        if writer is not None:
            writer.finish(sum(map(len, nlls)))
    return _summary(np.concatenate(nlls), text.num_bytes, sizes, engine.info.dtype)


def _resumed(text: TextWindows, journal: Journal | None, progress: Any) -> Iterator[np.ndarray]:
    """The scores of windows that an earlier run finished; the text is advanced past them.

    Raises:
        RunError: if the text is not the one that they were measured on.
    """
    for record in journal.records if journal else ():
        first = last = text.take()
        while last is not None and last.stop < record.stop:
            last = text.take()
        if (
            first is None
            or last is None
            or last.digest != record.digest
            or (first.first_scored, last.stop) != (record.first_scored, record.stop)
        ):
            raise RunError(
                f"{journal and journal.path} belongs to another text: it differs before token {record.stop}. "
                "Name another file to resume from, or delete this one."
            )
        progress(len(record.nlls))
        yield record.nlls


def _score(
    engine: Any, batch: Sequence[TextWindow], sizes: WindowSizes, plan: Any, writer: DistributionWriter | None
) -> np.ndarray:
    """Negative log-probabilities of the tokens that a batch scores, float32; distributions go to the writer."""
    if writer is None:
        rows = [(sizes.prefix + part.ids, part.n_scored) for part in batch]
        return np.concatenate(window_nlls(engine, rows, plan)).astype(np.float32)
    (part,) = batch
    n_scored = part.n_scored
    quantities = {"log_prob": TokenLogProb(), "distribution": LogDistribution()}
    found = window_values(engine, sizes.prefix + part.ids, n_scored, quantities, plan)
    writer.write(part.first_scored, part.ids[-n_scored:], torch.as_tensor(found["distribution"]))
    return -found["log_prob"].astype(np.float32)


def _fingerprint(engine: Engine, plan: Any, sizes: WindowSizes, text: str | None, dtype: Any) -> dict[str, Any]:
    info = engine.info
    return {
        "engine": type(engine).__name__,
        "weights": info.weights_hash,
        "weight_processing": info.weight_processing,
        "dtype": info.dtype,
        "plan": None if plan is None else plan.hash,
        "text": text,
        "context_length": sizes.context,
        "stride": sizes.stride,
        "bos_each_window": bool(sizes.prefix),
        "distributions": dtype,
    }


def _total(engine: Engine, text: TextWindows, given: TextLike) -> int:
    if text.n_scored is not None:
        return text.n_scored
    if isinstance(given, Path):
        return count_tokens(engine, given)
    raise InputError("The size of the distributions must be known before; pass a path or a string, not an iterator.")


def _check_window(engine: Engine, sizes: WindowSizes) -> None:
    size = 4 * sizes.context * engine.info.d_vocab
    if size > WINDOW_BYTES:
        fitting = WINDOW_BYTES // (4 * engine.info.d_vocab)
        raise InputError(
            f"The distributions of one window of {sizes.context} tokens take {size / 1e9:.1f} GB of memory; "
            f"choose a context_length of at most {fitting}."
        )


def _summary(nlls: np.ndarray, num_bytes: int, sizes: WindowSizes, dtype: str) -> Perplexity:
    return Perplexity(
        nll=math.fsum(nlls) / len(nlls),
        num_tokens=len(nlls),
        num_bytes=num_bytes,
        context_length=sizes.context,
        stride=sizes.stride,
        token_nlls=nlls,
        dtype=dtype,
    )
