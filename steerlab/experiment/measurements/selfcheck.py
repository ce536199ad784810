"""Selfcheck: whether steering on this engine and model does what it says, before anything is measured with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pandas as pd
import torch

from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import check_number
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, RunError, SteerlabError
from steerlab.core.receipts import Receipt
from steerlab.core.results import Generations, Scores
from steerlab.display import Piece, Shown, count
from steerlab.experiment._blocks import Section
from steerlab.experiment._blocks.findings import Finding, finding_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import plain_option
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import default as default_where
from steerlab.steering.vectors import SteeringVector

DOSE = 0.5
"""Strength of the check's random direction: strong, so that an edit that is lost or doubled shows."""

NEW_TOKENS = 8

TOLERANCES: Final[dict[tuple[str, str], float]] = {
    ("lens", "float64"): 1e-6,
    ("lens", "float32"): 1e-3,
    ("lens", "bfloat16"): 0.5,
    ("lens", "float16"): 0.1,
    ("vllm", "float32"): 2e-3,
    ("vllm", "bfloat16"): 0.5,
    ("vllm", "float16"): 0.1,
}
"""Largest |Δ log p| of one token, in nats, between two ways to compute the same number, by engine and dtype: sums in
another order differ that much after some layers. Equality to the bit is asked for where the computation is the same."""

PROMPTS: Final = (
    "The capital of France is",
    "She opened the window because the room was warm and the street outside was quiet, and",
    "Two plus two equals",
)
TARGETS: Final = ([" Paris, the city of light", " a town"], [" so she listened"], [" four", " five and not six"])


@dataclass(frozen=True)
class Check:
    """One property, and how it came out.

    Attributes:
        name: the property in words.
        passed: whether it holds.
        value: the largest deviation seen, in nats or tokens; NaN if the check could not be carried out.
        tolerance: the largest deviation allowed; 0 asks for equality to the bit.
        detail: what was compared, or the error.
        at_least: whether the deviation must exceed the tolerance instead: what steering does must be seen.
    """

    name: str
    passed: bool
    value: float
    tolerance: float
    detail: str
    at_least: bool = False


@dataclass(frozen=True, repr=False)
class SelfCheck(Shown):
    """The outcome of a selfcheck.

    Attributes:
        checks: one entry per property.
        engine: engine, model and dtype in words.
        plan: the plan it was done with, in words.
        seed: of the plan's random direction and of sampling.
    """

    checks: tuple[Check, ...]
    engine: str
    plan: str
    seed: int

    @property
    def passed(self) -> bool:
        """Whether every property holds."""
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """Those that do not hold."""
        return [check for check in self.checks if not check.passed]

    def to_frame(self) -> pd.DataFrame:
        """A row per property: `check`, `passed`, `value`, `tolerance`, `detail`."""
        rows = [(c.name, c.passed, c.value, c.tolerance, c.detail) for c in self.checks]
        return pd.DataFrame(rows, columns=["check", "passed", "value", "tolerance", "detail"])

    def raise_if_failed(self) -> "SelfCheck":
        """The selfcheck itself, if it passed.

        Raises:
            RunError: naming each property that does not hold.
        """
        if not self.passed:
            found = "\n".join(_line(check) for check in self.failures)
            raise RunError(
                f"The selfcheck of {self.engine} failed; results of it cannot be trusted:\n{found}\n"
                "Remove hooks and patches of your own and try again, or go on with allow_failure=True (it is recorded)."
            )
        return self

    def _finding(self) -> str:
        verdict = "passed" if self.passed else f"FAILED: {', '.join(check.name for check in self.failures)}"
        return f"{verdict}; {count(len(self.checks), 'check')} of {self.engine}"

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment._blocks.faces import finding_pieces  # which draws

        return finding_pieces(selfcheck_finding(self))

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return "\n".join([f"selfcheck {verdict}: {self.engine}", *map(_line, self.checks)])


def _line(check: Check) -> str:
    mark = "ok  " if check.passed else "FAIL"
    sign = ">" if check.at_least else "≤"
    bound = "to the bit" if check.tolerance == 0 else f"{sign} {check.tolerance:g}"
    return f"  {mark}  {check.name:<28} {check.value:<8.2g} {bound:<10} {check.detail}"


