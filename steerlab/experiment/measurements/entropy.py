"""Entropy and divergence: the next-token distributions of both arms, position by position, on the same text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from steerlab.core._progress import progress
from steerlab.core._spelling import token_text
from steerlab.core._text import PromptLike
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.experiment._blocks import Block, Folded, Paragraph, Plots, Section, TokenText
from steerlab.experiment._blocks.findings import conditions, frame_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import count, table_of
from steerlab.experiment._store.cells import Cell, StoredCell
from steerlab.experiment._store.plans import resolved, stored_plan
from steerlab.experiment._store.results import frame_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import Session
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.texts import neutral_texts
from steerlab.measures.divergence import kl
from steerlab.measures.entropy import entropy
from steerlab.measures.intervals import cluster_t_mean
from steerlab.measures.log_probs import chosen_log_probs
from steerlab.measures.nucleus import policy_log_probs
from steerlab.measures.overlap import jaccard, kept_share
from steerlab.measures.quantities import LogDistribution
from steerlab.scoring import TextWindow, text_windows
from steerlab.scoring.texts import check_window_positions
from steerlab.steering.plan import Plan

MAX_TOKENS = 400
QUANTITIES = {
    "base": "policy entropy, unsteered (nats)",
    "steered": "policy entropy, steered (nats)",
    "change": "change of policy entropy (nats)",
    "raw_base": "model entropy, unsteered (nats)",
    "raw_steered": "model entropy, steered (nats)",
    "raw_change": "change of model entropy (nats)",
    "kl": "KL(steered‖base) of the model (nats)",
    "policy_kl": "KL(steered‖base) of the policy (nats)",
    "kept": "share of the unsteered nucleus kept",
    "jaccard": "overlap of both nuclei (Jaccard)",
    "policy_kl_infinite": "share of tokens with infinite policy KL",
    "policy_kl_finite": "policy KL over the other tokens (nats)",
}
LOGIT_BYTES = 256 << 20
SUMMARISED = (
    "base",
    "steered",
    "change",
    "raw_base",
    "raw_steered",
    "raw_change",
    "kl",
    "policy_kl",
    "kept",
    "jaccard",
)


def entropy_change(
    engine: Engine,
    plan: Plan | None,
    texts: Sequence[PromptLike],
    policy: SamplingPolicy,
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> pd.DataFrame:
    """Entropies and divergences of the next-token distributions of both arms, teacher-forced on the same texts.

    Args:
        engine: the engine.
        plan: the plan of the steered arm.
        texts: texts of at least two tokens; the first token counts as the prompt.
        policy: the sampling policy of `base`, `steered`, `policy_kl`, `kept` and `jaccard`.
        logit_bytes: bytes of logits kept at once, both arms together, beside those of the engine's own passes; long
            texts run in stretches to stay below.

    Returns:
        A row per text and token but the first: `text`, `position`, `token_id`; entropy of the policy's distribution,
        `base` and `steered`; of the model's, `raw_base` and `raw_steered`; log p of the token, `log_prob_base` and
        `log_prob_steered`; KL(steered ‖ base) of the model's distributions, `kl`, and of the policy's, `policy_kl`
        (infinite where the steered nucleus holds a token that the base nucleus lacks); of the base nucleus the share
        kept, `kept`, and the Jaccard overlap of both nuclei, `jaccard`. Entropies and divergences are in nats.

    Raises:
        PolicyError: for a policy with a repetition penalty, whose distribution depends on all tokens before.
        PlanError: for positions that the windows of a text longer than the context cannot honour.
        PromptError: for a text of fewer than two tokens.
        InputError: for a `logit_bytes` that holds not one row; on vLLM, not the longest text.
    """
    if policy.repetition_penalty != 1:
        raise PolicyError("Entropy on given text does not cover repetition_penalty; use a policy without it.")
    d_vocab = engine.info.d_vocab
    room = logit_bytes // (2 * 4 * d_vocab)
    if room < 1:
        raise InputError(f"Two rows of {d_vocab} logits need {8 * d_vocab} bytes; logit_bytes is {logit_bytes}.")
    windows = text_windows(engine, texts)
    check_window_positions(plan, windows)
    batches = list(_batches(windows, room))
    _check_room(engine, windows, room, d_vocab)
    frames = []
    with progress(len(batches), "entropy", "batch") as bar:
        for batch in batches:
            base, steered = _logits(engine, batch, None), _logits(engine, batch, plan)
            frames += [
                _rows(stretch, before, after, policy, max(1, room // 32))
                for stretch, before, after in zip(batch, base, steered, strict=True)
            ]
            bar.update()
    return pd.concat(frames, ignore_index=True)


def entropy_by_text(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over the tokens of each text.

    Args:
        rows: as `entropy_change` makes them.

    Returns:
        A row per text: `text`, `num_tokens`, the mean of every figure and of the changes `change` = steered − base and
        `raw_change`; `policy_kl_infinite`, the share of tokens whose policy KL is infinite, and `policy_kl_finite`, the
        mean over the others (NaN if there are none).
    """
    grouped = _with_changes(rows).groupby("text")
    names = [*SUMMARISED, "policy_kl_infinite", "policy_kl_finite"]
    means: Any = grouped[names].mean()
    means.insert(0, "num_tokens", grouped.size())
    return means.reset_index()


