"""The shipped vectors are the ones that their script builds."""

import pytest

import steerlab as sl
from steerlab.core._text import encode_pair, encode_prompt
from steerlab.core.shipped import shipped_vectors

NAMES = ["sentiment", "formality", "refusal", "capitals"]


def load(name: str) -> sl.SteeringVector:
    return sl.SteeringVector.load(shipped_vectors() / name / f"{name}.safetensors")


def train_pairs(name: str) -> sl.ContrastPairs:
    return sl.ContrastPairs.from_jsonl(shipped_vectors() / name / "pairs.jsonl", group="group", split="train")


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_file_says_what_made_it(name: str) -> None:
    vector = load(name)
    card = vector.card
    assert card.name == name
    assert card.method == "mean_diff"
    assert card.model is not None
    assert "smollm2-135m" in card.model.lower()
    assert card.weights_hash
    assert card.extracted_at == vector.hook_point.name
    assert card.read == sl.where.last_prompt().to_json()
    assert card.n_pairs == len(train_pairs(name))
    assert card.data_hash == train_pairs(name).hash
    assert {"steerlab", "torch", "transformers"} <= set(card.versions)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_names_file_layer_and_number_of_pairs(name: str) -> None:
    vector = load(name)
    text = (shipped_vectors() / name / "CARD.md").read_text(encoding="utf-8")
    assert f"`{name}.safetensors`" in text
    assert f"`{vector.hook_point.name}`" in text
    assert f"the {vector.card.n_pairs} training pairs" in text
    assert f"Norm {vector.norm:.2f}; median norm of the stream {vector.card.median_norm:.2f}" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sentiment", "refusal"])
def test_a_fresh_build_is_the_shipped_vector(lens_engine: sl.LensEngine, name: str) -> None:
    shipped = load(name)
    pairs = train_pairs(name)
    fresh = sl.extract(lens_engine, pairs, layers=[shipped.layer])[shipped.layer]
    assert shipped.card.data_hash == pairs.hash
    assert shipped.card.weights_hash == lens_engine.info.weights_hash
    assert shipped.card.median_norm == pytest.approx(fresh.card.median_norm, rel=1e-4)
    assert shipped.cosine(fresh) > 0.999999
    assert shipped.norm == pytest.approx(fresh.norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_targets_of_a_prompt_have_one_number_of_tokens(lens_engine: sl.LensEngine, name: str) -> None:
    tokenizer, d_vocab = lens_engine.tokenizer, lens_engine.info.d_vocab
    for split in ("dev", "test"):
        for item in sl.Targets.from_jsonl(shipped_vectors() / name / "targets.jsonl", split=split):
            prompt = encode_prompt(tokenizer, item.prompt, d_vocab=d_vocab)
            cut = [encode_pair(tokenizer, prompt, target, d_vocab=d_vocab) for target in item.targets]
            assert len({len(pair.target_ids) for pair in cut}) == 1
            assert {pair.boundary for pair in cut} == {"clean"}
