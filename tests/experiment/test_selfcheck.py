"""The selfcheck passes on sound engines and notices each way in which one can be unsound."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError, RunError
from steerlab.experiment.measurements.selfcheck import TOLERANCES, Check, SelfCheck, selfcheck


class Unsound:
    """A real engine with one fault between it and the caller."""

    def __init__(self, engine):
        self._engine = engine
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def score(self, prompts, targets, **options):
        self.calls += 1
        return self._engine.score(prompts, targets, **options)

    def generate(self, prompts, **options):
        return self._engine.generate(prompts, **options)


def moved(scores, by):
    """Scores with every log-prob off by a little."""
    rows = [
        type(row)(**{**vars(row), "token_log_probs": tuple(value + by for value in row.token_log_probs)})
        for row in scores
    ]
    return replace(scores, rows=tuple(rows))


class BatchDependent(Unsound):
    def score(self, prompts, targets, **options):
        return moved(super().score(prompts, targets, **options), 0.01 * (len(prompts) > 1))


class IgnoresPlans(Unsound):
    def score(self, prompts, targets, *, plan=None):
        return super().score(prompts, targets)

    def generate(self, prompts, *, plan=None, **options):
        return super().generate(prompts, **options)


class LeavesHooks(Unsound):
    """After the first steered call a hook stays behind."""

    def score(self, prompts, targets, *, plan=None):
        found = super().score(prompts, targets, plan=plan)
        self.steered = getattr(self, "steered", False) or (plan is not None and all(e.scale != 0 for e in plan))
        return moved(found, 1e-6) if self.steered and plan is None else found


class DoseZeroActs(Unsound):
    def score(self, prompts, targets, *, plan=None):
        zero = plan is not None and all(edit.scale == 0 for edit in plan)
        return moved(super().score(prompts, targets, plan=plan), 1e-6 * zero)


def lowered(made, by):
    """Completions whose k-th log-prob is lower by `by(k)`."""
    values = [[value - by(k) for k, value in enumerate(row.token_log_probs)] for row in made]
    rows = [type(row)(**{**vars(row), "token_log_probs": own}) for row, own in zip(made, values, strict=True)]
    return replace(made, completions=tuple(rows))


class CacheDiffers(Unsound):
    def generate(self, prompts, **options):
        return lowered(super().generate(prompts, **options), lambda k: 0.01 * k)


class PaddingMatters(Unsound):
    def generate(self, prompts, **options):
        return lowered(super().generate(prompts, **options), lambda k: 0.01 * (len(prompts) > 1))


class LosesReceipts(Unsound):
    """Receipts say that the first token of every row was not edited."""

    def score(self, prompts, targets, **options):
        return fewer_edits(super().score(prompts, targets, **options))

    def generate(self, prompts, **options):
        return fewer_edits(super().generate(prompts, **options))


def fewer_edits(result):
    """A result whose receipts count one edited token less for each edit."""
    return replace(
        result,
        receipts=tuple(
            replace(r, edits=tuple(replace(e, edited=e.edited - 1) for e in r.edits)) for r in result.receipts
        ),
    )


@pytest.mark.parametrize("name", ["tiny_llama_engine", "tiny_gpt2_engine"])
def test_sound_engines_pass(request, name):
    engine = request.getfixturevalue(name)
    found = selfcheck(engine, layers=[1, 2], seed=3)
    assert found.passed, str(found)
    assert found.raise_if_failed() is found
    assert "selfcheck passed" in str(found)
    assert len(str(found).splitlines()) == 1 + len(found.checks)
    frame = found.to_frame()
    assert isinstance(frame.index, pd.RangeIndex)
    assert frame.passed.all()
    assert "blocks.1.hook_resid_post" in found.plan
    assert "blocks.2.hook_resid_post" in found.plan


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (BatchDependent, {"batch = one by one"}),
        (IgnoresPlans, {"the plan acts", "receipts as implied"}),
        (LeavesHooks, {"unsteered model unchanged"}),
        (DoseZeroActs, {"dose 0 = baseline"}),
        (CacheDiffers, {"cached = uncached", "padding changes nothing"}),
        (PaddingMatters, {"padding changes nothing"}),
        (LosesReceipts, {"receipts as implied"}),
    ],
)
def test_each_fault_is_noticed_and_named(tiny_llama_engine, fault, expected):
    found = selfcheck(fault(tiny_llama_engine))
    names = {check.name for check in found.failures}
    assert names == expected
    with pytest.raises(RunError, match="The selfcheck of") as error:
        found.raise_if_failed()
    assert all(name in str(error.value) for name in names)


def test_a_real_hook_that_stays_behind_is_noticed(tiny_llama_engine):
    """An own permanent hook, added in the middle, makes the unsteered model another one."""

    class HookAppears(Unsound):
        def generate(self, prompts, **options):
            if not self.calls_of_generate:
                self.handle = self._engine.model.original_model.model.layers[1].register_forward_hook(
                    lambda _, __, out: (out[0] + 0.1, *out[1:]) if isinstance(out, tuple) else out + 0.1
                )
            self.calls_of_generate += 1
            return super().generate(prompts, **options)

        calls_of_generate = 0
        handle = None

    engine = HookAppears(tiny_llama_engine)
    try:
        found = selfcheck(engine)
    finally:
        engine.handle.remove()
    assert "unsteered model unchanged" in {check.name for check in found.failures}
    assert selfcheck(tiny_llama_engine).passed


def test_an_error_inside_a_check_is_its_failure(tiny_llama_engine):
    class Fails(Unsound):
        def generate(self, prompts, **options):
            raise InputError("no generation today")

    found = selfcheck(Fails(tiny_llama_engine))
    failed = {check.name: check for check in found.failures}
    assert failed.keys() == {"padding changes nothing", "cached = uncached", "receipts as implied"}
    assert "no generation today" in failed["cached = uncached"].detail
    assert math.isnan(failed["cached = uncached"].value)


def test_an_own_plan_and_tolerance(tiny_llama_engine):
    vector = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(1)), layer=3)
    plan = sl.Plan(sl.add(vector, coef=3.0, where=sl.where.all()))
    assert selfcheck(tiny_llama_engine, plan=plan).passed
    strict = selfcheck(tiny_llama_engine, tolerance=1e-12)
    assert not strict.passed
    weak = selfcheck(tiny_llama_engine, plan=plan.scaled(1e-9))
    assert [check.name for check in weak.failures] == ["the plan acts"]
    with pytest.raises(InputError, match="not both"):
        selfcheck(tiny_llama_engine, layers=1, plan=plan)


def test_tolerances_are_stated_per_engine_and_dtype(tiny_llama_engine):
    assert {(kind, dtype) for kind, dtype in TOLERANCES if dtype != "float64"} == {
        (kind, dtype) for kind in ("lens", "vllm") for dtype in ("float32", "bfloat16", "float16")
    }

    class Odd(Unsound):
        @property
        def info(self):
            return type(self._engine.info)(**{**vars(self._engine.info), "dtype": "float8"})

    with pytest.raises(InputError, match="No tolerance is known for float8"):
        selfcheck(Odd(tiny_llama_engine))


def test_half_precision_passes_within_its_tolerance(tiny_llama_path):
    with sl.load(tiny_llama_path, device="cpu", dtype="bfloat16") as engine:
        found = selfcheck(engine)
    assert found.passed, str(found)
    by_name = {check.name: check for check in found.checks}
    assert by_name["cached = uncached"].tolerance == TOLERANCES["lens", "bfloat16"]
    assert by_name["dose 0 = baseline"].value == 0


def test_a_selfcheck_without_failures_passes():
    good, bad = Check("a", True, 0.0, 0.0, ""), Check("b", False, 1.0, 0.5, "")
    assert SelfCheck((good,), "engine", "plan", 0).passed
    assert SelfCheck((good, bad), "engine", "plan", 0).failures == [bad]
