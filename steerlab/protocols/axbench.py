"""AxBench's steering task: can a method bring a concept into answers that stay answers? (Wu et al. 2025)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import as_list, as_number, check_flag, check_integer, shown
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.display import count
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.run import Run
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.measurements.protocols import ProtocolResult
from steerlab.measures.intervals import cluster_t_mean
from steerlab.protocols._axbench_vectors import READ, WHERE, concept_vector
from steerlab.protocols._recording import kept, run_of
from steerlab.protocols.axbench_data import Concept
from steerlab.scoring.judging import RubricJudge
from steerlab.scoring.judging.judge import judge as make_judge
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan

PAPER: Final = "Wu et al. 2025, AxBench: Steering LLMs? Even Simple Baselines Outperform Sparse Autoencoders"
METHODS: Final = ("prompting", *READ, "reft_r1")
FACTORS: Final = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0)
PARTS: Final = ("concept", "instruction", "fluency")
PROMPT: Final = "{instruction}\n\nWhatever you write, bring this in throughout: {concept}."
"""How the prompting arm asks for a concept."""
SAME: Final = (
    "A direction per concept from its own texts; what is added is the direction times its largest activation in texts "
    "that show the concept, times a factor.",
    "DiffMean is the mean over all tokens of texts with the concept minus that over all tokens of texts without it; "
    "PCA the first component of the tokens of texts with it; ReFT-r1 is trained on them.",
    "The factor is chosen per concept and method on half of the instructions, and the other half is reported.",
    "A judge rates concept, instruction and fluency from 0 to 2; the score is the harmonic mean, 0 if any part is 0.",
    "Prompting is an arm beside the vectors.",
)
DIFFERS: Final = (
    "The judge's rating is the exact expectation over its distribution on 0, 1 and 2, not one reply that is parsed; "
    "the rubrics are worded anew.",
    "The published judge is a large commercial model; what a small judge cannot tell apart, these figures do not show.",
    "The prompt that asks for a concept is one fixed sentence; the paper has a model write one per concept.",
    "The largest activation is that in the training texts; the paper takes it from the texts of its detection task.",
    "The first token is neither read nor steered. Instructions and factors are the caller's.",
    "Intervals (Student's t over concepts) are added.",
)


@explains_arguments
def axbench(
    exp: Experiment,
    concepts: Sequence[Concept],
    instructions: Sequence[str],
    *,
    layer: int,
    judge: Engine | None = None,
    methods: Sequence[str] = METHODS,
    factors: Sequence[float] = FACTORS,
    max_new_tokens: int = 64,
    chat: bool = False,
    trainer: Engine | None = None,
    training: Mapping[str, Any] | None = None,
) -> ProtocolResult:
    """How well each method brings concepts into answers, as a judge sees it.

    Args:
        exp: the experiment; its engine runs, and its run directory keeps vectors, texts and ratings.
        concepts: from `read_concepts`, or made by hand.
        instructions: what is asked; the first half chooses factors, the second half is reported.
        layer: the layer, at `resid_post`.
        judge: the engine whose model rates; the experiment's own if None.
        methods: of `prompting`, `diff_mean`, `pca`, `random` and `reft_r1`.
        factors: what a vector is multiplied by, of which the best is chosen.
        max_new_tokens: tokens of an answer at most; answers are greedy.
        chat: ask in a chat; texts that are read and trained on stay plain.
        trainer: the TransformerLens engine that ReFT-r1 is trained on; needed where the experiment runs on vLLM.
        training: options of `extract(method="reft_r1")`, e.g. `{"steps": 100}`.

    Returns:
        A `ProtocolResult`. `table`: a row per method: `concepts`, `score` (the mean rating from 0 to 2) with its
        interval, Student's t over concepts, the means of the three parts, and `factor`, the mean of those chosen.
        `rows`: a row per method, concept, instruction and factor: `text`, `score`, the parts' expected ratings, `mass`,
        `half` (`choose` or `report`) and `chosen`.

    Raises:
        InputError: for unknown methods, no concept, fewer than two instructions, or factors that are not positive.

    Source:
        Wu et al. 2025 (arXiv:2501.17148), sections 3.2 and 4.
    """
    run = run_of(exp)
    found, asked, given = _concepts(concepts), _instructions(instructions), _methods(methods)
    scales = _factors(factors)
    (at,) = _one_layer(layer, run.session.info.n_layers)
    length = check_integer(max_new_tokens, "max_new_tokens", least=1)
    as_chat, options = check_flag(chat, "chat"), dict(training or {})
    settings = {
        "layer": at,
        "methods": list(given),
        "factors": scales,
        "max_new_tokens": length,
        "chat": as_chat,
        "training": {name: options[name] for name in sorted(options)},
        "judge": run.session.info.name if judge is None else judge.info.name,
        "instructions": asked,
        "concepts": {concept.name: concept.hash for concept in found},
    }
    rater = run.session.engine if judge is None else judge
    rows = []
    for concept in found:
        judged = _keeping(run, make_judge(rater, rubrics(concept.name)))
        for method in given:
            if method == "prompting":
                texts = _prompted(exp, concept, asked, length, as_chat)
            else:
                vector = concept_vector(run, concept, method, at, trainer=trainer, training=options)
                texts = _steered(exp, vector, asked, scales, length, as_chat)
            rows.append(_rated(judged, texts, asked).assign(concept_name=concept.name, method=method))
    frame = _choose(pd.concat(rows, ignore_index=True), len(asked))
    table = summary_table(frame, given)
    result = ProtocolResult("axbench", PAPER, table, frame, SAME, DIFFERS, settings, _sentences(table, frame))
    return kept(run, settings, result)


def rubrics(concept: str) -> dict[str, str]:
    """The three questions about an answer, for `steerlab.judge`."""
    end = "Answer: {text}\n\n"
    return {
        "concept": f"{end}Does the answer contain this: {concept}? 0 is not at all, 1 is a little or in passing, 2 is "
        "clearly. Rating from 0 to 2:",
        "instruction": "Instruction: {prompt}\n"
        + end
        + "Does the answer deal with the instruction? 0 is not at all, 1 "
        "is in part, 2 is fully. Rating from 0 to 2:",
        "fluency": f"{end}Is the answer fluent? 0 is unreadable or the same words over and over, 1 is readable with "
        "clear faults, 2 is natural. Rating from 0 to 2:",
    }


def _keeping(run: Run, judge: RubricJudge) -> RubricJudge:
    """The judge with its scores kept as cells of the run."""
    own = run.session.loaded and run.session.engine is judge.engine
    return judge.on(cell_engine_for(run.session, None if own else judge.engine))


def _steered(
    exp: Experiment, vector: Any, asked: Sequence[str], factors: Sequence[float], length: int, chat: bool
) -> pd.DataFrame:
    plan = Plan(add(vector, coef=1.0, where=WHERE))
    greedy = SamplingPolicy.greedy()
    return exp.generate(plan, list(asked), doses=factors, policy=greedy, max_new_tokens=length, chat=chat)


def _prompted(exp: Experiment, concept: Concept, asked: Sequence[str], length: int, chat: bool) -> pd.DataFrame:
    """Answers of the unsteered model to instructions that ask for the concept."""
    prompts = [PROMPT.format(instruction=one, concept=concept.name) for one in asked]
    rows = exp.generate(Plan(), prompts, doses=[0.0], policy=SamplingPolicy.greedy(), max_new_tokens=length, chat=chat)
    return rows.assign(dose=1.0)


def _rated(judge: RubricJudge, texts: pd.DataFrame, asked: Sequence[str]) -> pd.DataFrame:
    """A row per text with its ratings; a batch of the judge per factor."""
    parts = []
    for factor, part in texts.groupby("dose", sort=True):
        places: list[int] = part.prompt_index.tolist()
        prompts = [asked[k] for k in places]
        said = judge.rate(part.text.tolist(), prompts=prompts)
        expected = {name: said.of(name).expected.to_numpy() for name in PARTS}
        mass = np.min([said.of(name).mass.to_numpy() for name in PARTS], axis=0)
        columns = {"instruction_index": part.prompt_index.to_numpy(), "factor": factor, "text": part.text.to_numpy()}
        parts.append(pd.DataFrame({**columns, "score": said.ratings, **expected, "mass": mass}))
    return pd.concat(parts, ignore_index=True)


def _choose(rows: pd.DataFrame, n: int) -> pd.DataFrame:
    """Marks the halves of the instructions, and per concept and method the factor that is best on the first."""
    rows["half"] = np.where(rows.instruction_index < n // 2, "choose", "report")
    first = rows[rows.half == "choose"].groupby(["concept_name", "method", "factor"]).score.mean()
    best = {key: part.idxmax()[2] for key, part in first.groupby(level=[0, 1])}
    keys = zip(rows.concept_name, rows.method, strict=True)
    rows["chosen"] = rows.factor == np.array([best[key] for key in keys])
    first_columns = ["method", "concept_name", "instruction_index", "half", "factor", "chosen"]
    ordered: Any = rows[[*first_columns, *[name for name in rows if name not in first_columns]]]
    return ordered


def summary_table(rows: pd.DataFrame, methods: Sequence[str]) -> pd.DataFrame:
    """A row per method, of the answers that are reported: `ProtocolResult.table` of the rows of `axbench`.

    Args:
        rows: rows of one call of `axbench`, or of several with other concepts.
        methods: which, in this order.
    """
    found: list[Any] = []
    reported = rows[rows.chosen & (rows.half == "report")]
    for method in methods:
        part: Any = reported[reported.method == method]
        ends = cluster_t_mean(part.score.to_numpy(), part.concept_name.tolist())
        parts = [float(part[name].mean()) for name in PARTS]
        factor = np.nan if method == "prompting" else float(part.groupby("concept_name").factor.first().mean())
        n = part.concept_name.nunique()
        found.append(
            (method, n, float(part.score.mean()), ends.low, ends.high, *parts, factor, float(part.mass.mean()))
        )
    columns = ["method", "concepts", "score", "score_low", "score_high", *PARTS, "factor", "mass"]
    return pd.DataFrame(found, columns=columns)


def method_differences(rows: pd.DataFrame, methods: Sequence[str]) -> pd.DataFrame:
    """Mean score of one method minus that of another on the same concepts, for every two, with Student's t intervals.

    Args:
        rows: as in `summary_table`.
        methods: which.

    Returns:
        `method`, `other`, `concepts`, `difference`, `low`, `high`.
    """
    reported = rows[rows.chosen & (rows.half == "report")]
    means = reported.groupby(["concept_name", "method"]).score.mean().unstack()
    found = []
    for one, other in itertools.combinations(methods, 2):
        away = means[one] - means[other]
        ends = cluster_t_mean(away.to_numpy(), away.index.tolist())
        found.append((one, other, len(away), float(away.mean()), ends.low, ends.high))
    return pd.DataFrame(found, columns=["method", "other", "concepts", "difference", "low", "high"])


def _sentences(table: pd.DataFrame, rows: pd.DataFrame) -> tuple[str, ...]:
    ranked: Any = table.sort_values("score", ascending=False)
    order = ", ".join(f"{r.method} {_told(r.score, r.score_low, r.score_high)}" for r in ranked.itertuples())
    found = [f"Mean score from 0 to 2: {order}."]
    if len(ranked) > 1:
        best = method_differences(rows, ranked.method.tolist()[:2]).iloc[0]
        if not best.low > 0:
            away = _told(best.difference, best.low, best.high)
            found.append(
                f"{best.method} minus {best.other} on the same concepts is {away}: which of them is better is not "
                f"shown by {count(int(best.concepts), 'concept')}."
            )
    mass = float(rows.mass.mean())
    if mass < 0.5:
        found.append(f"The judge puts {mass:.2f} of its probability on the ratings at all; they mean little.")
    return tuple(found)


def _told(value: float, low: float, high: float) -> str:
    """A mean with its interval; one concept has none."""
    return f"{value:.2f}" if np.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _one_layer(layer: Any, n_layers: int) -> Sequence[int]:
    found = resolve_layers(layer, n_layers)
    if len(found) != 1:
        raise InputError(f"axbench steers one layer, got {len(found)}: layer=14, say.")
    return found


def _concepts(concepts: Any) -> list[Concept]:
    found = as_list(concepts, ordered=True) or []
    if not found or not all(isinstance(one, Concept) for one in found):
        raise InputError(f"concepts is a list of Concepts, from read_concepts(…), at least one; got {shown(concepts)}.")
    if len({one.name for one in found}) < len(found):
        raise InputError("Two concepts have the same name.")
    return found


def _instructions(instructions: Any) -> list[str]:
    found = as_list(instructions, ordered=True) or []
    if len(found) < 2 or not all(isinstance(one, str) and one.strip() for one in found):
        raise InputError(f"instructions is a list of two or more texts, got {shown(instructions)}.")
    return found


def _methods(methods: Any) -> list[str]:
    found = as_list(methods, ordered=True) or []
    if not found or any(one not in METHODS for one in found) or len(set(found)) < len(found):
        raise InputError(f"methods are some of {', '.join(METHODS)}, each once; got {shown(methods)}.")
    return found


def _factors(factors: Any) -> list[float]:
    numbers = [as_number(one) for one in as_list(factors, ordered=True) or ()]
    found = sorted({one for one in numbers if one is not None and one > 0})
    if not found or len(found) < len(numbers):
        raise InputError(f"factors are distinct finite numbers > 0, at least one; got {shown(factors)}.")
    return found
