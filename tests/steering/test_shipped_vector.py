"""The shipped vector is the one its script builds."""

import pytest

import steerlab as sl
from steerlab.core.shipped import shipped_vectors


@pytest.mark.slow
def test_a_fresh_build_is_the_shipped_vector(lens_engine: sl.LensEngine) -> None:
    folder = shipped_vectors() / "sentiment"
    shipped = sl.SteeringVector.load(folder / "sentiment.safetensors")
    pairs = sl.ContrastPairs.from_jsonl(folder / "pairs.jsonl", group="group", split="train")
    fresh = sl.extract(lens_engine, pairs, layers=[shipped.layer])[shipped.layer]
    assert shipped.card.data_hash == pairs.hash
    assert shipped.card.weights_hash == lens_engine.info.weights_hash
    assert shipped.card.median_norm == pytest.approx(fresh.card.median_norm, rel=1e-4)
    assert shipped.cosine(fresh) > 0.999999
    assert shipped.norm == pytest.approx(fresh.norm, rel=1e-4)