def selfcheck(
    engine: Engine,
    *,
    layers: Any = None,
    seed: int = 0,
    plan: Plan | None = None,
    tolerance: float | None = None,
) -> SelfCheck:
    """Checks steering on an engine with a strong random direction and a few short prompts.

    Dose 0 equals the baseline to the bit; the plan acts; a batch equals its rows alone; with and without cache, the
    sampled tokens get the same log-probabilities; prompts of different lengths do not disturb each other; receipts
    equal what the plan implies; and afterwards the unsteered model is the same to the bit.

    Args:
        engine: the engine.
        layers: layers to steer ("all", an index or several); by default the middle one, on vLLM all that are wired.
        seed: of the random direction and of sampling.
        plan: a plan to check with instead, of edits at the default positions or at all.
        tolerance: largest |Δ log p| per token; by default that of `TOLERANCES` for engine and dtype.

    Returns:
        A `SelfCheck`; nothing is raised for a property that does not hold, see `raise_if_failed`.

    Raises:
        InputError: for layers together with a plan, or an engine whose tolerance is not known.
    """
    if plan is not None and layers is not None:
        raise InputError("A selfcheck takes layers= for a plan of its own, or plan=, not both.")
    used = _random_plan(engine, layers, seed) if plan is None else plan
    allowed = _tolerance(engine) if tolerance is None else check_number(tolerance, "tolerance, in nats,", least=0)
    task = _Task(engine, used.resolved(engine.median_norm, engine.info.weights_hash), seed, allowed)
    described = f"{type(engine).__name__} of {engine.info.name}, {engine.info.dtype}"
    return SelfCheck(tuple(task.run()), described, str(used), seed)


class _Task:
    """The checks, in order; the unsteered arm is measured first and again last."""

    def __init__(self, engine: Engine, plan: Plan, seed: int, tolerance: float) -> None:
        self.engine, self.plan, self.seed, self.tolerance = engine, plan, seed, tolerance

    def run(self) -> list[Check]:
        return [
            self._outcome("dose 0 = baseline", 0.0, self._dose_zero),
            self._outcome("the plan acts", self.tolerance, self._acts),
            self._outcome("batch = one by one", self.tolerance, self._batch),
            self._outcome("padding changes nothing", self.tolerance, self._padding),
            self._outcome("cached = uncached", self.tolerance, self._cached),
            self._outcome("receipts as implied", 0.0, self._receipts),
            self._outcome("unsteered model unchanged", 0.0, self._afterwards),
        ]

    def _outcome(self, name: str, tolerance: float, check: Callable[[], tuple[float, str]]) -> Check:
        try:
            value, detail = check()
        except SteerlabError as error:
            return Check(name, False, float("nan"), tolerance, f"{type(error).__name__}: {error}")
        at_least = check == self._acts
        passed = value > tolerance if at_least else value <= tolerance
        return Check(name, passed, value, tolerance, detail, at_least)

    @cached_property
    def _baseline(self) -> Scores:
        return self._score(None)

    @cached_property
    def _steered(self) -> tuple[Scores, list[Receipt]]:
        scores = self._score(self.plan)
        return scores, list(scores.receipts)

    @cached_property
    def _sampled(self) -> tuple[Generations, list[Receipt]]:
        made = self._generate(list(PROMPTS), self.plan)
        return made, list(made.receipts)

    def _score(self, plan: Plan | None) -> Scores:
        return self.engine.score(list(PROMPTS), TARGETS, plan=plan)

    def _generate(self, prompts: list[Any], plan: Plan | None) -> Generations:
        seeds = [self.seed] * len(prompts)  # one per prompt, so that a row draws the same alone
        return self.engine.generate(prompts, plan=plan, max_new_tokens=NEW_TOKENS, seed=seeds)

    def _dose_zero(self) -> tuple[float, str]:
        return largest_change(self._baseline, self._score(self.plan.scaled(0))), "scores of the plan scaled by 0"

    def _acts(self) -> tuple[float, str]:
        return largest_change(
            self._baseline, self._steered[0]
        ), "steered scores against unsteered; without a change the rest shows nothing"

    def _batch(self) -> tuple[float, str]:
        alone = [
            self.engine.score([prompt], [targets], plan=self.plan)
            for prompt, targets in zip(PROMPTS, TARGETS, strict=True)
        ]
        rows = [row for scores in alone for row in scores.token_log_probs]
        return _largest(self._steered[0].token_log_probs, rows), "steered scores of each prompt alone"

    def _padding(self) -> tuple[float, str]:
        return self._against_forcing(self._sampled[0]), "prompts sampled together against each forced alone"

    def _cached(self) -> tuple[float, str]:
        alone = [self._generate([prompt], self.plan) for prompt in PROMPTS]
        return max(map(self._against_forcing, alone)), "prompts sampled alone, with a cache, against forced without"

    def _against_forcing(self, made: Generations) -> float:
        """Largest difference to the log-probs of the same tokens, each row forced in a call of its own."""
        forced = [
            self.engine.score([list(ids)], [[list(row.token_ids)]], plan=self.plan)[0].token_log_probs
            for ids, row in zip(made.prompt_token_ids, made, strict=True)
        ]
        return _largest([row.token_log_probs for row in made], forced)

    def _receipts(self) -> tuple[float, str]:
        scores, of_scores = self._steered
        made, of_made = self._sampled
        counts = [len(ids) for ids in scores.token_ids] + [len(row.token_ids) for row in made]
        receipts = [*of_scores, *of_made]
        if len(receipts) != len(counts):
            return float("inf"), f"{len(receipts)} receipts for {len(counts)} rows"
        wrong = sum(abs(edit.edited - edit.expected) for receipt in receipts for edit in receipt.edits)
        if all(edit.where == default_where() for edit in self.plan):
            # the last prompt token and every token fed back, the last one of a row excepted: as many as were scored
            implied = [n * len(self.plan) for n in counts]
            wrong += sum(abs(receipt.edited - n) for receipt, n in zip(receipts, implied, strict=True))
        total = sum(receipt.edited for receipt in receipts)
        return float(wrong), f"{total} edits in {len(receipts)} rows, counted inside the operator"

    def _afterwards(self) -> tuple[float, str]:
        return largest_change(self._baseline, self._score(None)), "unsteered scores before and after"


