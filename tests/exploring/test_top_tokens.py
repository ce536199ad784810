"""Top tokens, the lens over layers and the logit lens: against the model's own logits."""

import math

import pytest
import torch

import steerlab as sl
from steerlab.engines.toy import ToyEngine
from tests.display.test_display import EVIL, Reader

TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module", params=["tiny_llama_engine", "tiny_gpt2_engine", "toy"])
def engine(request):
    return ToyEngine() if request.param == "toy" else request.getfixturevalue(request.param)


def test_the_last_streams_unembed_to_the_models_own_logits(engine):
    last = engine.info.n_layers - 1
    streams = engine.capture(TEXT, layers=last)[last]
    found = engine.unembed(streams)
    rows = engine.measure(TEXT, [["s"]], {"x": sl_distribution()})
    assert found.shape == (len(streams), engine.info.d_vocab)
    assert found.log_softmax(-1)[-1].numpy() == pytest.approx(rows[0]["x"][0], abs=1e-4)


def sl_distribution():
    from steerlab.measures.quantities import LogDistribution

    return LogDistribution()


def test_soft_caps_of_the_model_are_kept(tmp_path):
    from steerlab.engines.lens import load
    from tests.tiny_models import build_tiny_family

    engine = load(build_tiny_family(tmp_path / "gemma2", "gemma2"), device="cpu")
    assert engine.model.original_model.config.final_logit_softcapping
    last = engine.info.n_layers - 1
    found = engine.unembed(engine.capture(TEXT, layers=last)[last])
    torch.testing.assert_close(found, engine.logits(TEXT), atol=1e-4, rtol=1e-4)


def test_top_tokens_are_those_of_the_unembedded_direction(engine):
    token = 7
    streams = torch.eye(engine.info.d_model)
    logits = engine.unembed(streams)
    direction = int(logits[:, token].argmax())
    v = sl.SteeringVector.from_tensor(streams[direction] * 5, layer=0, name=EVIL)
    found = v.top_tokens(engine, k=10)
    wanted = logits[direction].topk(10)
    assert [one.token_id for one in found] == wanted.indices.tolist()
    assert [one.logit for one in found] == pytest.approx(wanted.values.tolist(), abs=1e-4)
    assert [one.token_id for one in found.opposite] == engine.unembed(-streams[[direction]])[0].topk(
        10
    ).indices.tolist()
    assert len(found) == len(found.tokens) == 10
    assert found[0].token in repr(found)
    assert found.to_frame().side.value_counts().to_dict() == {"direction": 10, "opposite": 10}
    read = Reader(found._repr_html_())
    assert EVIL in read.text
    assert "script" not in read.tags


def test_a_set_shows_a_line_per_layer(engine):
    generator = torch.Generator().manual_seed(0)
    made = tuple(
        sl.SteeringVector.from_tensor(torch.randn(engine.info.d_model, generator=generator), layer=k) for k in range(3)
    )
    found = sl.VectorSet(made).top_tokens(engine, k=4)
    assert {layer: found[layer].tokens for layer in range(3)} == {
        v.layer: v.top_tokens(engine, k=4).tokens for v in made
    }
    assert len(found.to_frame()) == 3 * 2 * 4
    assert "layer 2" in Reader(found._repr_html_()).text


def test_an_engine_without_unembedding_says_what_to_load(unchecked_types):
    v = sl.SteeringVector.from_tensor([1.0, 2.0], layer=0)
    with pytest.raises(sl.InputError, match=r"sl\.load"):
        v.top_tokens(object())


def test_another_width_is_refused(engine):
    with pytest.raises(sl.VectorShapeError, match=rf"\[rows, {engine.info.d_model}\]"):
        sl.SteeringVector.from_tensor([1.0, 2.0], layer=0).top_tokens(engine)


def test_the_lens_ends_with_the_models_own_prediction(engine):
    found = sl.logit_lens(engine, TEXT, k=3)
    n_tokens, n_layers, k = found.token_ids.shape
    assert (n_layers, k, len(found.tokens)) == (engine.info.n_layers, 3, n_tokens)
    rows = engine.measure(TEXT, [["s"]], {"x": sl_distribution()})[0]["x"][0]
    assert found.token_ids[-1, -1, 0] == rows.argmax()
    assert found.probs[-1, -1, 0] == pytest.approx(math.exp(rows.max()), abs=1e-4)
    frame = found.to_frame()
    assert len(frame) == n_tokens * n_layers * k
    assert frame[(frame.position == n_tokens - 1) & (frame["rank"] == 1)].next_token_id.iloc[-1] == rows.argmax()


def test_a_lens_shows_markup_as_text(engine):
    read = Reader(sl.logit_lens(engine, EVIL)._repr_html_())
    assert "script" not in read.tags
    assert "b" not in read.tags


def test_a_plan_changes_what_the_lens_sees(engine):
    v = sl.SteeringVector.from_tensor(torch.linspace(-1, 2, engine.info.d_model), layer=1)
    plain, steered = (sl.logit_lens(engine, TEXT, plan=p) for p in (None, sl.Plan(sl.add(v, coef=9.0))))
    assert (plain.probs[:, 0] == steered.probs[:, 0]).all()
    assert (plain.probs[-1, 1:] != steered.probs[-1, 1:]).all()


def test_several_texts_are_refused(engine):
    with pytest.raises(sl.InputError, match="one text"):
        sl.logit_lens(engine, ["a", "b"])
