"""Conditional activation steering: refuse where a condition on the prompt holds, and only there (Lee et al. 2024)."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import check_flag, check_number, shown
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import InputError
from steerlab.experiment._store.run import Run
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.measures.intervals import cluster_t_mean
from steerlab.protocols._arguments import split_both, texts_of
from steerlab.protocols._condition import Threshold, best_threshold, readings, scores
from steerlab.protocols._next_tokens import refusal_log_odds
from steerlab.protocols._recording import kept, run_of
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where
from steerlab.steering.positions.condition import Condition
from steerlab.steering.vectors import VectorSet

PAPER: Final = "Lee et al. 2024, Programming Refusal with Conditional Activation Steering"
READ: Final = where.prompt() & ~where.index(0)
"""Prompt positions that the condition reads: all but the first, whose norm is often hundreds of times larger."""
SHARES: Final = (0.3, 0.2, 0.5)
ARMS: Final = ("unsteered", "always", "conditional")
SAME: Final = (
    "The condition vector is the first principal component of prompts that are to be refused against prompts that are "
    "not, the behaviour vector that of begun refusals against begun answers.",
    "The condition compares the stream's cosine with the condition vector, over the tokens of the prompt, with a "
    "threshold; layer, threshold and side (above or below) are those with the largest F1.",
    "Where it holds, the behaviour vector is added at several layers; elsewhere nothing is.",
    "Refusal is reported on prompts of both kinds without steering, with unconditional and with conditional steering.",
)
DIFFERS: Final = (
    "Refusal is the exact probability that the reply begins with one of the refusal tokens, and its log-odds; the "
    "paper counts refusals among generated replies.",
    "The cosine is averaged over tokens; the paper compares the averaged stream with its projection, through a tanh, "
    "without the sign of the cosine.",
    "The condition is chosen on prompts that neither made its vector nor are reported; thresholds lie midway between "
    "neighbouring readings instead of on a grid.",
    "The principal component is that of the pairs' differences, uncentred, so of activations centred pair by pair; "
    "method= takes others.",
    "One layer is read; the first token is left out.",
    "The behaviour vector is read at the last token of the begun reply, is added from the prompt's last token on, and "
    "its strength is a share of the median norm of the stream.",
    "Prompts, begun replies and refusal tokens are those given here. Intervals (Student's t over prompts) are added.",
)


@explains_arguments
def cast(
    exp: Experiment,
    target: Sequence[str],
    other: Sequence[str],
    behaviour: ContrastPairs,
    *,
    layers: Any,
    condition_layers: Any,
    strength: float = 0.2,
    refusal_tokens: Sequence[str] = ("I", "As"),
    method: str = "pca_uncentred",
    chat: bool = True,
) -> ProtocolResult:
    """How often prompts of one kind are refused, and others are not, with a condition before the steering.

    Args:
        exp: the experiment; its engine runs, its seed splits, its run directory keeps everything.
        target: prompts that are to be refused.
        other: as many that are not.
        behaviour: prompts with a begun refusal (positive) and with a begun answer (negative), as chat messages or text.
        layers: layers after which the behaviour vector is added.
        condition_layers: layers of which the best is read; none after the first of `layers`.
        strength: of the behaviour vector at each layer, as a share of the median norm of the stream there.
        refusal_tokens: how refusals begin; their probabilities are added.
        method: how both vectors are extracted, as in `steerlab.extract`.
        chat: ask in a turn of a chat.

    Returns:
        A `ProtocolResult`. `table`: a row per arm (`unsteered`, `always`, `conditional`): `target` and `other`, the
        mean probability of refusal on held-out prompts of each kind with its interval; `target_log_odds`,
        `other_log_odds`; `target_steered`, `other_steered`, the share of prompts that are steered; and of the condition
        `precision`, `recall`, `f1` (NaN in the other arms). `rows`: a row per arm and held-out prompt: `kind`,
        `prompt`, `reading` (cosine), `steered`, `p_refusal`, `log_odds`.

    Raises:
        InputError: for unusable arguments, or a condition read after the behaviour is added.
        DataError: for too few prompts, or not as many of both kinds.

    Source:
        Lee et al. 2024 (arXiv:2409.05907), sections 3 and 4.
    """
    run = run_of(exp)
    n_layers = run.session.info.n_layers
    added, read = (list(resolve_layers(one, n_layers)) for one in (layers, condition_layers))
    tokens, as_chat = texts_of(refusal_tokens, "refusal_tokens"), check_flag(chat, "chat")
    dose = check_number(strength, "strength", least=0)
    if not isinstance(behaviour, ContrastPairs):
        raise InputError(f"behaviour is ContrastPairs of begun refusals and answers, got {shown(behaviour)}.")
    if max(read) > min(added):
        raise InputError(f"The condition is read no later than the first of layers {added}; got {read}.")
    given = {"target": texts_of(target, "target"), "other": texts_of(other, "other")}
    train, dev, test = map(list, zip(*split_both(given, SHARES, exp.seed), strict=True))
    settings = {
        "layers": added,
        "condition_layers": read,
        "strength": dose,
        "refusal_tokens": tokens,
        "method": method,
        "chat": as_chat,
        "behaviour": behaviour.hash,
        **given,
    }
    with run.measuring("cast", lambda: ([*given["target"], *given["other"]], settings)):
        pairs = ContrastPairs.from_lists(*train)
        probes = exp.extract(pairs, method=method, layers=read, read=READ, chat=as_chat, name="condition")
        vectors = exp.extract(behaviour, method=method, layers=added, chat=as_chat, name="behaviour")
        layer, threshold = _chosen(run, probes, dev, as_chat)
        condition = threshold.condition(probes[layer], READ)
        read_of = [readings(run, VectorSet((probes[layer],)), one, READ, chat=as_chat)[layer] for one in test]
        plans: dict[str, Plan | None] = dict(
            zip(ARMS, (None, _plan(vectors, dose, None), _plan(vectors, dose, condition)), strict=True)
        )
        rows = _rows(run, plans, test, read_of, threshold, tokens, as_chat)
    table = _table(rows)
    found = _sentences(table, str(condition), threshold.f1)
    return kept(run, settings, ProtocolResult("cast", PAPER, table, rows, SAME, DIFFERS, settings, found))


def _plan(vectors: VectorSet, dose: float, condition: Condition | None) -> Plan:
    return Plan(*(add(one, dose=dose, when=condition) for one in vectors.values()))


def _chosen(run: Run, probes: VectorSet, dev: Sequence[list[str]], chat: bool) -> tuple[int, Threshold]:
    """The layer and threshold with the largest F1 on development prompts; the wider gap decides a tie."""
    wanted, other = (readings(run, probes, one, READ, chat=chat) for one in dev)
    found = {layer: best_threshold(wanted[layer], other[layer]) for layer in probes}
    best = max(found, key=lambda layer: (found[layer].f1, found[layer].gap))
    return best, found[best]


def _rows(
    run: Run,
    plans: dict[str, Plan | None],
    test: Sequence[list[str]],
    read_of: Sequence[np.ndarray],
    threshold: Threshold,
    tokens: list[str],
    chat: bool,
) -> pd.DataFrame:
    """Refusal of every held-out prompt in every arm; a cell per arm and kind."""
    found = []
    for arm, plan in plans.items():
        for kind, prompts, values in zip(("target", "other"), test, read_of, strict=True):
            odds = refusal_log_odds(run, prompts, plan, tokens, chat=chat)
            steered = threshold.passes(values) if arm == "conditional" else np.full(len(prompts), arm == "always")
            own = {"arm": arm, "kind": kind, "prompt": prompts, "reading": values, "steered": steered}
            found.append(pd.DataFrame({**own, "p_refusal": 1 / (1 + np.exp(-odds)), "log_odds": odds}))
    return pd.concat(found, ignore_index=True)


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    found = []
    for arm in ARMS:
        parts: dict[str, Any] = {kind: rows[(rows.arm == arm) & (rows.kind == kind)] for kind in ("target", "other")}
        row: dict[str, Any] = {"arm": arm}
        for kind, part in parts.items():
            ends = cluster_t_mean(part.p_refusal.to_numpy(), part.prompt.tolist())
            row |= {kind: float(part.p_refusal.mean()), f"{kind}_low": ends.low, f"{kind}_high": ends.high}
        row |= {f"{kind}_log_odds": float(part.log_odds.mean()) for kind, part in parts.items()}
        row |= {f"{kind}_steered": float(part.steered.mean()) for kind, part in parts.items()}
        told = scores(*(part.steered.to_numpy() for part in parts.values()))
        found.append(row | (told if arm == "conditional" else dict.fromkeys(told, np.nan)))
    return pd.DataFrame(found)


def _sentences(table: pd.DataFrame, condition: str, f1: float) -> tuple[str, ...]:
    own: Any = table.iloc[-1]
    return (
        f"The condition is {condition}: F1 {f1:.2f} on the prompts it was chosen on, {own.f1:.2f} on held-out ones "
        f"(steering every prompt has {2 / 3:.2f}).",
        *(
            f"{row['arm']}: {row['target']:.3f} [{row['target_low']:.3f}, {row['target_high']:.3f}] of target prompts "
            f"are refused and {row['other']:.3f} [{row['other_low']:.3f}, {row['other_high']:.3f}] of others."
            for row in table.to_dict("records")
        ),
    )