def entropy_summary(rows: pd.DataFrame, *, level: float = 0.95) -> pd.DataFrame:
    """Means over all tokens, with intervals by Student's t over texts.

    Args:
        rows: as `entropy_change` makes them.
        level: coverage of the intervals.

    Returns:
        A row per figure of `entropy_by_text`: `quantity`, `mean`, `low`, `high`, `num_tokens`, `num_texts`. Ends are
        NaN for a single text, and where the mean is infinite.
    """
    table = _with_changes(rows)
    found = []
    for name in (*SUMMARISED, "policy_kl_infinite", "policy_kl_finite"):
        part: Any = table[table[name].notna()]
        values, texts = part[name].to_numpy(dtype=float), part.text.astype(str).tolist()
        low = high = math.nan
        if len(values) and np.isfinite(values).all():
            interval = cluster_t_mean(values, texts, level=level)
            low, high = interval.low, interval.high
        found.append((name, float(values.mean()) if len(values) else math.nan, low, high, len(values), len(set(texts))))
    return pd.DataFrame(found, columns=["quantity", "mean", "low", "high", "num_tokens", "num_texts"])


def _with_changes(rows: pd.DataFrame) -> pd.DataFrame:
    infinite = np.isinf(rows.policy_kl)
    return rows.assign(
        change=rows.steered - rows.base,
        raw_change=rows.raw_steered - rows.raw_base,
        policy_kl_infinite=infinite.astype(float),
        policy_kl_finite=rows.policy_kl.mask(infinite),
    )


@dataclass(frozen=True)
class _Stretch:
    """Scored tokens start … stop−1 of a window, counted from 0 at its second token."""

    window: TextWindow
    start: int
    stop: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.window.ids[:1]

    @property
    def target(self) -> tuple[int, ...]:
        """The tokens to force: all from the second on, up to the last that is measured."""
        return self.window.ids[1 : 1 + self.stop]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.target[self.start :]

    @property
    def positions(self) -> np.ndarray:
        first = self.window.start + 1 + self.start
        return np.arange(first, first + self.stop - self.start)


def _batches(windows: Sequence[TextWindow], room: int) -> Iterator[list[_Stretch]]:
    """Stretches that together hold at most `room` rows; one that begins inside a window runs alone."""
    batch: list[_Stretch] = []
    for window in windows:
        stop = len(window.ids) - 1
        if batch and sum(stretch.stop for stretch in batch) + stop > room:
            yield batch
            batch = []
        if stop > room:
            starts = range(stop - window.n_scored, stop, room)
            yield from ([_Stretch(window, start, min(start + room, stop))] for start in starts)
        else:
            batch.append(_Stretch(window, stop - window.n_scored, stop))
    if batch:
        yield batch