def largest_change(a: Scores, b: Scores) -> float:
    """Largest |Δ log p| over all tokens of two runs of the same targets, in nats."""
    return _largest(a.token_log_probs, b.token_log_probs)


def _largest(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    if [len(row) for row in a] != [len(row) for row in b]:
        return float("inf")
    pairs = zip(np.concatenate([*map(np.asarray, a)]), np.concatenate([*map(np.asarray, b)]), strict=True)
    return max((0.0 if x == y else abs(float(x) - float(y)) for x, y in pairs), default=0.0)


def _random_plan(engine: Engine, layers: Any, seed: int) -> Plan:
    """Random directions added at each layer; the strengths share one dose."""
    if layers is None:
        n_layers, traits = engine.info.n_layers, engine.traits
        some = traits.backend == "vllm" or len(traits.layers) < n_layers  # then all that the engine was started with
        layers = list(traits.layers) if some else [n_layers // 2]
    chosen = resolve_layers(layers, engine.info.n_layers)
    generator = torch.Generator().manual_seed(seed)
    vectors = [
        SteeringVector.from_tensor(torch.randn(engine.info.d_model, generator=generator), layer=layer)
        for layer in chosen
    ]
    return Plan(*(add(vector, dose=DOSE / len(chosen)) for vector in vectors))


def _tolerance(engine: Engine) -> float:
    kind = "vllm" if engine.traits.backend == "vllm" else "lens"
    try:
        return TOLERANCES[kind, engine.info.dtype]
    except KeyError as error:
        raise InputError(
            f"No tolerance is known for {engine.info.dtype} on {type(engine).__name__}; pass tolerance= in nats."
        ) from error


def measure_selfcheck(run: Run, *, allow_failure: bool, options: Mapping[str, Any]) -> SelfCheck:
    """See `steerlab.experiment.Experiment.selfcheck`."""
    run.session.open()
    plan = options.get("plan")
    asked = {**options, "plan": plan.hash if isinstance(plan, Plan) else None}
    what = [{name: plain_option(option) for name, option in asked.items()}]
    key = run.key("selfcheck", what)
    known = None if key in run.requested else run.results.find("selfcheck", key)
    run.requested.add(key)
    if known is not None and known.passed:
        return known
    found = run.keep("selfcheck", what, selfcheck(run.session.engine, seed=run.session.seed, **options))
    return found if allow_failure else found.raise_if_failed()


def selfcheck_finding(selfcheck: SelfCheck) -> Finding:
    """Whether steering does what it says on the experiment's own engine and model."""
    failed = [f"Failed: {check.name}. {check.detail}" for check in selfcheck.failures]
    sentences = [f"{selfcheck.engine}; plan {selfcheck.plan}; seed {selfcheck.seed}.", *failed]
    caption = "Largest deviation of each property, and what is allowed"
    return Finding(sentences, selfcheck.to_frame(), selfcheck.passed, caption=caption)


def _sections(m: Material) -> list[Section]:
    return finding_sections("Selfcheck", [selfcheck_finding(one) for one in m.of("selfchecks")])


SELFCHECK = Measurement(finding_kind("selfcheck", "selfchecks", SelfCheck, nested=[Check]), _sections)
