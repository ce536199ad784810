import numpy as np
import pytest
import torch

from steerlab.core.errors import InputError
from steerlab.sequences import SequenceProcessor
from tests.sequences.test_forcing import flat

HEAD, MLP = "lm_head.weight", "model.layers.2.mlp.up_proj.weight"


def direction(model, *names, seed=0):
    own, generator = dict(model.named_parameters()), torch.Generator().manual_seed(seed)
    return {name: torch.randn(own[name].shape, generator=generator) for name in names}


def scores(processor, sequences, **more):
    return flat(processor.teacher_force_logprobs(sequences, **more).logprobs)


def test_equals_a_model_whose_weights_were_moved(make_processor, sequences):
    processor, moved = make_processor(), make_processor()
    v = direction(processor.parts.root, HEAD, MLP)
    override = processor.params_override(v, 0.05)
    with torch.no_grad():
        for name, value in v.items():
            moved.parts.root.get_parameter(name).add_(0.05 * value)
    for with_grad in (False, True):
        found = scores(processor, sequences, params_override=override, with_grad=with_grad)
        np.testing.assert_allclose(found, scores(moved, sequences), atol=1e-5)
    assert np.abs(scores(processor, sequences) - scores(moved, sequences)).max() > 0.01


def test_the_live_model_is_not_touched(make_processor, sequences):
    processor = make_processor()
    before = {name: value.clone() for name, value in processor.parts.root.state_dict().items()}
    plain = scores(processor, sequences)
    override = processor.params_override(direction(processor.parts.root, MLP), 1.0)
    scores(processor, sequences, params_override=override)
    assert all(torch.equal(value, before[name]) for name, value in processor.parts.root.state_dict().items())
    np.testing.assert_array_equal(scores(processor, sequences), plain)


def test_continuity_in_eta(make_processor, sequences):
    processor = make_processor(torch.float64)
    v = {name: value.double() for name, value in direction(processor.parts.root, HEAD, MLP).items()}
    at = {
        eta: scores(processor, sequences, params_override=processor.params_override(v, eta)) for eta in (0, 1e-4, 2e-4)
    }
    np.testing.assert_array_equal(at[0], scores(processor, sequences))
    steps = at[1e-4] - at[0], at[2e-4] - at[0]
    assert 0 < np.abs(steps[0]).max() < 0.1
    np.testing.assert_allclose(steps[1], 2 * steps[0], atol=5e-6, rtol=0.02)


