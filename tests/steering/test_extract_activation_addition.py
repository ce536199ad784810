"""Activation addition on the real model: a concept added once makes text about it likelier."""

import numpy as np
import pytest

import steerlab as sl

WEDDING = [
    "The bride walked down the aisle on her father's arm.",
    "After the ceremony the guests threw rice at the newly married couple.",
    "The groom forgot the rings, and the best man had to run home for them.",
    "They cut the cake together and danced until the band went home.",
]
SHIPPING = [
    "The container ship waited two days outside the port for a berth.",
    "Freight rates fell again as new vessels were delivered from the yards.",
    "Customs held the pallets because a form for the cargo was missing.",
    "The crane lifted the last crates from the barge before the tide turned.",
]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [6, 10])
def test_a_wedding_vector_makes_wedding_text_likelier(lens_engine: sl.LensEngine, layer: int) -> None:
    def ids(text: str) -> list[int]:
        return lens_engine.tokenizer(text, add_special_tokens=False)["input_ids"]

    start, at = ids("<|endoftext|>"), sl.where.index(1)
    assert len(start) == 1
    one = sl.ContrastPairs.from_lists([start + ids(" weddings")], [start + ids(" ")])
    vector = sl.extract(lens_engine, one, "act_add", "resid_pre", layers=layer, read=at)[layer]
    plan = sl.Plan(sl.add(vector, coef=1.0, where=at))

    def ratio(texts: list[str]) -> float:
        prompts, targets = [start + ids(" ")] * len(texts), [[ids(text)] for text in texts]
        plain, steered = (lens_engine.score(prompts, targets, plan=p).to_frame().mean_log_prob for p in (None, plan))
        assert [receipt.edits[0].edited for receipt in lens_engine.receipts] == [1] * len(texts)
        return float(np.exp((plain - steered).mean()))

    assert ratio(WEDDING) < ratio(SHIPPING) - 0.1