def _check_room(engine: Engine, windows: Sequence[TextWindow], room: int, d_vocab: int) -> None:
    longest = max(len(window.ids) - 1 for window in windows)
    if longest > room and not engine.traits.takes_functions:
        raise InputError(
            f"This engine hands over whole texts; {longest} tokens of both arms take {8 * d_vocab * longest} bytes: "
            "raise logit_bytes to that, or use shorter texts."
        )


def _logits(engine: Engine, batch: list[_Stretch], plan: Plan | None) -> list[Tensor]:
    """The logits that predict each stretch's tokens, up to a constant, float32 on the CPU, [tokens, d_vocab]."""
    prompts, targets = [stretch.prompt for stretch in batch], [[stretch.target] for stretch in batch]
    if not engine.traits.takes_functions:  # its logits are in another process, where no function of ours can keep them
        found = engine.measure(prompts, targets, {"log_p": LogDistribution()}, plan=plan)
        return [torch.as_tensor(row["log_p"][s.start :]).float() for s, row in zip(batch, found, strict=True)]
    kept = _KeptRows(batch[0].start if len(batch) == 1 else 0)
    found = engine.measure(prompts, targets, {"row": kept}, plan=plan)
    return [kept.of(row["row"][s.start :].astype(int)) for s, row in zip(batch, found, strict=True)]


