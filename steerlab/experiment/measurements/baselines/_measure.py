"""How arms that change the prompt are measured on the items of an effect."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core._text import PromptLike, encode_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, RunError
from steerlab.core.shipped import reference_text
from steerlab.core.targets import TargetItem, Targets
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.run import Run
from steerlab.experiment.measurements._interval_rule import with_rule
from steerlab.experiment.measurements._item_values import item_values
from steerlab.experiment.measurements.baselines.arms import PromptArm, check_arms
from steerlab.experiment.measurements.baselines.comparison import (
    VECTOR,
    BaselineComparison,
    check_ratios,
    common_ratio,
    equal_cost,
)
from steerlab.experiment.measurements.cost import perplexity_figures
from steerlab.experiment.measurements.effect import Effect
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.measures.intervals import cluster_t_mean

_COST = ["ppl_ratio", "ppl_ratio_low", "ppl_ratio_high"]


def measure_baselines(
    run: Run, effect: Effect, arms: Any, *, ratios: Any, metric: "str | Metric | None"
) -> BaselineComparison:
    """See `steerlab.experiment.Experiment.baselines`."""
    if not isinstance(effect, Effect):
        raise InputError(f"effect is what exp.effect(…) gave, got {type(effect).__name__}.")
    found, asked_ratios = check_arms(arms), None if ratios is None else check_ratios(ratios)
    name, function = find_metric(_metric_of(effect, metric))
    session = run.session
    session.open()
    targets, texts = _inputs(run, effect)
    same = [effect.plan_hash, effect.doses, [_identity(arm) for arm in found], metric_identity(metric or name)]
    with run.measuring("baselines", lambda: ([targets], same)):
        engine = cell_engine_for(session)
        base = item_values(engine, [None], targets, function)[0]
        rows = [_vector_rows(effect)]
        costs = [_vector_costs(effect)]
        for arm in found:
            rows.append(_arm_rows(engine, arm, targets, function, base))
            costs.append(_arm_costs(engine, arm, texts))
    whole = pd.concat(rows, ignore_index=True)
    groups = np.array(targets.groups)
    whole = whole.assign(group=groups[whole["item"]], change=whole.value - base[whole["item"]])
    points = _points(whole, pd.concat(costs, ignore_index=True))
    levels = common_ratio(points) if asked_ratios is None else asked_ratios
    table = equal_cost(whole, points, levels)
    about = (name, effect.plan_hash, effect.plan_text, tuple(found), targets.hash, session.seed)
    return run.keep("baseline", [targets.hash, same, asked_ratios], BaselineComparison(whole, points, table, *about))


def _metric_of(effect: Effect, metric: "str | Metric | None") -> "str | Metric":
    own = effect.settings.metric_identity
    if metric is None and "#" in own:
        raise InputError(f"The effect's metric is a function ({own}); pass it again as metric=.")
    given = effect.settings.metric if metric is None else metric
    if metric_identity(given) != own:
        raise InputError(f"The effect was measured with {own}, and metric= is {metric_identity(given)}; use the same.")
    return given


def _inputs(run: Run, effect: Effect) -> tuple[Targets, list[PromptLike]]:
    """Items and neutral texts of an effect, from the run that measured it."""
    inputs = run.session.inputs
    try:
        return inputs.targets(effect.provenance["targets_hash"]), inputs.data(effect.provenance["neutral_hash"])
    except RunError as error:
        raise InputError("This effect was measured by another experiment; measure it here first.") from error


def _identity(arm: PromptArm) -> list[Any]:
    return [arm.name, arm.strengths, arm.texts, arm.separator]


def _vector_rows(effect: Effect) -> pd.DataFrame:
    """The vector's items at dose 0 and on its positive side (its negative one if it has no other)."""
    doses = _side(effect.doses)
    real: Any = effect.rows[effect.rows.family == "vector"]
    real = real[real.dose.isin(doses)]
    return pd.DataFrame({"arm": VECTOR, "strength": real.dose, "item": real["item"], "value": real.value})


def _vector_costs(effect: Effect) -> pd.DataFrame:
    cost: Any = effect.cost[effect.cost.dose.isin(_side(effect.doses))]
    return cost.rename(columns={"dose": "strength"}).reindex(columns=["strength", *_COST]).assign(arm=VECTOR)


def _side(doses: Sequence[float]) -> list[float]:
    if 0 not in doses:
        raise InputError(f"The effect has no dose 0, from which changes are counted; its doses are {list(doses)}.")
    positive = [dose for dose in doses if dose >= 0]
    return positive if len(positive) > 1 else [dose for dose in doses if dose <= 0]