def test_zero_eta_follows_an_optimiser(make_processor, sequences):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        processor = make_processor(dtype)
        first = scores(processor, sequences)
        optimiser = torch.optim.SGD(processor.parts.root.parameters(), lr=0.5)
        processor.teacher_force_logprobs(sequences, with_grad=True).logprobs[0][0].sum().backward()
        optimiser.step()
        second = scores(processor, sequences)
        assert np.abs(second - first).max() > 1e-3
        processor.parts.root.get_parameter(HEAD).data.mul_(1.5)  # leaves no trace in version counters
        third = scores(processor, sequences)
        assert np.abs(third - second).max() > 1e-2
        fresh = SequenceProcessor(processor.parts.root, processor.tokenizer, config=processor.config)
        np.testing.assert_allclose(third, scores(fresh, sequences), atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_inside_and_outside_inference_mode(make_processor, sequences, dtype):
    processor = make_processor(dtype)
    with torch.inference_mode():
        inside = scores(processor, sequences)
        with pytest.raises(InputError, match=r"inside torch\.inference_mode\(\), which keeps no graph"):
            scores(processor, sequences, with_grad=True)
    np.testing.assert_array_equal(scores(processor, sequences), inside)
    with torch.no_grad():
        np.testing.assert_array_equal(scores(processor, sequences), inside)
        graph = processor.teacher_force_logprobs(sequences, with_grad=True)
    graph.logprobs[0][0].sum().backward()
    assert processor.parts.root.get_parameter(HEAD).grad.abs().max() > 0


def test_narrow_weights_are_widened_and_kept(make_processor, sequences):
    processor = make_processor(torch.bfloat16)
    widened = processor.params_override({}, 0.0)
    assert {value.dtype for value in widened.values()} == {torch.float32}
    tiny = direction(processor.parts.root, MLP)
    moved = processor.params_override(tiny, 1e-5)[MLP] - widened[MLP]
    torch.testing.assert_close(moved, 1e-5 * tiny[MLP], atol=1e-7, rtol=0.1)  # bfloat16 would have lost it
    unwidened = make_processor(torch.bfloat16, {"func_override": {"cast_params": False}})
    assert {value.dtype for value in unwidened.params_override({}, 0.0).values()} == {torch.bfloat16}
    first, second = processor._overrides.at_zero()[MLP], processor._overrides.at_zero()[MLP]
    assert first.data_ptr() == second.data_ptr()


def test_float64_weights_are_not_narrowed(make_processor, sequences):
    processor = make_processor(torch.float64)
    assert {value.dtype for value in processor.params_override({}, 0.0).values()} == {torch.float64}
    assert processor.teacher_force_logprobs(sequences).logprobs[0][0].dtype == torch.float64


def test_unknown_and_misshaped_names(make_processor, sequences):
    processor = make_processor()
    with pytest.raises(InputError, match=r"no parameter 'lm_head.wieght'. Did you mean 'lm_head.weight'\?"):
        processor.params_override({"lm_head.wieght": torch.zeros(1)}, 0.1)
    with pytest.raises(InputError, match=r"has shape \(\d+, 64\) in the model, got \(3, 64\)"):
        processor.params_override({HEAD: torch.zeros(3, 64)}, 0.1)
    with pytest.raises(InputError, match="no parameter"):
        processor.teacher_force_logprobs(sequences, params_override={"x": torch.zeros(1)})
    with pytest.raises(InputError, match="no parameter"):
        processor.teacher_force_logprobs(sequences, buffers_override={"x": torch.zeros(1)})


def test_tied_weights_accept_either_name(tmp_path, tokenizer, sequences):
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import build_tiny_llama

    model = AutoModelForCausalLM.from_pretrained(
        build_tiny_llama(tmp_path / "tied", tie_word_embeddings=True), dtype=torch.float32
    ).eval()
    processor = SequenceProcessor(model, tokenizer)
    v = direction(model, "model.embed_tokens.weight")["model.embed_tokens.weight"]
    by_either = [
        scores(processor, sequences, params_override=processor.params_override({name: v}, 0.05))
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    np.testing.assert_array_equal(*by_either)
    with torch.no_grad():
        model.lm_head.weight.add_(0.05 * v)
    np.testing.assert_allclose(by_either[0], scores(processor, sequences), atol=1e-5)
    both = {"lm_head.weight": v, "model.embed_tokens.weight": v + 1}
    with pytest.raises(InputError, match=r"'model\.embed_tokens\.weight' and 'lm_head\.weight' are one weight"):
        processor.params_override(both, 0.1)


def test_a_partial_mapping_and_wrapper_prefixes(make_processor, sequences):
    processor = make_processor()
    v = direction(processor.parts.root, MLP)
    whole = processor.params_override(v, 0.1)
    expected = scores(processor, sequences, params_override=whole)
    np.testing.assert_array_equal(scores(processor, sequences, params_override={MLP: whole[MLP]}), expected)
    prefixed = processor.params_override({f"module.{MLP}": v[MLP]}, 0.1)
    np.testing.assert_array_equal(scores(processor, sequences, params_override=prefixed), expected)


def test_build_state_override(make_processor, sequences):
    processor = make_processor()
    v = direction(processor.parts.root, MLP)
    params, buffers = processor.build_state_override(v, 0.1, param_dtype="float64", include_buffers=True)
    assert {value.dtype for value in params.values()} == {torch.float64}
    assert buffers
    wide = scores(processor, sequences, params_override=params, buffers_override=buffers)
    override = processor.params_override(v, 0.1)
    np.testing.assert_allclose(wide, scores(processor, sequences, params_override=override), atol=1e-4)
    assert processor.build_state_override(v, 0.1, param_dtype=None, include_buffers=False)[1] == {}
    _, narrow = processor.build_state_override(
        v, 0.1, param_dtype=None, include_buffers=True, buffer_dtype=torch.bfloat16
    )
    assert {value.dtype for value in narrow.values()} == {torch.bfloat16}


def test_the_documented_alias(make_processor):
    assert SequenceProcessor._build_params_override is SequenceProcessor.params_override


def test_raw_logits_for_a_loss_of_ones_own(make_processor, sequences):
    processor = make_processor()
    model, name = processor.parts.root, "model.layers.1.mlp.up_proj.weight"
    ids, mask = sequences.sequences[:, 0], sequences.attention_masks[:, 0]
    plain = processor.functional_logits(ids, mask)
    for b in range(2):
        own = ids[b][mask[b].bool()]
        with torch.no_grad():
            expected = model(input_ids=own[None]).logits[0]
        torch.testing.assert_close(plain[b][mask[b].bool()], expected, atol=2e-5, rtol=1e-4)
    v = {name: torch.randn(128, 64, generator=torch.Generator().manual_seed(0))}
    eta = torch.tensor(0.1, requires_grad=True)
    moved = processor._fc_logits(ids, mask, processor._build_params_override(v, eta))
    assert (moved - plain).abs().max() > 1e-3
    (by_eta,) = torch.autograd.grad(moved.square().mean(), eta)
    (by_weight,) = torch.autograd.grad(plain.square().mean(), model.get_parameter(name))

    @torch.no_grad()
    def loss(step):
        return processor._fc_logits(ids, mask, processor._build_params_override(v, step)).square().mean()

    assert float(by_eta) == pytest.approx(float(loss(0.101) - loss(0.099)) / 0.002, rel=0.02)
    assert by_weight.abs().max() > 0
    with torch.no_grad():
        assert not processor._fc_logits(ids, params_override=processor.params_override(v, 0.1)).requires_grad
    assert SequenceProcessor._fc_logits is SequenceProcessor.functional_logits
    with pytest.raises(InputError, match=r"one shape \[batch, pos\], got \(2, \d+\) and \(1, \d+\)"):
        processor.functional_logits(ids, mask[:1])
    with pytest.raises(InputError, match="has no parameter 'nowhere'"):
        processor.functional_logits(ids, params_override={"nowhere": ids})