class _KeptRows:
    """A measure whose value for a token is the number of its row, and which keeps the rows from `first` on."""

    def __init__(self, first: int) -> None:
        self.first, self.count = first, 0
        self.parts: list[Tensor] = []

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        numbers = torch.arange(self.count, self.count + len(tokens))
        wanted = logits[max(0, self.first - self.count) :]
        if len(wanted):
            self.parts.append(wanted.detach().to("cpu", torch.float32, copy=True))
        self.count += len(tokens)
        return numbers

    def of(self, numbers: np.ndarray) -> Tensor:
        """The rows with these numbers."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        assert numbers.min() >= self.first, "an engine measures the tokens of one target in order"
        return self.parts[0][torch.from_numpy(numbers - self.first)]


def _rows(stretch: _Stretch, base: Tensor, steered: Tensor, policy: SamplingPolicy, block: int) -> pd.DataFrame:
    tokens = torch.tensor(stretch.tokens)
    parts = [
        _figures(base[k : k + block], steered[k : k + block], tokens[k : k + block], policy)
        for k in range(0, len(tokens), block)
    ]
    figures = {name: np.concatenate([part[name].double().numpy() for part in parts]) for name in parts[0]}
    return pd.DataFrame(
        {"text": stretch.window.text, "position": stretch.positions, "token_id": tokens.numpy(), **figures}
    )


def _figures(base: Tensor, steered: Tensor, tokens: Tensor, policy: SamplingPolicy) -> dict[str, Tensor]:
    log_q_base, log_q_steered = policy_log_probs(base, policy), policy_log_probs(steered, policy)
    before, after = log_q_base > -math.inf, log_q_steered > -math.inf  # the nuclei
    return {
        "base": entropy(log_q_base),
        "steered": entropy(log_q_steered),
        "raw_base": entropy(base),
        "raw_steered": entropy(steered),
        "log_prob_base": chosen_log_probs(base, tokens),
        "log_prob_steered": chosen_log_probs(steered, tokens),
        "kl": kl(steered, base),
        "policy_kl": kl(log_q_steered, log_q_base),
        "kept": kept_share(before, after),
        "jaccard": jaccard(before, after),
    }


def measure_entropy(run: Run, plan: Plan, texts: Sequence[PromptLike] | None, policy: SamplingPolicy) -> pd.DataFrame:
    """See `steerlab.experiment.Experiment.entropy`."""
    SamplingPolicy.check(policy)
    run.session.open()
    neutral = neutral_texts(texts)
    own = None if texts is None else neutral
    with run.measuring("entropy", lambda: ([own], [plan.hash, str(policy)])):
        frame = _entropies(run.session, plan, neutral, policy)
    frame = frame.assign(plan=str(plan), plan_hash=plan.hash, policy=str(policy))
    return run.keep("entropy", [plan.hash, neutral, str(policy)], frame)


def _entropies(session: Session, plan: Plan, texts: Sequence[PromptLike], policy: SamplingPolicy) -> pd.DataFrame:
    """Entropies and divergences of both arms on the same texts; one cell."""
    ready = resolved(session, plan)
    data = session.inputs.add_data(list(texts))
    what = {"plan": session.inputs.add_plan(ready), "data": data, "policy": asdict(policy)}
    cell = Cell("entropies", what, {"plan": ready.hash})
    return session.cells.get(cell, session.engine_hash, lambda: _entropy_rows(session, ready, texts, policy))


def _entropy_rows(
    session: Session, plan: Plan | None, texts: Sequence[PromptLike], policy: SamplingPolicy
) -> pd.DataFrame:
    """Entropies and divergences of both arms, with each token as text in the column `token`."""
    frame = entropy_change(session.engine, plan, texts, policy)
    tokenizer = session.engine.tokenizer
    frame.insert(3, "token", [token_text(tokenizer, int(token)) for token in frame.token_id])
    return frame


def _entropies_again(session: Session, stored: StoredCell) -> pd.DataFrame:
    what = stored.cell.what
    plan, texts = stored_plan(session, stored), session.inputs.data(what["data"])
    return _entropy_rows(session, plan, texts, SamplingPolicy(**what["policy"]))


def entropy_blocks(frame: pd.DataFrame, place: str) -> list[Block]:
    """Entropies and divergences on the same text in both arms; `frame` as `Experiment.entropy` gives it."""
    from steerlab.experiment import plots
    from steerlab.experiment._blocks.pictures import picture

    finding = plots.describe_entropy(frame)
    caption = (
        "Entropy of the sampling policy's next-token distribution on the same text in both arms, and below it the "
        "divergence of the model's distributions, KL(steered‖base)."
    )
    drawn = picture("entropy", partial(plots.plot_entropy, frame), finding, caption)
    table = table_of(_entropy_table(frame), "Means over all tokens, with intervals by Student's t over texts")
    where = Paragraph(f"Every position is in {place}.", quiet=True)
    return [Paragraph(finding), *conditions(frame), Plots([drawn]), table, where]


def _entropy_table(frame: pd.DataFrame) -> pd.DataFrame:
    table = entropy_summary(frame)
    return table.assign(quantity=[QUANTITIES[name] for name in table.quantity])


def token_blocks(frame: pd.DataFrame, place: str) -> list[Block]:
    """A text with each token's change; `frame` as in `Material.token_texts`."""
    from steerlab.experiment import plots

    shown = frame.head(MAX_TOKENS)
    note = "" if len(frame) <= MAX_TOKENS else f" {MAX_TOKENS} of {count(len(frame))} tokens; all in {place}."
    changes = shown.assign(change=shown.steered - shown.base)
    order = changes.change.abs().sort_values(ascending=False).index
    moved = changes.loc[order, ["token", "base", "steered", "change"]]
    return [
        Paragraph(plots.describe_token_differences(frame)),
        TokenText(plots.token_differences_html(shown), "".join(map(str, shown.token))),
        Paragraph(
            "Tokens on blue became likelier, on orange and underlined less likely; pointing at one shows its log-probs."
            + note,
            quiet=True,
        ),
        Folded(
            "Tokens that moved most",
            [table_of(moved, "Log p in nats", max_rows=20, place=place)],
        ),
    ]


def _sections(m: Material) -> list[Section]:
    return [
        *frame_sections("Entropy and divergence", m.of("entropies"), entropy_blocks, "entropy"),
        *frame_sections("Token by token", m.token_texts, token_blocks, "entropy"),
    ]


ENTROPY = Measurement(frame_kind("entropy", "entropies"), _sections, {"entropies": _entropies_again})
