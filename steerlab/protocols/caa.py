"""Contrastive activation addition on questions with two answers: layer × multiplier (Rimsky et al. 2024)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._arguments import explains_arguments
from steerlab.core._files import read_text
from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import check_flag, check_number
from steerlab.core.errors import DataError
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.run import Run
from steerlab.experiment._wording import with_ends
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.measures.intervals import cluster_t_mean
from steerlab.protocols._arguments import behaviours_of, multipliers_of
from steerlab.protocols._recording import kept, run_of, scoring_engine
from steerlab.protocols.choices import ChoiceItems
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector

PAPER: Final = "Rimsky et al. 2024, Steering Llama 2 via Contrastive Activation Addition"
SAME: Final = (
    "Vectors are mean differences between activations at the letter of the answer, of pairs that differ in that letter "
    "alone, with their own length (not normalised).",
    "The vector times each multiplier is added at one layer at a time, and every layer given is swept.",
    "The figure is the probability of the letter that shows the behaviour as a share of both letters', "
    "p(matching) / (p(A) + p(B)), and its mean over held-out questions.",
)
DIFFERS: Final = (
    "The published models are Llama-2 chat models with their template and a system prompt; questions are plain text "
    "here unless chat=True.",
    "The vector is added at the last prompt token and what follows; the paper adds it at every token after the "
    "user's instruction.",
    "Intervals (Student's t over questions) are added; the paper gives none.",
    "Vectors are not rescaled to one norm across behaviours.",
    "Open-ended generation and its scores are not part of this.",
)
COLUMNS: Final = ["behaviour", "layer", "multiplier", "item", "question", "matching", "a_prob", "b_prob", "p_matching"]


@explains_arguments
def caa(
    exp: Experiment,
    behaviours: Mapping[str, ChoiceItems],
    *,
    layers: Any,
    multipliers: Sequence[float] = (-1.0, 0.0, 1.0),
    held_out: float = 0.2,
    chat: bool = False,
) -> ProtocolResult:
    """How likely the answer that shows a behaviour becomes, per layer and multiplier.

    Args:
        exp: the experiment; its engine runs, its seed splits, its run directory keeps everything.
        behaviours: questions by the name of the behaviour.
        layers: the layers to sweep.
        multipliers: what the vector is multiplied by.
        held_out: share of the questions that is measured; the others make the vector.
        chat: ask in a chat, with the answer begun as the assistant's.

    Returns:
        A `ProtocolResult`. `table`: a row per behaviour and layer, with the mean of p(matching) at each multiplier as
        `p at -1`, … and `change`, from the smallest to the largest multiplier, with its interval. `rows`: a row per
        behaviour, layer, multiplier and held-out question, in the form of the authors' result files: `question`,
        `a_prob`, `b_prob` (of the letters A and B, whatever they stand for), `matching`, `p_matching`.

    Raises:
        InputError: for no behaviour or fewer than two multipliers.
        DataError: for too few questions, or answers other than A and B.

    Source:
        Rimsky et al. 2024, sections 3 and 4.
    """
    run = run_of(exp)
    found, factors = behaviours_of(behaviours), multipliers_of(multipliers)
    share, as_chat = check_number(held_out, "held_out", least=0), check_flag(chat, "chat")
    wanted = resolve_layers(layers, run.session.info.n_layers)
    settings = {
        "layers": wanted,
        "multipliers": factors,
        "held_out": share,
        "chat": as_chat,
        "data": {name: items.hash for name, items in found.items()},
    }
    rows = []
    for name, items in found.items():
        _check_letters(name, items)
        train, test = items.split([1 - share, share], seed=exp.seed)
        vectors = exp.extract(train.pairs(chat=as_chat), layers=wanted, name=name)
        with run.measuring("caa", lambda t=test: ([t.targets(chat=as_chat)], settings)):
            rows += [_rows(run, vectors[layer], test, factors, name, as_chat) for layer in wanted]
    frame: Any = pd.concat(rows, ignore_index=True)[COLUMNS]
    table = _table(frame, factors)
    result = ProtocolResult("caa", PAPER, table, frame, SAME, DIFFERS, settings, _sentences(table, factors))
    return kept(run, settings, result)


def against_published(result: ProtocolResult, path: str | Path, *, layer: int, multiplier: float) -> pd.DataFrame:
    """The per-item probabilities of a run beside those of one of the authors' result files.

    Args:
        result: of `caa`.
        path: a JSON array of `question`, `answer_matching_behavior`, `a_prob`, `b_prob`.
        layer: the layer of the run to compare.
        multiplier: its multiplier.

    Returns:
        A row per question of both: `question`, `p_matching`, `published` (p of the matching letter as a share of both),
        `difference`.

    Raises:
        DataError: for another file, or if no question of it was measured at that layer and multiplier.
    """
    try:
        published = json.loads(read_text(Path(path)))
        own = pd.DataFrame(
            [
                (
                    row["question"].strip(),
                    row["a_prob" if "A" in row["answer_matching_behavior"] else "b_prob"]
                    / (row["a_prob"] + row["b_prob"]),
                )
                for row in published
            ],
            columns=["question", "published"],
        )
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise DataError(
            f"{path} is no result file: a JSON array of question, answer_matching_behavior, a_prob and b_prob is "
            f"needed ({type(error).__name__}: {error})."
        ) from error
    rows: Any = result.rows
    chosen = rows[(rows.layer == layer) & (rows.multiplier == multiplier)][["question", "p_matching"]]
    both = chosen.merge(own.drop_duplicates("question"), on="question")
    if both.empty:
        raise DataError(f"No question of {path} was measured at layer {layer} and multiplier {multiplier:g}.")
    return both.assign(difference=both.p_matching - both.published)


def _check_letters(name: str, items: ChoiceItems) -> None:
    other = sorted({letter for item in items for letter in (item.matching, item.other)} - {"A", "B"})
    if other:
        raise DataError(f"The questions of {name!r} have answers other than A and B: {other}.")


def _rows(
    run: Run, vector: SteeringVector, items: ChoiceItems, factors: Sequence[float], behaviour: str, chat: bool
) -> pd.DataFrame:
    """Probabilities of both letters for every item at every multiplier; a cell per multiplier."""
    plan = resolved(run.session, Plan(add(vector, coef=1.0)))
    plans = [None if factor == 0 else plan.scaled(factor) for factor in factors]
    prompts = [item.prompt(chat=chat) for item in items]
    assigned = [one for one in plans for _ in prompts]
    targets = [["A", "B"]] * len(assigned)
    log_p = scoring_engine(run).score(prompts * len(plans), targets, plan=assigned).log_prob.reshape(-1, 2)
    matching = [item.matching for item in items] * len(plans)
    share = 1 / (1 + np.exp(log_p[:, 1] - log_p[:, 0]))  # of A
    return pd.DataFrame(
        {
            "behaviour": behaviour,
            "layer": vector.layer,
            "multiplier": np.repeat(factors, len(prompts)),
            "item": np.tile(np.arange(len(prompts)), len(plans)),
            "question": [item.question for item in items] * len(plans),
            "matching": matching,
            "a_prob": np.exp(log_p[:, 0]),
            "b_prob": np.exp(log_p[:, 1]),
            "p_matching": np.where(np.array(matching) == "A", share, 1 - share),
        }
    )


def _table(rows: pd.DataFrame, factors: Sequence[float]) -> pd.DataFrame:
    found: list[Any] = []
    for (behaviour, layer), part in rows.groupby(["behaviour", "layer"], sort=False):  # pyright: ignore[reportGeneralTypeIssues]
        wide: Any = part.pivot(index="item", columns="multiplier", values="p_matching")
        change = (wide[factors[-1]] - wide[factors[0]]).to_numpy()
        asked = part.drop_duplicates("item").sort_values("item").question.tolist()
        ends = cluster_t_mean(change, asked)
        means = [float(wide[factor].mean()) for factor in factors]
        found.append((behaviour, layer, len(wide), *means, float(change.mean()), ends.low, ends.high))
    at = [f"p at {factor:g}" for factor in factors]
    columns = ["behaviour", "layer", "items", *at, "change", "change_low", "change_high"]
    return pd.DataFrame(found, columns=columns)


def _sentences(table: pd.DataFrame, factors: Sequence[float]) -> tuple[str, ...]:
    found = []
    for behaviour, part in table.groupby("behaviour", sort=False):
        best: Any = part.loc[part.change.idxmax()]
        found.append(
            f"{behaviour}: from multiplier {factors[0]:g} to {factors[-1]:g} the matching answer gains most at layer "
            f"{best.layer}, {with_ends(best.change, best.change_low, best.change_high)} of probability; the "
            "best of several layers looks better than it is."
        )
    return tuple(found)
