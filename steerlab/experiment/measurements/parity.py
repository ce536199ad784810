"""Parity: the same plan on two engines, token by token, against what the engines differ by without a plan."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core._numbers import check_integer, check_number
from steerlab.core._text import PromptLike, as_prompts, encode_prompt
from steerlab.core.engine import Engine, ModelInfo
from steerlab.core.errors import InputError, PromptError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt
from steerlab.display import Piece, Shown, count, figure
from steerlab.engines.loading import BACKENDS, load
from steerlab.experiment._blocks import Section
from steerlab.experiment._blocks.findings import Finding, finding_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._store.fingerprint import Fingerprint, engine_versions
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import Session
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.steering.plan import Plan

_WORST = 20
FACTOR = 4.0
FLOOR = 1e-6
"""Smallest tolerance in nats: below it, engines differ by the order of float32 sums."""


@dataclass(frozen=True, repr=False)
class Parity(Shown):
    """How far two engines agree on the same texts under the same plan.

    Attributes:
        rows: a row per text and scored token: `text`, `position`, `token_id`, `log_prob_a`, `log_prob_b`, `delta`
            (b − a under the plan), `unsteered_a`, `unsteered_b`, `unsteered_delta`; all in nats.
        receipts: a row per text and edit: `text`, `hook_point`, `operator`, `edited_a`, `edited_b`, `expected`,
            `equal`.
        tolerance: largest |delta| allowed.
        measured_tolerance: whether the tolerance comes from the unsteered run (`factor` times its largest |delta|, at
            least `FLOOR`) rather than from the caller.
        factor: that factor.
        engine_a: which engine and model, in words.
        engine_b: the same for the other.
        plan_hash: of the plan.
    """

    rows: pd.DataFrame = field(repr=False)
    receipts: pd.DataFrame = field(repr=False)
    tolerance: float
    measured_tolerance: bool
    factor: float
    engine_a: str
    engine_b: str
    plan_hash: str

    @property
    def max_delta(self) -> float:
        """Largest |delta| under the plan, in nats."""
        return float(self.rows.delta.abs().max())

    @property
    def max_unsteered_delta(self) -> float:
        """Largest |delta| without a plan, in nats."""
        return float(self.rows.unsteered_delta.abs().max())

    @property
    def steering_size(self) -> float:
        """Largest change of a log-probability that the plan makes on the first engine, in nats."""
        return float((self.rows.log_prob_a - self.rows.unsteered_a).abs().max())

    @property
    def reasons(self) -> list[str]:
        """What the verdict rests on, one sentence each."""
        source = f"{self.factor:g} times the largest unsteered |Δ| of {self.max_unsteered_delta:.2g}"
        origin = source if self.measured_tolerance else "given"
        side = "within" if self.max_delta <= self.tolerance else "beyond"
        found = [
            f"Largest |Δ log p| {self.max_delta:.2g} nats over {len(self.rows)} tokens: {side} the tolerance of "
            f"{self.tolerance:.2g} ({origin}).",
        ]
        unequal = int(np.sum(~self.receipts["equal"].to_numpy()))
        found.append(
            f"{unequal} of {len(self.receipts)} receipts differ." if unequal else "All receipts are equal and complete."
        )
        if not self._told_apart:
            found.append(
                f"The plan moves log-probabilities by at most {self.steering_size:.2g} nats, no more than the "
                "tolerance, so agreement shows nothing; use a stronger plan."
            )
        return found

    @property
    def _told_apart(self) -> bool:
        return self.steering_size > self.tolerance

    @property
    def passed(self) -> bool:
        """Whether every token is within tolerance, receipts are equal, and the plan is strong enough to tell."""
        return self.max_delta <= self.tolerance and bool(self.receipts["equal"].all()) and self._told_apart

    def to_frame(self) -> pd.DataFrame:
        """The rows."""
        return self.rows

    def _finding(self) -> str:
        verdict = "parity" if self.passed else "no parity"
        tokens = f"{count(len(self.rows), 'token')}, {figure(self.tolerance)} allowed"
        return f"{verdict}: largest |Δ log p| {figure(self.max_delta)} nats of {tokens}"

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment._blocks.faces import finding_pieces  # which draws

        return finding_pieces(parity_finding(self, ""))

    def __str__(self) -> str:
        verdict = "parity" if self.passed else "no parity"
        return "\n".join([f"{verdict}: {self.engine_a} against {self.engine_b}", *self.reasons])


def parity(
    engine_a: Engine,
    engine_b: Engine,
    plan: Plan,
    *,
    prompts: Sequence[PromptLike] | PromptLike | None = None,
    texts: Sequence[PromptLike] | PromptLike | None = None,
    max_new_tokens: int = 16,
    tolerance: float | None = None,
    factor: float = FACTOR,
) -> Parity:
    """Scores the same tokens under the same plan on both engines.

    Doses are resolved on the first engine, so that both add the same tensor.

    Args:
        engine_a: the reference.
        engine_b: the other engine, with the same weights.
        plan: the plan; strong enough to move log-probabilities by more than the tolerance.
        prompts: prompts, whose greedy steered continuation on the first engine is scored; give these or `texts`.
        texts: whole texts, all of whose tokens but the first are scored.
        max_new_tokens: tokens of each continuation.
        tolerance: largest |Δ log p| allowed, in nats; by default `factor` times the largest one of the same tokens
            without a plan, and at least `FLOOR`.
        factor: see `tolerance`.

    Raises:
        InputError: for engines of different weights or vocabulary, or not exactly one of prompts and texts.
        PromptError: for a text of fewer than two tokens.
    """
    _check_models(engine_a.info, engine_b.info)
    tolerance = None if tolerance is None else check_number(tolerance, "tolerance, in nats,", least=0, infinite=True)
    factor = check_number(factor, "factor", least=1)
    resolved = plan.check(engine_a.info).resolved(engine_a.median_norm, engine_a.info.weights_hash)
    pairs = _pairs(engine_a, resolved, prompts, texts, max_new_tokens)
    unsteered_a, _ = _scored(engine_a, pairs, None)
    unsteered_b, _ = _scored(engine_b, pairs, None)
    steered_a, receipts_a = _scored(engine_a, pairs, resolved)
    steered_b, receipts_b = _scored(engine_b, pairs, resolved)
    rows = _places(pairs).assign(
        log_prob_a=steered_a,
        log_prob_b=steered_b,
        delta=steered_b - steered_a,
        unsteered_a=unsteered_a,
        unsteered_b=unsteered_b,
        unsteered_delta=unsteered_b - unsteered_a,
    )
    measured = max(FLOOR, factor * float(rows.unsteered_delta.abs().max()))
    return Parity(
        rows=rows,
        receipts=_receipt_rows(receipts_a, receipts_b),
        tolerance=measured if tolerance is None else tolerance,
        measured_tolerance=tolerance is None,
        factor=factor,
        engine_a=_described(engine_a),
        engine_b=_described(engine_b),
        plan_hash=plan.hash,
    )


Pair = tuple[tuple[int, ...], tuple[int, ...]]


def _pairs(engine: Engine, plan: Plan, prompts: Any, texts: Any, max_new_tokens: int) -> list[Pair]:
    """Ids of a context and of the tokens to score after it."""
    if (prompts is None) == (texts is None):
        raise InputError("Parity takes either prompts= to continue or texts= to score, not both and not neither.")
    if texts is not None:
        encoded = [encode_prompt(engine.tokenizer, t, d_vocab=engine.info.d_vocab) for t in as_prompts(texts)]
        return [_split(index, text.token_ids) for index, text in enumerate(encoded)]
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is at least 1, or there is nothing to score; got {max_new_tokens}.")
    made = engine.generate(prompts, plan=plan, policy=SamplingPolicy.greedy(), max_new_tokens=max_new_tokens)
    return [(made.prompt_token_ids[one.prompt_index], tuple(one.token_ids)) for one in made]


def _split(index: int, ids: tuple[int, ...]) -> Pair:
    if len(ids) < 2:
        raise PromptError(f"Scoring needs at least two tokens; text {index} has {len(ids)}.")
    return ids[:1], ids[1:]


def _scored(engine: Engine, pairs: Sequence[Pair], plan: Plan | None) -> tuple[np.ndarray, list[Receipt]]:
    scores = engine.score([list(context) for context, _ in pairs], [[list(target)] for _, target in pairs], plan=plan)
    return np.concatenate([np.array(score.token_log_probs) for score in scores]), list(scores.receipts)


def _places(pairs: Sequence[Pair]) -> pd.DataFrame:
    rows = [
        (text, len(context) + offset, token)
        for text, (context, target) in enumerate(pairs)
        for offset, token in enumerate(target)
    ]
    return pd.DataFrame(rows, columns=["text", "position", "token_id"])


def _receipt_rows(first: Sequence[Receipt], second: Sequence[Receipt]) -> pd.DataFrame:
    rows = [
        (
            text,
            x.hook_point,
            x.operator,
            x.edited,
            y.edited,
            x.expected,
            x.edited == y.edited == x.expected == y.expected,
        )
        for text, (a, b) in enumerate(zip(first, second, strict=True))
        for x, y in zip(a.edits, b.edits, strict=True)
    ]
    return pd.DataFrame(
        rows, columns=["text", "hook_point", "operator", "edited_a", "edited_b", "expected", "equal"]
    ).astype({"equal": bool})


def _check_models(a: ModelInfo, b: ModelInfo) -> None:
    if a.weights_hash != b.weights_hash or a.d_vocab != b.d_vocab:
        raise InputError(
            f"Parity compares engines on the same model: {a.name} has weights {a.weights_hash} and {a.d_vocab} logits, "
            f"{b.name} has {b.weights_hash} and {b.d_vocab}."
        )


def _described(engine: Engine) -> str:
    return f"{type(engine).__name__} of {engine.info.name}, {engine.info.dtype}"


def measure_parity(
    run: Run,
    plan: Plan,
    prompts: Sequence[PromptLike] | PromptLike | None,
    *,
    against: "str | Engine",
    texts: Sequence[PromptLike] | PromptLike | None,
    max_new_tokens: int,
    tolerance: float | None,
    load_options: Mapping[str, Any],
) -> Parity:
    """See `steerlab.experiment.Experiment.parity`."""
    session = run.session
    session.open()
    max_new_tokens = check_integer(max_new_tokens, "max_new_tokens", least=1)
    tolerance = None if tolerance is None else check_number(tolerance, "tolerance, in nats,", least=0, infinite=True)
    ready = resolved(session, plan)
    given = None if prompts is None else as_prompts(prompts), None if texts is None else as_prompts(texts)
    run_by = _identity(against)
    what = [ready.hash, *given, run_by, max_new_tokens, tolerance, {k: str(v) for k, v in load_options.items()}]
    known = run.find("parity", what)
    if known is not None:
        return known
    options = {"prompts": given[0], "texts": given[1], "max_new_tokens": max_new_tokens, "tolerance": tolerance}
    with (
        run.look("parity", lambda: (given, [plan.hash, run_by, max_new_tokens])),
        contextlib.ExitStack() as stack,
    ):
        other = against
        if isinstance(other, str):
            other = stack.enter_context(contextlib.closing(_started(session, other, ready, load_options)))
        found = parity(session.engine, other, ready, **options)
    return run.keep("parity", what, found)


def _identity(engine: "str | Engine") -> str:
    """Of an engine to compare with, without starting it if it is only named."""
    if isinstance(engine, str):
        return f"{engine} {sorted(engine_versions(engine).items())}"
    return Fingerprint.of(engine, {}).hash


def _started(session: Session, against: str, plan: Plan, options: Mapping[str, Any]) -> Engine:
    """Another backend's engine with the same model, started for one comparison.

    Raises:
        InputError: for an unknown backend, or a model that is only held in memory.
    """
    if against not in BACKENDS:
        raise InputError(f"against is an engine or one of {', '.join(BACKENDS)}; got {against!r}.")
    if not isinstance(session.model, str | Path):
        raise InputError(f"The model is held in memory, so {against} cannot load it; pass against= an engine.")
    options = {"dtype": session.info.dtype, **options}
    wired = {"layers": _wired_by(plan)} if against == "vllm" else {}
    return load(session.model, backend=against, **{**wired, **options})


def _wired_by(plan: Plan) -> list[int]:
    """The layers that vLLM must wire for a plan: the stream before a layer is the one after the layer below."""
    return sorted({point.layer - (point.site == "resid_pre") for point in plan.hook_points})


def parity_finding(parity: Parity, place: str) -> Finding:
    """Whether two engines agree, why, and the tokens they agree on least."""
    sentences = [f"{parity.engine_a} against {parity.engine_b}.", *parity.reasons]
    rows: Any = parity.rows
    worst = rows.loc[rows.delta.abs().sort_values(ascending=False).index]
    shown = worst[["text", "position", "token_id", "log_prob_a", "log_prob_b", "delta", "unsteered_delta"]]
    return Finding(sentences, shown, parity.passed, place, "Tokens, from the largest difference on (nats)", _WORST)


def _sections(m: Material) -> list[Section]:
    found = [parity_finding(one, f"findings/parity-{k:03d}/rows.parquet") for k, one in enumerate(m.of("parities"))]
    return finding_sections("Parity of engines", found)


PARITY = Measurement(finding_kind("parity", "parities", Parity), _sections)
