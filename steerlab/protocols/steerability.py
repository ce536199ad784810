"""Steerability and its variance over items and prompts (Tan et al. 2024)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import check_flag, shown
from steerlab.core.errors import InputError
from steerlab.experiment._store.run import Run
from steerlab.experiment._wording import in_figures, with_ends
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.measures.intervals import cluster_t_mean, least_squares_slopes
from steerlab.protocols._arguments import behaviours_of, multipliers_of
from steerlab.protocols._recording import kept, margins, run_of
from steerlab.protocols.choices import ChoiceItems
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector

PAPER: Final = "Tan et al. 2024, Analysing the Generalisation and Reliability of Steering Vectors"
MULTIPLIERS: Final = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
SHARES: Final = (0.4, 0.1, 0.5)
SAME: Final = (
    "Vectors are mean differences between the activations at the letter of the matching and of the other answer, "
    "with their own length.",
    "The vector times each multiplier is added at the last prompt token and whatever follows, at one layer.",
    "An item's propensity is the log-probability of the matching letter less that of the other one; its steerability "
    "is the least-squares slope of the propensity over the multipliers.",
    "40 % of the questions make the vector, 10 % choose the layer by mean steerability, 50 % are measured.",
    "Anti-steerable are items whose slope is below 0.",
    "A vector made with the plain prompt is measured under other prompts too.",
)
DIFFERS: Final = (
    "The published models are Llama-2-7b-chat and Qwen1.5-14B-Chat with their chat templates; the model here is the "
    "experiment's, and questions are plain text unless chat=True.",
    "Which answer is called (A) is as in the file, and is not drawn anew.",
    "With several layers the layer is chosen for each behaviour; the paper fixes one per model after a sweep.",
    "Intervals (Student's t over questions) are added; the paper gives none.",
    "Prompts under which the vector is measured are those given here, not the paper's.",
)


@dataclass(frozen=True)
class _Prompt:
    """A change of the prompt, by name."""

    name: str
    before: str = ""
    system: str = ""


@explains_arguments
def steerability(
    exp: Experiment,
    behaviours: Mapping[str, ChoiceItems],
    *,
    layers: Any,
    multipliers: Sequence[float] = MULTIPLIERS,
    prompts: Mapping[str, str | Mapping[str, str]] | None = None,
    chat: bool = False,
) -> ProtocolResult:
    """How far each behaviour can be steered, how much that varies over items and prompts, and how often it fails.

    Args:
        exp: the experiment; its engine runs, its seed splits, its run directory keeps everything.
        behaviours: questions by the name of the behaviour.
        layers: a layer, or several, of which the best on validation questions is measured.
        multipliers: what the vector is multiplied by.
        prompts: changes of the prompt by name, beside the plain one: text before the question, or `{"system": …}`.
        chat: ask in a chat, with the answer begun as the assistant's.

    Returns:
        A `ProtocolResult`. `table`: a row per behaviour and prompt: `behaviour`, `prompt`, `layer`, `items`,
        `steerability` (mean slope, nats per multiplier) with its interval, `sd_items` (over items), `anti_steerable`
        (share), `letter_share` (share of the variance over items that which letter matches explains), `sd_prompts`
        (of the prompts' means; NaN for one prompt) and `correlation` (rank correlation over items with the plain
        prompt's slopes). `rows`: a row per behaviour, prompt and item: `item`, `matching`, `slope`, `propensity`
        (unsteered, nats).

    Raises:
        InputError: for no behaviour, fewer than two multipliers, or unusable prompts.
        DataError: for too few questions.

    Source:
        Tan et al. 2024, sections 3 and 4.
    """
    run = run_of(exp)
    found, factors = behaviours_of(behaviours), multipliers_of(multipliers)
    variants, as_chat = [_Prompt("plain"), *_prompts(prompts)], check_flag(chat, "chat")
    wanted = resolve_layers(layers, run.session.info.n_layers)
    settings = {
        "layers": wanted,
        "multipliers": factors,
        "chat": as_chat,
        "prompts": {one.name: one.before or one.system for one in variants[1:]},
        "data": {name: items.hash for name, items in found.items()},
    }
    rows = []
    for name, items in found.items():
        train, validation, test = items.split(SHARES, seed=exp.seed)
        vectors = exp.extract(train.pairs(chat=as_chat), layers=wanted, chat=False, name=name)
        with run.measuring("steerability", lambda i=items: ([i.targets(chat=as_chat)], settings)):
            layer = _best_layer(run, [vectors[k] for k in wanted], validation, factors, as_chat)
            rows += [_rows(run, vectors[layer], test, factors, name, one, as_chat) for one in variants]
    frame = pd.concat(rows, ignore_index=True)
    table = _table(frame)
    result = ProtocolResult("steerability", PAPER, table, frame, SAME, DIFFERS, settings, _sentences(table))
    return kept(run, settings, result)


def _slopes(run: Run, vector: SteeringVector, targets: Any, factors: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Slope of each item, and its propensity without steering."""
    plan = Plan(add(vector, coef=1.0))
    values = margins(run, [None if factor == 0 else plan.scaled(factor) for factor in factors], targets)
    base = values[list(factors).index(0.0)] if 0.0 in factors else margins(run, [None], targets)[0]
    return least_squares_slopes(np.array(factors), values.T), base


def _best_layer(
    run: Run, vectors: Sequence[SteeringVector], items: ChoiceItems, factors: Sequence[float], chat: bool
) -> int:
    if len(vectors) == 1:
        return vectors[0].layer
    targets = items.targets(chat=chat)
    means = [float(_slopes(run, vector, targets, factors)[0].mean()) for vector in vectors]
    return vectors[int(np.argmax(means))].layer


def _rows(
    run: Run,
    vector: SteeringVector,
    items: ChoiceItems,
    factors: Sequence[float],
    behaviour: str,
    prompt: _Prompt,
    chat: bool,
) -> pd.DataFrame:
    slopes, base = _slopes(run, vector, items.targets(chat=chat, before=prompt.before, system=prompt.system), factors)
    return pd.DataFrame(
        {
            "behaviour": behaviour,
            "prompt": prompt.name,
            "layer": vector.layer,
            "item": np.arange(len(items)),
            "question": [item.question for item in items],
            "matching": [item.matching for item in items],
            "slope": slopes,
            "propensity": base,
        }
    )


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    found: list[Any] = []
    for behaviour, of_behaviour in rows.groupby("behaviour", sort=False):
        wide: Any = of_behaviour.pivot(index="item", columns="prompt", values="slope")
        between = float(wide.mean().std(ddof=1)) if wide.shape[1] > 1 else np.nan
        ranks = wide.corr(method="spearman")["plain"]
        for prompt, part in of_behaviour.groupby("prompt", sort=False):
            slopes = part.slope.to_numpy(dtype=float)
            ends = cluster_t_mean(slopes, part.question.tolist())
            figures = (float(slopes.mean()), ends.low, ends.high, float(slopes.std(ddof=1)), float((slopes < 0).mean()))
            shares = (explained_share(slopes, part.matching.tolist()), between, float(ranks[prompt]))
            found.append((behaviour, prompt, int(part.layer.iloc[0]), len(part), *figures, *shares))
    names = ["steerability", "steerability_low", "steerability_high", "sd_items", "anti_steerable"]
    columns = ["behaviour", "prompt", "layer", "items", *names, "letter_share", "sd_prompts", "correlation"]
    return pd.DataFrame(found, columns=columns)


def explained_share(values: np.ndarray, groups: Sequence[str]) -> float:
    """Share of the variance that lies between groups: η² of a one-way analysis; NaN without variance or one group.

    Examples:
        >>> explained_share(np.array([1.0, 1.0, 3.0, 3.0]), ["A", "A", "B", "B"])
        1.0
    """
    total = float(((values - values.mean()) ** 2).sum())
    names = np.asarray(groups)
    if total == 0 or len(set(groups)) < 2:
        return float("nan")
    between = sum(float((names == g).sum() * (values[names == g].mean() - values.mean()) ** 2) for g in set(groups))
    return between / total


def _sentences(table: pd.DataFrame) -> tuple[str, ...]:
    return tuple(
        f"{row['behaviour']}, {row['prompt']} prompt: "
        f"{with_ends(row['steerability'], row['steerability_low'], row['steerability_high'])} nats per multiplier, "
        f"standard deviation over items {in_figures(row['sd_items'], places=3)}, "
        f"{row['anti_steerable']:.0%} of {row['items']} items anti-steerable."
        for row in table.to_dict("records")
    )


def _prompts(prompts: Any) -> list[_Prompt]:
    found = []
    for name, change in ({} if prompts is None else prompts).items():
        fields = {"before": change} if isinstance(change, str) else dict(change)
        texts = all(isinstance(text, str) and text for text in fields.values())
        if name == "plain" or not fields or not set(fields) <= {"before", "system"} or not texts:
            raise InputError(
                f"A change of the prompt is text before the question, or {{'system': text}}, under a name other than "
                f"'plain'; got {name!r}: {shown(change)}."
            )
        found.append(_Prompt(str(name), **fields))
    return found
