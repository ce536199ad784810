from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.experiment._store.batches import batch_plans, row_tokens, tokens_per_call_of
from steerlab.experiment.measurements.effect._rows import HASH_COLUMNS, score_plans
from tests.experiment.data import PAIRS, TARGETS, TEXTS


@pytest.mark.parametrize(
    ("tokens_each", "per_call", "sizes"),
    [(10, 30, [3, 3, 1]), (10, 39, [3, 3, 1]), (10, 5, [1] * 7), (10, 1000, [7]), (10, None, [7])],
)
def test_calls_hold_as_many_plans_as_the_budget(tokens_each: int, per_call: int | None, sizes: list[int]) -> None:
    calls = list(batch_plans(range(7), tokens_each, per_call))
    assert [len(call) for call in calls] == sizes
    assert [k for call in calls for k in call] == list(range(7))


def test_budgets_by_backend() -> None:
    assert tokens_per_call_of("lens") is None
    assert tokens_per_call_of("vllm") == 200_000
    assert tokens_per_call_of("lens", 50) == 50
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(InputError, match="tokens_per_call"):
            tokens_per_call_of("vllm", wrong)  # pyright: ignore


def test_tokens_are_those_of_every_target_with_its_prompt(tiny_llama_engine: sl.LensEngine) -> None:
    encode = tiny_llama_engine.tokenizer
    wanted = sum(
        len(encode(item.prompt)["input_ids"]) + len(encode(target)["input_ids"])  # pyright: ignore
        for item in TARGETS
        for target in item.targets
    )
    assert row_tokens(tiny_llama_engine, [(item.prompt, item.targets) for item in TARGETS]) == wanted
    assert row_tokens(tiny_llama_engine, [([3, 4, 5], [[6], [7, 8]])]) == 4 + 5


def test_plans_in_one_call_score_as_each_alone(tiny_llama_engine: sl.LensEngine) -> None:
    vector = sl.extract(tiny_llama_engine, PAIRS, layers=[1])[1]
    plans = [sl.Plan(sl.add(vector, dose=dose)) for dose in (0.1, 0.2)]
    together = score_plans(tiny_llama_engine, plans, TARGETS)
    for plan, frame in zip(plans, together, strict=True):
        (alone,) = score_plans(tiny_llama_engine, [plan], TARGETS)
        pd.testing.assert_frame_equal(frame, alone)
        scores = tiny_llama_engine.score(TARGETS.prompts, [item.targets for item in TARGETS], plan=plan)
        assert frame.log_prob.tolist() == pytest.approx(scores.log_prob.tolist(), abs=1e-5)
        assert frame.item.tolist() == [k for k, item in enumerate(TARGETS) for _ in item.targets]
        assert frame.edited_tokens.tolist() == [receipt.edited for receipt in tiny_llama_engine.receipts]


class CountingEngine:
    """Passes everything on and counts the calls of `score`."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.plans_per_call = engine, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def score(self, prompts: Any, targets: Any, *, plan: Any = None, **options: Any) -> Any:
        if isinstance(plan, list):
            self.plans_per_call.append(len({one.hash for one in plan}))
        return self.engine.score(prompts, targets, plan=plan, **options)


def test_a_budget_sends_several_cells_in_one_call_with_the_same_rows(tiny_llama_engine: sl.LensEngine) -> None:
    vector = sl.extract(tiny_llama_engine, PAIRS, layers=[1])[1]
    plan, rows, calls = sl.Plan(sl.add(vector, dose=1.0)), [], []
    options = {"controls": sl.Controls(random=19), "neutral": TEXTS, "max_ppl_ratio": 50.0}
    for budget in (None, 10_000):
        engine = CountingEngine(tiny_llama_engine)
        exp = sl.Experiment("run", engine, root=None)
        rows.append(exp.effect(plan, TARGETS, [-0.1, 0, 0.1], tokens_per_call=budget, **options).rows)
        calls.append(engine.plans_per_call)
    assert calls[0] == [3, 8, 8, 8, 8, 6]
    assert calls[1] == [3, 2 * 19]
    same = ["family", "draw", "dose", "item", "group", "plan_hash", "vector_hash", "edited_tokens"]
    pd.testing.assert_frame_equal(rows[0][same], rows[1][same])
    assert rows[0].value.tolist() == rows[1].value.tolist()


def test_every_row_says_what_it_comes_from(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    vector = exp.extract(PAIRS, layers=[1])[1]
    plan = sl.Plan(sl.add(vector, dose=1.0))
    options = {"controls": sl.Controls(random=19), "neutral": TEXTS, "max_ppl_ratio": 50.0}
    effect = exp.effect(plan, TARGETS, [0, 0.1, 0.2], **options)
    rows = effect.rows
    assert isinstance(rows.index, pd.RangeIndex)
    assert not rows[HASH_COLUMNS].isna().any().any()
    assert set(rows.data_hash) == {TARGETS.hash}
    assert set(rows.model_hash) == {tiny_llama_engine.info.weights_hash}
    assert set(rows.engine_hash) == {exp.configuration()["engine_hash"]}
    resolved = exp.results.effects[0][1]
    real = rows[rows.family == "vector"]
    assert set(real.vector_hash) == {vector.hash}
    assert set(real.plan_hash) == {resolved.scaled(dose).hash for dose in (0, 0.1, 0.2)}
    assert rows[rows.family == "random"].vector_hash.nunique() == 19
    table = pq.read_table(exp.path / "effects" / "000" / "rows.parquet")
    assert table.column_names == list(rows.columns), "readers other than pandas see no index column"
    assert {str(field.type) for field in table.schema} <= {"int64", "double", "string", "large_string"}
    exp.close()
