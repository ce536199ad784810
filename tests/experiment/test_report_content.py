"""Tables and limits: what is cut is said, what is missing is not 0, and what cannot be known is named."""

import math

import numpy as np
import pandas as pd
import pytest

from steerlab.experiment._blocks import Facts, Folded, KeyFigures, Subsection, Table, Verdict
from steerlab.experiment._blocks.tables import MAX_ROWS, cell, table_of
from steerlab.experiment._report import Material, document
from steerlab.experiment._report.limits import limits
from steerlab.experiment.measurements.confirmation import Confirmation
from steerlab.experiment.measurements.cost import cost_blocks
from steerlab.experiment.measurements.effect import Comparisons, Effect
from steerlab.experiment.measurements.entropy import token_blocks
from steerlab.experiment.measurements.generations import generation_blocks
from steerlab.experiment.measurements.parity import Parity, parity_finding
from steerlab.experiment.measurements.selection import Selection, selection_maps
from steerlab.experiment.measurements.selfcheck import Check, SelfCheck, selfcheck_finding
from steerlab.steering.plan import Plan
from tests.experiment.frames import make_effect


def blocks_of(effect: Effect) -> list:
    return list(document(Material("x", 0, effects=[effect])).sections[0].blocks)


# --- tables -------------------------------------------------------------------------------------------------------


def test_a_cut_table_says_how_much_and_where() -> None:
    table = table_of(pd.DataFrame({"x": range(10_000)}), "rows", place="frames/rows.parquet")
    assert len(table.rows) == MAX_ROWS
    assert table.note == "60 of 10\u202f000 rows; all in frames/rows.parquet."
    assert table_of(pd.DataFrame({"x": range(60)}), "rows").note == ""


def test_intervals_share_a_cell_with_their_figure() -> None:
    frame = pd.DataFrame(
        {"dose": [0.0, 0.1], "ppl_ratio": [1.0, 1.2], "ppl_ratio_low": [np.nan, 1.1], "ppl_ratio_high": [np.nan, 1.3]}
    )
    table = table_of(frame, "cost")
    assert table.columns == ["dose", "perplexity ratio"]
    assert table.rows == [("0", "1.0"), ("0.1", "1.2 [1.1, 1.3]")]
    means = pd.DataFrame({"quantity": ["kl"], "mean": [0.5], "low": [0.25], "high": [0.75]})
    assert table_of(means, "means").rows == [("kl", "0.50 [0.25, 0.75]")]


