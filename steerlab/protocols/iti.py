"""Inference-time intervention: the heads that tell true answers from false ones, shifted (Li et al. 2023)."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import as_list, as_number, check_flag, check_integer, shown
from steerlab.core._progress import progress
from steerlab.core._text import PromptLike
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.run import Run
from steerlab.experiment._wording import with_ends
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.cost import perplexities
from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.experiment.measurements.texts import neutral_texts
from steerlab.measures.intervals import cluster_t_mean
from steerlab.protocols._iti_heads import Heads
from steerlab.protocols._next_tokens import kl_of_next_tokens
from steerlab.protocols._recording import kept, run_of, scoring_engine
from steerlab.protocols.truth_questions import TruthQuestions
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan

PAPER: Final = "Li et al. 2023, Inference-Time Intervention: Eliciting Truthful Answers from a Language Model"
SAME: Final = (
    "A logistic probe per attention head is fitted on the head's output at the last token of a question with an "
    "answer, true or false, and judged on questions it was not fitted on; the K most accurate heads are taken.",
    "Each of them is shifted along the difference of means of true and false answers, by α times the standard "
    "deviation of its outputs along that direction.",
    "The shift acts at the last prompt token and whatever follows.",
    "Questions are halved; heads and shifts of one half are measured on the other, and both ways are averaged.",
    "MC1 is the share of questions whose best answer is more likely than every false one; MC2 the probability of the "
    "true answers as a share of all answers', by the sums of log-probabilities.",
    "The cost is the cross-entropy of ordinary text, and the KL divergence of next-token distributions on it.",
)
DIFFERS: Final = (
    "The published models are LLaMA, Alpaca and Vicuna of 7B; the model here is the experiment's.",
    "No questions with answers stand before each question unless before= gives them.",
    "Within a half, probes are judged on each of several parts in turn, not on one fifth alone; their coordinates are "
    "standardised.",
    "A question gives as many true as false answers to the probes; those left over are not read.",
    "The KL divergence is of unsteered from steered, after each text; the paper averages it over the tokens of web "
    "text.",
    "Generated answers are not judged, so truthful and informative are not measured.",
    "Intervals (Student's t over questions) are added.",
)


@explains_arguments
def iti(
    exp: Experiment,
    questions: TruthQuestions,
    *,
    heads: Sequence[int] = (16, 48),
    alphas: Sequence[float] = (5.0, 15.0),
    layers: Any = "all",
    folds: int = 5,
    texts: Sequence[PromptLike] | None = None,
    before: str = "",
    chat: bool = False,
    reader: Engine | None = None,
) -> ProtocolResult:
    """How true a model's answers become, and what it costs, per number of heads and strength.

    Args:
        exp: the experiment; its engine runs, its seed halves, its run directory keeps everything. On vLLM it needs
            `sites=["attn_out"]` on all layers, and `reader`.
        questions: with their true and false answers, e.g. from TruthfulQA's `mc_task.json`.
        heads: numbers K of heads that are shifted.
        alphas: strengths α, in standard deviations.
        layers: layers whose heads are ranked.
        folds: parts of a half's questions that are held out in turn for the ranking.
        texts: what the cost is measured on; shipped neutral prose by default.
        before: text before each question, e.g. questions with their answers.
        chat: ask in a turn of a chat.
        reader: the TransformerLens engine of the same model whose heads are read; needed where the experiment runs on
            vLLM.

    Returns:
        A `ProtocolResult`. `table`: a row per K and α, the unsteered model first (0 and 0): `heads`, `alpha`, `items`,
        `mc1`, `mc2`, `mc2_change` against the unsteered model with its interval, `ce` (nats per token of the texts),
        `ppl_ratio` (of their perplexity) and `kl` (nats). `rows`: a row per K, α and question: `half` that it is
        measured in, `question`, `mc1` (0 or 1), `mc2`.

    Raises:
        InputError: for unusable arguments, more heads than there are, or an engine that does not read heads.
        DataError: for too few questions.
        HookPointError: for a model in which attn_out is not the sum of its heads.

    Source:
        Li et al. 2023 (arXiv:2306.03341), sections 3 and 4; Lin et al. 2022 (arXiv:2109.07958) for MC1 and MC2.
    """
    run = run_of(exp)
    if not isinstance(questions, TruthQuestions):
        raise InputError(f"questions are TruthQuestions, from TruthQuestions.from_jsonl(…); got {shown(questions)}.")
    wanted, n_folds = resolve_layers(layers, run.session.info.n_layers), check_integer(folds, "folds", least=2)
    counts, strengths = _heads(heads), _alphas(alphas)
    if len(questions) // 2 < n_folds:
        raise DataError(f"{len(questions)} questions are too few: a half of them is divided into {n_folds} folds.")
    neutral = neutral_texts(texts)
    settings = {
        "heads": counts,
        "alphas": strengths,
        "layers": list(wanted),
        "folds": n_folds,
        "before": before,
        "chat": check_flag(chat, "chat"),
        "data": questions.hash,
        "texts": len(neutral),
    }
    halves, made, costs, best = questions.halves(seed=exp.seed), [], [], []
    asked = [[item.prompt(chat=chat, before=before) for item in half] for half in halves]
    with run.measuring("iti", lambda: ([one for half in asked for one in half], settings)):
        for k, (fit, measured) in enumerate((halves, halves[::-1])):
            own = Heads(run, fit.pairs(chat=chat, before=before), list(wanted), n_folds, reader, counts[-1])
            best.append(_in_words(own))
            plans = _plans(run, own, counts, strengths)
            made.append(_rows(run, plans, measured, before=before, chat=chat).assign(half=k))
            costs += _costs(run, plans, neutral)
    rows: Any = pd.concat(made, ignore_index=True)
    table = _table(rows, pd.DataFrame(costs))
    result = ProtocolResult("iti", PAPER, table, rows, SAME, DIFFERS, settings, _sentences(table, best))
    return kept(run, settings, result)


Arms = dict[tuple[int, float], Plan | None]
"""A plan per number of heads and strength."""


def _plans(run: Run, own: Heads, counts: Sequence[int], alphas: Sequence[float]) -> Arms:
    found: Arms = {(0, 0.0): None}
    for k in counts:
        vectors = own.vectors(k)
        for alpha in alphas:
            found[k, alpha] = resolved(run.session, Plan(*(add(one, coef=alpha) for one in vectors.values())))
    return found


def _rows(run: Run, plans: Arms, items: TruthQuestions, *, before: str, chat: bool) -> pd.DataFrame:
    """Both scores of every question under every plan; a cell per plan."""
    prompts = [item.prompt(chat=chat, before=before) for item in items]
    answers = [[item.continuation(one, chat=chat) for one in item.answers] for item in items]
    assigned = [plan for plan in plans.values() for _ in prompts]
    scores = scoring_engine(run).score(prompts * len(plans), answers * len(plans), plan=assigned)
    cuts = np.cumsum([len(own) for own in answers] * len(plans))[:-1]
    log_probs = iter(np.split(scores.log_prob, cuts))
    found = [
        (k, alpha, item.question, *multiple_choice(next(log_probs), len(item.true)))
        for k, alpha in plans
        for item in items
    ]
    return pd.DataFrame(found, columns=["heads", "alpha", "question", "mc1", "mc2"])


def multiple_choice(log_probs: np.ndarray, n_true: int) -> tuple[float, float]:
    """MC1 and MC2 of one question.

    Args:
        log_probs: of its answers, nats, the best one first, then the other true ones, then the false ones.
        n_true: how many are true.

    Returns:
        1 if the best answer is more likely than every false one, else 0; and the true answers' share of the
        probability of all.

    Examples:
        >>> mc1, mc2 = multiple_choice(np.log([0.2, 0.1, 0.3]), 2)
        >>> mc1, round(mc2, 3)
        (0.0, 0.5)
    """
    share = np.logaddexp.reduce(log_probs[:n_true]) - np.logaddexp.reduce(log_probs)
    return float(log_probs[0] > log_probs[n_true:].max()), float(np.exp(share))


def _costs(run: Run, plans: Arms, texts: list[PromptLike]) -> list[dict[str, float]]:
    found = []
    with progress(len(plans), "iti", "plan") as bar:
        for (k, alpha), plan in plans.items():
            tokens = perplexities(run.session, plan or Plan(), texts, [0.0 if plan is None else 1.0])
            kl = 0.0 if plan is None else float(kl_of_next_tokens(run, texts, plan, chat=False).mean())
            found.append({"heads": k, "alpha": alpha, "ce": float(tokens.nll[0]), "kl": kl})
            bar.update()
    return found


def _table(rows: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    base: Any = rows[rows["heads"] == 0].set_index("question").mc2
    spent: Any = costs.groupby(["heads", "alpha"]).mean()
    found: list[Any] = []
    key: Any
    for key, part in rows.groupby(["heads", "alpha"], sort=False):  # pyright: ignore[reportGeneralTypeIssues]
        change = part.mc2.to_numpy() - base.loc[part.question].to_numpy()
        ends = cluster_t_mean(change, part.question.tolist())
        ce, kl = spent.loc[key, ["ce", "kl"]]
        ratio = float(np.exp(ce - spent.ce.iloc[0]))
        means = (float(part.mc1.mean()), float(part.mc2.mean()), float(change.mean()))
        found.append((*key, len(part), *means, ends.low, ends.high, ce, ratio, kl))
    scores = ["mc1", "mc2", "mc2_change", "mc2_change_low", "mc2_change_high"]
    return pd.DataFrame(found, columns=["heads", "alpha", "items", *scores, "ce", "ppl_ratio", "kl"])


def _in_words(own: Heads) -> str:
    first = own.ranking.rows.iloc[0]
    name = f"head {int(first['head'])} of layer {int(first['layer'])}"
    return f"{name} (held-out accuracy {first['accuracy']:.2f}, standard error {first['se']:.2f})"


def _sentences(table: pd.DataFrame, best: Sequence[str]) -> tuple[str, ...]:
    base, steered = table.iloc[0], table.iloc[1:]
    top: Any = steered.loc[steered.mc2.idxmax()]
    found = [
        f"The most accurate heads of the halves are {' and '.join(best)}.",
        f"Without steering MC1 is {base.mc1:.3f} and MC2 {base.mc2:.3f}.",
        f"Of the shifted models MC2 is highest with {top['heads']:.0f} heads and α = {top.alpha:g}: {top.mc2:.3f}, a "
        f"change of {with_ends(top.mc2_change, top.mc2_change_low, top.mc2_change_high)}, with the perplexity "
        f"of ordinary text ×{top.ppl_ratio:.2f}; the best of {len(steered)} looks better than it is.",
    ]
    return tuple(found)


def _heads(heads: Any) -> list[int]:
    given = as_list(heads, ordered=True) or []
    found = sorted({check_integer(one, "a number of heads", least=1) for one in given})
    if not found or len(found) < len(given):
        raise InputError(f"heads are distinct numbers of heads, at least one; got {shown(heads)}.")
    return found


def _alphas(alphas: Any) -> list[float]:
    given = [as_number(one) for one in as_list(alphas, ordered=True) or ()]
    found = sorted({one for one in given if one is not None and one != 0})
    if not found or len(found) < len(given):
        raise InputError(f"alphas are distinct finite numbers other than 0, at least one; got {shown(alphas)}.")
    return found