def _arm_rows(engine: Engine, arm: PromptArm, targets: Targets, metric: Metric, base: np.ndarray) -> pd.DataFrame:
    values = [base]
    for strength in arm.strengths:
        items = tuple(
            TargetItem(arm.applied(item.prompt, strength), item.positives, item.negatives, item.group)
            for item in targets
        )
        values.append(item_values(engine, [None], Targets(items), metric)[0])
    strengths = [0.0, *arm.strengths]
    return pd.DataFrame(
        {
            "arm": arm.name,
            "strength": np.repeat(strengths, len(targets)),
            "item": np.tile(np.arange(len(targets)), len(strengths)),
            "value": np.concatenate(values),
        }
    )


def _arm_costs(engine: Engine, arm: PromptArm, texts: Sequence[PromptLike]) -> pd.DataFrame:
    """What the arm's text does to neutral text after it, against neutral prose of as many tokens in its place.

    Any text before another one makes its first words less surprising; that is no property of the arm.
    """
    rows = [(0.0, 1.0, 1.0, 1.0)]
    for strength in arm.strengths:
        after = text_nlls_after(engine, arm.before(strength), texts)
        base = text_nlls_after(engine, neutral_lead(engine, arm.before(strength), arm.separator), texts)
        rows.append((strength, *perplexity_figures(after, base)[2:5]))
    return pd.DataFrame(rows, columns=["strength", *_COST]).assign(arm=arm.name)


def neutral_lead(engine: Engine, before: str, separator: str) -> list[int]:
    """Tokens of the shipped reference text, as many as a text has, ending in the same separator.

    Args:
        engine: the engine, whose tokenizer counts.
        before: the text it stands in for, its separator included.
        separator: what it ends in.
    """
    tokenizer, d_vocab = engine.tokenizer, engine.info.d_vocab
    wanted = len(encode_prompt(tokenizer, before, d_vocab=d_vocab).token_ids)
    prose = list(encode_prompt(tokenizer, reference_text(), d_vocab=d_vocab).token_ids)
    has_bos = prose[0] == tokenizer.bos_token_id
    end = tokenizer(separator, add_special_tokens=False)["input_ids"] if separator else []
    body = prose[has_bos:]
    room = max(1, wanted - has_bos - len(end))
    return [*prose[:has_bos], *itertools.islice(itertools.cycle(body), room), *end]


def text_nlls_after(engine: Engine, before: PromptLike, texts: Sequence[PromptLike]) -> list[np.ndarray]:
    """Negative log-probability in nats of every token of texts but the first, after another text.

    The texts keep their own tokens whatever stands before them, so both arms score the same ones.

    Args:
        engine: the engine.
        before: what stands before, as text or token ids; empty for nothing.
        texts: the texts, of at least two tokens each.

    Raises:
        InputError: if a text and what stands before it are longer than the model's context.
    """
    tokenizer, d_vocab = engine.tokenizer, engine.info.d_vocab
    lead = encode_prompt(tokenizer, before, d_vocab=d_vocab).token_ids if len(before) else ()
    contexts, targets = [], []
    for index, text in enumerate(texts):
        ids = encode_prompt(tokenizer, text, d_vocab=d_vocab).token_ids
        own = ids[1:] if lead and ids[0] == tokenizer.bos_token_id else ids  # one BOS, that of what stands before
        context, target = (lead, own) if lead and own is not ids else ((*lead, *own[:1]), own[1:])
        if len(context) + len(target) > engine.info.context_length or not target:
            raise InputError(
                f"Neutral text {index} has {len(ids)} tokens, and {len(lead)} stand before it; it takes at least two, "
                f"and the model reads {engine.info.context_length} in all. Give the effect shorter texts as neutral=."
            )
        contexts.append(list(context))
        targets.append([list(target)])
    return [-np.array(score.token_log_probs) for score in engine.score(contexts, targets)]


def _points(rows: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    found: list[Any] = []
    for (arm, strength), part in rows.groupby(["arm", "strength"], sort=False):  # pyright: ignore[reportGeneralTypeIssues]
        ends = cluster_t_mean(part.change.to_numpy(), part.group.tolist())
        found.append((arm, strength, float(part.change.mean()), ends.low, ends.high))
    changes = pd.DataFrame(found, columns=["arm", "strength", "change", "change_low", "change_high"])
    whole: Any = changes.merge(costs, on=["arm", "strength"])
    return with_rule(whole[["arm", "strength", *_COST, "change", "change_low", "change_high"]])
