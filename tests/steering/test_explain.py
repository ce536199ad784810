import pytest
import torch

import steerlab as sl
from steerlab.core.errors import PlanError, PromptError

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
W = V.at(0)
PLAN = sl.Plan(
    sl.add(V, coef=1.0),
    sl.ablate(W, where=sl.where.ids(6)),
    sl.clamp(V, hi=2.0, where=sl.where.all(), when=sl.when(W, above=0.0)),
)


def test_the_table_by_hand():
    shown = sl.explain(PLAN, [5, 6, 7], completion=[6, 8])
    frame = shown.to_frame()
    assert frame["part"].tolist() == ["prompt"] * 3 + ["generated"] * 2
    assert frame["token_id"].tolist() == [5, 6, 7, 6, 8]
    assert frame["blocks.0.hook_resid_post"].tolist() == ["", "2", "", "2", ""]
    assert frame["blocks.1.hook_resid_post"].tolist() == ["3?", "3?", "1+3?", "1+3?", ""]
    assert list(frame.columns[4:]) == ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    assert shown.edited == 2 + 2 + 4


def test_it_prints_tokens_columns_and_a_legend():
    text = str(sl.explain(PLAN, [5, 6, 7]))
    lines = text.splitlines()
    assert lines[0].split() == ["position", "token", "part", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    assert lines[2].split() == ["1", "6", "prompt", "2", "3?"]
    assert lines[-3] == "1: add(coef=1) at blocks.1.hook_resid_post, last_prompt() | generated()"


def test_html_escapes_what_a_text_may_hold():
    plan = sl.Plan(sl.add(V, coef=1.0, where=sl.where.span("<b>", missing="skip")))
    assert "<b>" not in sl.explain(sl.Plan(), [1])._repr_html_()
    assert "&lt;b&gt;" in sl.explain(plan, [1], _Letters())._repr_html_()


class _Letters:
    """Decodes every id to a letter."""

    is_fast = False
    bos_token_id = None

    def decode(self, ids, **_):
        return "".join(chr(97 + i) for i in ids)


def test_text_needs_an_engine_or_tokenizer():
    with pytest.raises(PlanError, match=r"sl\.explain\(plan, prompt, engine\)"):
        sl.explain(PLAN, "text")


def test_what_it_says_is_what_the_receipt_finds(tiny_llama_engine):
    engine = tiny_llama_engine
    v = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=1)
    first = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=0)
    prompt = "the cat sat on the mat"
    plan = sl.Plan(
        sl.add(v, coef=0.1, where=sl.where.span("cat") | sl.where.generated(until=2)),
        sl.add(first, coef=0.1, where=~sl.where.index(0)),
    )
    shown = sl.explain(plan, prompt, engine, completion=" and more than that")
    engine.score([prompt], [[" and more than that"]], plan=plan)
    assert shown.edited == engine.receipts[0].edited > 5
    cat = [t for t, token in enumerate(shown.tokens) if "c" in token or "a" in token]
    column = shown.to_frame()["blocks.1.hook_resid_post"]
    assert (column != "").sum() > 2
    assert set(column[column != ""].index) & set(cat)


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_no_single_prompt_is_refused():
    for prompts in (5, ["one", "two"], None):
        with pytest.raises(PromptError, match="one prompt"):
            sl.explain(PLAN, prompts)
    with pytest.raises(PlanError, match="needs the engine"):
        sl.explain(PLAN, [5, 6], completion="text")