def test_figures_of_a_column_have_the_same_decimals() -> None:
    frame = pd.DataFrame(
        {
            "dose": [-0.2, 0.05, 0.0],
            "margin": [-1.19234, 0.87654, 2.3],
            "rank": [0.047619, 1.0, math.nan],
            "deviation": [3.3331, 8.583e-06, 0.0],
            "count": [12_345.6, 10.2, 12_000.0],
        }
    )
    assert table_of(frame, "t").rows == [
        ("−0.20", "−1.19", "0.048", "3.33", "12\u202f346"),
        ("0.05", "0.88", "1.000", "8.6e−06", "10"),
        ("0", "2.30", "–", "0", "12\u202f000"),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "–"),
        (None, "–"),
        (pd.NA, "–"),
        (0.0, "0"),
        (-0.00012345, "−0.00012"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (np.bool_(True), "yes"),
        (False, "no"),
        (np.int64(-3), "−3"),
        (np.float32(0.5), "0.5"),
        ("a-b", "a-b"),
        ([1, 2.5], "1, 2.5"),
    ],
)
def test_cells(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_columns_of_words_are_known() -> None:
    frame = pd.DataFrame({"arm": ["a"], "n": [1], "note": ["b"], "x": [0.5], "x_low": [0.4], "x_high": [0.6]})
    assert table_of(frame, "t").worded == {0, 2}


def test_result_rows_are_cut_in_an_effect() -> None:
    effect = make_effect([1.0] * 100)
    folded = [block for block in blocks_of(effect) if isinstance(block, Folded)]
    notes = {block.title: table.note for block in folded for table in block.blocks if isinstance(table, Table)}
    assert notes["Result rows"] == "20 of 500 rows; all in effects/000/rows.parquet."
    assert notes["Items, from the most anti-steerable on"].startswith("60 of 100 rows; all in effects/000/rows.parquet")


def test_items_are_named_by_their_prompts() -> None:
    effect = make_effect([3.0, 1.0])
    named = Effect(effect.rows, effect.cost, "hash", "plan", effect.settings, {"targets_hash": "t"})
    made = document(Material("x", 0, effects=[named], prompts={"t": ["The film was", "The <b>hotel</b> was"]}))
    (table,) = next(b for b in made.sections[0].blocks if isinstance(b, Folded) and b.title.startswith("Items")).blocks
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["The <b>hotel</b> was", "The film was"]


def test_the_title_block_says_question_model_date_and_verdict() -> None:
    effect = make_effect([1.0, 2.0], nulls={"random": [0.1] * 19})
    made = document(
        Material("x", 3, effects=[effect], facts={"model": "tiny", "date": "1 May 2026", "dtype": "float32"})
    )
    assert made.lead.startswith(
        f"{effect.verdict.capitalize()}: the log-prob margin (nats) changes by +1.50 per unit of "
    )
    assert "worst rank among control arms is 0.050; what counts as small is ±0.10." in made.lead
    assert dict(made.facts) == {
        "question": "Does plan move the log-prob margin (nats) of 2 items, and more than control arms do?",
        "model": "tiny",
        "date": "1 May 2026",
        "numbers": "log-probabilities in nats, computed in float32; seed 3",
    }


def test_generations_that_are_cut_are_counted() -> None:
    rows = [(i, 0, f"p{i}", dose, "text") for i in range(25) for dose in (0.0, 0.2)]
    frame = pd.DataFrame(rows, columns=["prompt_index", "sample_index", "prompt", "dose", "text"])
    first, *shown = generation_blocks(frame, "frames/generations-000.parquet")
    assert "20 of 25 samples; all in frames/generations-000.parquet." in first.text
    assert len(shown) == 20


def test_long_texts_are_cut_aloud() -> None:
    frame = pd.DataFrame({"token": ["a"] * 500, "base": -1.0, "steered": -2.0})
    text = " ".join(getattr(block, "text", "") for block in token_blocks(frame, "frames/entropy-000.parquet"))
    assert "400 of 500 tokens; all in frames/entropy-000.parquet." in text
    assert "Over 500 tokens log p changes by −500.00 nats" in text


# --- effects ------------------------------------------------------------------------------------------------------


def test_missing_figures_are_dashes() -> None:
    collapsed = make_effect([1.0, 2.0], ratios=dict.fromkeys([-0.2, -0.1, 0.0, 0.1, 0.2], 9.0))
    verdict, *rest = blocks_of(collapsed)
    assert isinstance(verdict, Verdict)
    assert (verdict.word, verdict.tone) == ("Verdict: collapsed", "bad")
    figures = next(block for block in rest if isinstance(block, KeyFigures))
    meaning = {meaning: value for value, meaning in figures.entries}
    assert meaning["slope per unit of dose"] == "–"
    assert meaning["worst null rank"] == "–"
    assert meaning["of items are anti-steerable"] == "–"


def test_what_was_done_counts_items_groups_doses_and_arms() -> None:
    text = blocks_of(make_effect([1.0, 2.0], nulls={"random": [0.1] * 19, "wrong_layer": [0.2]}))[1].text
    assert "run at dose −0.2, −0.1, 0, 0.1, 0.2 on 2 items in 2 groups" in text
    assert "19 × random directions, 1 × wrong layer" in text


@pytest.mark.parametrize(("rule", "stated"), [(1, ("bootstrap draws", "500")), (2, ("intervals", "Student's t"))])
def test_provenance_states_how_intervals_were_made(rule: int, stated: tuple[str, str]) -> None:
    effect = make_effect([1.0, 2.0, 3.0], rule=rule)
    sections = {section.title: section for section in document(Material("x", 0, effects=[effect])).sections}
    facts = [pair for block in sections["Provenance"].blocks if isinstance(block, Facts) for pair in block.entries]
    assert [pair for pair in facts if pair[0] in ("bootstrap draws", "intervals")] == [stated]


def test_intervals_of_the_cost_stand_in_the_dose_table() -> None:
    effect = make_effect([1.0, 2.0])
    cost = effect.cost.assign(ppl_ratio_low=0.9, ppl_ratio_high=1.1)
    blocks = blocks_of(Effect(effect.rows, cost, "hash", "plan", effect.settings))
    (table,) = next(block for block in blocks if isinstance(block, Subsection)).blocks
    assert isinstance(table, Table)
    column = list(table.columns).index("perplexity ratio")
    assert table.rows[0][column] == "1.0 [0.9, 1.1]"


def test_several_effects_are_numbered_and_share_their_limits() -> None:
    effects = [make_effect([1.0, 2.0]), make_effect([2.0, 1.0])]
    made = document(Material("x", 0, effects=effects))
    assert [section.title for section in made.sections[:2]] == ["Effect 1", "Effect 2"]
    assert "2 effects: not tested, not tested" in made.lead
    assert any("ranks are not adjusted" in limit for limit in limits(Material("x", 0, effects=effects)))
    told = [effect.among(Comparisons(2, 0.1)) for effect in effects]
    assert any("adjusted ranks allow" in limit for limit in limits(Material("x", 0, effects=told)))


# --- limits -------------------------------------------------------------------------------------------------------


def test_the_floor_of_a_rank_is_named() -> None:
    few = " ".join(limits(Material("x", 0, effects=[make_effect([1.0, 2.0], nulls={"random": [0.1] * 4})])))
    assert "With 4 draws of random directions a rank cannot be below 0.200, so a verdict of effect" in few
    enough = " ".join(limits(Material("x", 0, effects=[make_effect([1.0, 2.0], nulls={"random": [0.1] * 19})])))
    assert "cannot be below 0.050." in enough
    assert "Not compared with: label flips, wrong layer." in enough


def test_items_and_groups_are_counted() -> None:
    text = " ".join(limits(Material("x", 0, effects=[make_effect([1.0] * 6, groups=["a", "a", "a", "b", "b", "c"])])))
    assert "6 items in 3 groups were measured" in text
    assert "fewer than 10 groups" in text
    many = " ".join(limits(Material("x", 0, effects=[make_effect([1.0] * 12)])))
    assert "fewer than" not in many


# --- findings -----------------------------------------------------------------------------------------------------


def selection() -> Selection:
    table = pd.DataFrame(
        [("v", 1, 0.1, 1.0, True, False), ("v", 2, 0.1, 3.0, True, True), ("w", 1, 0.1, 5.0, False, False)],
        columns=["vector", "layer", "dose", "gain", "satisfied", "chosen"],
    ).assign(plan_hash="p", vector_hash="v")
    return Selection(
        plan=Plan(),
        vector="v",
        layer=2,
        dose=0.1,
        gain=3.0,
        table=table,
        metric="log_prob_margin",
        subject_to={},
        on_hash="h",
        prompts=frozenset(),
        groups=frozenset(),
    )


def confirmation(look: int) -> Confirmation:
    rows = pd.DataFrame({"item": [0, 1], "group": ["a", "b"], "base_value": 0.0, "value": 1.0, "change": [1.0, 0.5]})
    nulls = pd.DataFrame([], columns=["family", "draw", "gain"])
    return Confirmation(
        selection="v at layer 2",
        plan_hash="p",
        metric="log_prob_margin",
        gain=0.75,
        low=0.5,
        high=1.0,
        dev_gain=3.0,
        anti_steerable=0.0,
        null_ranks={},
        num_items=2,
        on_hash="h",
        prompts=frozenset(),
        look=look,
        overlap=0,
        rows=rows,
        nulls=nulls,
    )


def test_the_chosen_try_leads_and_refused_ones_are_last() -> None:
    made = document(Material("x", 0, selections=[selection()]))
    table = next(block for block in made.sections[0].blocks if isinstance(block, Table))
    assert [row[0] + row[1] for row in table.rows] == ["v2", "v1", "w1"]
    assert list(selection_maps(selection())) == ["v"]
    assert selection_maps(selection())["v"].value.tolist() == [1.0, 3.0]


def test_tries_without_confirmation_are_a_limit() -> None:
    text = " ".join(limits(Material("x", 0, selections=[selection()])))
    assert "3 combinations were tried on development items; none was confirmed" in text


def test_one_look_is_a_confirmation_and_two_are_a_warning() -> None:
    once = document(Material("x", 0, confirmations=[confirmation(1)]))
    assert once.sections[0].blocks[0].text == "Held-out items were looked at once."
    twice = document(Material("x", 0, confirmations=[confirmation(1), confirmation(2)]))
    warning = twice.sections[0].blocks[0]
    assert isinstance(warning, Verdict)
    assert warning.word == "2 looks at the same held-out items"
    assert [block.title for block in twice.sections[0].blocks[1:]] == ["Confirmation 1", "Confirmation 2"]
    text = " ".join(limits(Material("x", 0, confirmations=[confirmation(1), confirmation(2)])))
    assert "1 of 2 confirmations looked at held-out items for the second time" in text


def test_a_failed_selfcheck_is_named_and_is_the_first_limit() -> None:
    failed = SelfCheck(
        (Check("cache", False, 0.3, 1e-3, "8 tokens"), Check("batch", True, 0, 1e-3, "")), "lens", "p", 0
    )
    finding = selfcheck_finding(failed)
    assert finding.passed is False
    assert finding.sentences[1] == "Failed: cache. 8 tokens"
    assert len(finding.sentences) == 2
    assert "none of them can be trusted" in limits(Material("x", 0, selfchecks=[failed]))[0]


def test_parity_shows_the_worst_tokens_first() -> None:
    rows = pd.DataFrame({"text": 0, "position": range(30), "token_id": 5, "log_prob_a": -1.0, "log_prob_b": -1.0})
    rows = rows.assign(delta=np.linspace(0, -1e-4, 30), unsteered_a=-3.0, unsteered_b=-3.0, unsteered_delta=1e-5)
    receipts = pd.DataFrame({"text": [0], "equal": [True]})
    found = Parity(rows, receipts, 1e-3, True, 4.0, "lens tiny", "vllm tiny", "hash")
    finding = parity_finding(found, "findings/parity-000/rows.parquet")
    assert finding.passed
    assert finding.frame is not None
    assert finding.frame.position.iloc[0] == 29
    made = document(Material("x", 0, parities=[found]))
    folded = next(block for block in made.sections[0].blocks if isinstance(block, Folded))
    (table,) = folded.blocks
    assert isinstance(table, Table)
    assert table.note == "20 of 30 rows; all in findings/parity-000/rows.parquet."


def test_perplexity_and_the_form_of_completions_are_two_tables() -> None:
    frame = pd.DataFrame({"dose": [0.0], "nll": [3.0], "ppl_ratio": [1.0], "plan_hash": ["p"], "repetition": [0.1]})
    first, second = cost_blocks(frame, "frames/cost-000.parquet")
    assert isinstance(first, Table)
    assert isinstance(second, Table)
    assert first.columns == ["dose", "nll per token (nats)", "perplexity ratio"]
    assert second.columns == ["dose", "repetition"]
    assert len(cost_blocks(frame.drop(columns="repetition"), "")) == 1
