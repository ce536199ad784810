import math

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import ContextLengthError, InputError, PlanError
from steerlab.sequences import FEATURE_NAMES, BatchedSequences, SequenceProcessor
from tests.sequences.helpers import entropy_of, reference_q, step_logits


def flat(nested):
    return np.concatenate([np.asarray(torch.as_tensor(values).detach()) for row in nested for values in row])


def test_equals_the_plain_model(make_processor, sequences):
    processor = make_processor(temperature=0.7, top_p=0.9)
    results, diagnostics = processor.teacher_force_logprobs_with_diagnostics(sequences)
    for b in range(2):
        for g in range(3):
            response = sequences.response_ids(b, g)
            if not response:
                continue
            logits = step_logits(processor.parts.causal, sequences.prompt_ids(b, g), response).double()
            expected = logits.log_softmax(-1)[range(len(response)), response]
            torch.testing.assert_close(results.logprobs[b][g].double(), expected, atol=1e-5, rtol=0)
            qs = [reference_q(row.numpy(), 0.7, 0.9) for row in logits]
            np.testing.assert_allclose(results.rb_entropies[b][g], [entropy_of(q) for q in qs], atol=1e-5)
            steps = diagnostics.diagnostics[b][g].steps
            assert steps.support_size.tolist() == [(q > 0).sum() for q in qs]
            with np.errstate(divide="ignore"):
                np.testing.assert_allclose(
                    results.token_logqs[b][g], [np.log(q[t]) for q, t in zip(qs, response, strict=True)], atol=1e-5
                )


def test_shapes_and_units(make_processor, sequences):
    results = make_processor(top_p=0.9).teacher_force_logprobs(
        sequences, compute_rb=True, return_baseline_features=True
    )
    for b, row in enumerate(sequences.gen_lens):
        for g, length in enumerate(row):
            log_p, log_q = results.logprobs[b][g], results.token_logqs[b][g]
            assert log_p.shape == log_q.shape == (length,)
            assert log_p.device.type == "cpu"
            assert not log_p.requires_grad
            assert isinstance(results.entropies[b][g], np.ndarray)
            np.testing.assert_array_equal(results.entropies[b][g], -log_p.numpy())
            np.testing.assert_array_equal(results.policy_surprisals[b][g], -log_q.numpy())
            np.testing.assert_array_equal(results.outside_nucleus[b][g], np.isinf(log_q.numpy()))
            assert results.rb_entropies[b][g].shape == (length,)
            assert results.baseline_feats_torch[b][g].shape == (length, len(FEATURE_NAMES))
            assert isinstance(results.sequence_logprobs[b][g], float)
            assert results.sequence_logprobs[b][g] == pytest.approx(log_p.sum().item(), abs=1e-4)
            assert math.isnan(results.rewards[b][g])
    assert results.rb_entropies_torch is None
    assert (results.sequence_logprobs[1][1], results.sequence_logqs[1][1]) == (0.0, 0.0)
    assert np.concatenate([v for row in results.outside_nucleus for v in row]).any()
    assert len(results.to_frame()) == sum(map(sum, sequences.gen_lens))


def test_nothing_is_computed_that_was_not_asked_for(make_processor, sequences):
    results = make_processor().teacher_force_logprobs(sequences)
    assert all(len(values) == 0 for row in results.rb_entropies for values in row)
    assert results.baseline_feats_torch is None
    assert results.to_frame()["rb_entropy"].isna().all()


def test_features_are_those_of_the_diagnostics(make_processor, sequences):
    processor = make_processor(top_p=0.8)
    results, diagnostics = processor.teacher_force_logprobs_with_diagnostics(sequences, return_baseline_features=True)
    features, steps = results.baseline_feats_torch[0][2], diagnostics.diagnostics[0][2].steps
    for column, name in enumerate(FEATURE_NAMES[:-1]):
        np.testing.assert_array_equal(features[:, column], getattr(steps, name))
    np.testing.assert_allclose(features[:, -1], np.arange(12) / 12, atol=1e-7)  # max_new_tokens is 12
    np.testing.assert_array_equal(steps.rb_entropy, results.rb_entropies[0][2])
    np.testing.assert_array_equal(steps.surprisal, results.entropies[0][2])


# --- the same numbers whatever stands around a row ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (torch.float32, {}, 1e-5),
        (torch.float64, {"entropy_fp64": True}, 1e-9),
    ],
)
def test_invariant_to_batches_chunks_and_padding(make_processor, sequences, dtype, precision, tolerance):
    processor = make_processor(dtype, precision, temperature=0.8, top_p=0.9)

    def measured(sequences, rows=8, chunk=None):
        processor.head_chunk_rows = chunk
        results, diagnostics = processor.teacher_force_logprobs_with_diagnostics(sequences, tf_batch_size=rows)
        table = diagnostics.steps_frame().drop(columns=["eos_prob"]).to_numpy(dtype=float)
        return np.column_stack([flat(results.logprobs), flat(results.rb_entropies), table])

    base = measured(sequences)
    assert measured(sequences, rows=1).shape == base.shape
    wider = BatchedSequences.from_ids(
        [sequences.prompt_ids(0), sequences.prompt_ids(1), list(range(5, 45))],
        [*([sequences.response_ids(b, g) for g in range(3)] for b in range(2)), [[7] * 30] * 3],
        pad_id=11,
    )
    for other in (
        measured(sequences, rows=1),
        measured(sequences, rows=3, chunk=1),
        measured(sequences, chunk=5),
        measured(wider)[: len(base)],
    ):
        np.testing.assert_allclose(other, base, atol=tolerance * 10, rtol=tolerance)
        np.testing.assert_allclose(other[:, :2], base[:, :2], atol=tolerance, rtol=0)


def test_left_padding_changes_nothing(make_processor):
    processor = make_processor()
    alone = BatchedSequences.from_ids([[154, 11, 61]], [[[17, 18]]])
    padded = BatchedSequences.from_ids([[154, 11, 61], list(range(10, 30))], [[[17, 18]], [[5, 6]]])
    a, b = (processor.teacher_force_logprobs(s).logprobs[0][0] for s in (alone, padded))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_pad_id_equal_to_eos(make_processor, tokenizer):
    processor, eos = make_processor(), tokenizer.eos_token_id
    prompt, response = [20, eos, 30], [40, 41, eos]
    short = BatchedSequences.from_ids([prompt], [[response]], pad_id=eos)
    padded = BatchedSequences.from_ids([prompt, [9] * 6], [[response], [[8] * 9]], pad_id=eos)
    results = processor.teacher_force_logprobs(padded)
    assert len(results.logprobs[0][0]) == 3  # the emitted EOS is scored, padding is not
    torch.testing.assert_close(results.logprobs[0][0], processor.teacher_force_logprobs(short).logprobs[0][0])
    expected = step_logits(processor.parts.causal, prompt, response).log_softmax(-1)[range(3), response]
    torch.testing.assert_close(results.logprobs[0][0], expected, atol=1e-5, rtol=0)
    without = BatchedSequences.from_ids([[20, 30]], [[response]])
    assert (results.logprobs[0][0] - processor.teacher_force_logprobs(without).logprobs[0][0]).abs().max() > 1e-3


def test_the_nucleus_is_the_samplers_also_in_float64(make_processor, sequences):
    narrow, wide = make_processor(top_p=0.8), make_processor(top_p=0.8, precision={"entropy_fp64": True})
    a, b = (p.teacher_force_logprobs_with_diagnostics(sequences) for p in (narrow, wide))
    np.testing.assert_array_equal(a[1].steps_frame()["support_size"], b[1].steps_frame()["support_size"])
    assert {str(dtype) for dtype in b[1].steps_frame().dtypes[3:]} == {"float64"}
    for results in (b[0].logprobs, b[0].token_logqs):
        assert {values.dtype for row in results for values in row} == {torch.float64}
    np.testing.assert_allclose(flat(a[0].rb_entropies), flat(b[0].rb_entropies), atol=1e-5)


def test_greedy_is_a_point_mass(make_processor, sequences):
    results = make_processor(do_sample=False).teacher_force_logprobs(sequences, compute_rb=True)
    assert set(flat(results.rb_entropies)) == {0.0}
    assert set(flat(results.token_logqs)) <= {0.0, -math.inf}


# --- what is refused ----------------------------------------------------------------------------------------------


def test_rows_past_the_context(make_processor):
    long = BatchedSequences.from_ids([[5] * 250], [[[6] * 10]])
    with pytest.raises(ContextLengthError, match="4 more than the context of 256"):
        make_processor().teacher_force_logprobs(long)


def test_ids_outside_the_vocabulary(make_processor):
    with pytest.raises(InputError, match="99999, outside the vocabulary"):
        make_processor().teacher_force_logprobs(BatchedSequences.from_ids([[5]], [[[99999]]]))


def test_other_models_are_refused(tokenizer):
    with pytest.raises(InputError, match="got Linear"):
        SequenceProcessor(torch.nn.Linear(2, 2), tokenizer)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_batch_sizes(make_processor, sequences, size):
    with pytest.raises(InputError, match="tf_batch_size is an integer ≥ 1"):
        make_processor().teacher_force_logprobs(sequences, tf_batch_size=size)


@pytest.mark.parametrize("rows", [0, -3, 1.5, True])
def test_chunks_of_the_head(make_processor, rows):
    processor = make_processor()
    with pytest.raises(InputError, match=f"head_chunk_rows is an integer ≥ 1, got {rows}"):
        processor.head_chunk_rows = rows
    assert processor.head_chunk_rows is None


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_early_windows(make_processor, sequences, steps):
    processor = make_processor()
    processor.early_steps = steps
    with pytest.raises(InputError, match="early_steps is an integer ≥ 0"):
        processor.teacher_force_logprobs_with_diagnostics(sequences)


def test_without_a_tokenizer(make_model, sequences, tokenizer):
    config = {"generation": {"top_p": 0.9}}
    with_one, without = (SequenceProcessor(make_model(), t, config=config) for t in (tokenizer, None))
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    for plan in (None, sl.Plan(sl.add(vector, coef=1.0))):
        expected, results = (
            p.teacher_force_logprobs_with_diagnostics(sequences, plan=plan) for p in (with_one, without)
        )
        np.testing.assert_array_equal(flat(results[0].token_logqs), flat(expected[0].token_logqs))
        pd.testing.assert_frame_equal(results[1].steps_frame(), expected[1].steps_frame())  # the model names its EOS
    for prompts in (["The ferry"], [[5, 6]]):
        with pytest.raises(InputError, match="Generation needs the model's tokenizer"):
            without.generate_batched(prompts, 1)
    with pytest.raises(InputError, match=r"A dose is measured on reference text.*state coef="):
        without.teacher_force_logprobs(sequences, plan=sl.Plan(sl.add(vector, dose=0.1)))
    by_text = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.span("ferry")))
    with pytest.raises(PlanError, match="needs the prompt's text"):
        without.teacher_force_logprobs(sequences, plan=by_text)


def test_an_eos_id_that_the_model_has_no_logit_for(make_model, tokenizer, sequences):
    model = make_model()
    model.generation_config.eos_token_id = [1, 99999]
    found = SequenceProcessor(model, tokenizer).teacher_force_logprobs_with_diagnostics(sequences)[1].steps_frame()
    expected = SequenceProcessor(make_model(), tokenizer).teacher_force_logprobs_with_diagnostics(sequences)[1]
    np.testing.assert_array_equal(found["eos_prob"], expected.steps_frame()["eos_prob"])


def test_certainty_is_zero_and_not_minus_zero(make_processor):
    processor = make_processor(do_sample=False)
    drawn = processor.generate_batched([[5, 6, 7]], 1, seed=0)
    results, diagnostics = processor.teacher_force_logprobs_with_diagnostics(drawn)
    frame = diagnostics.steps_frame()
    found = [frame[name] for name in ("rb_entropy", "renyi2", "two_point_entropy", "policy_surprisal")]
    for values in (*found[:2], *found[3:], flat(results.rb_entropies), flat(results.policy_surprisals)):
        assert set(values) == {0.0}
    for values in (*found, flat(results.rb_entropies), flat(results.policy_surprisals), flat(results.entropies)):
        assert not np.signbit(values).any()


def test_the_model_is_left_as_it_was(make_processor, sequences):
    processor = make_processor()
    model = processor.parts.causal
    model.train()
    model.model.layers[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    processor.teacher_force_logprobs(sequences)
    assert model.training
    assert not model.model.layers[0].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_head_replaced_later_is_refused(make_processor, sequences):
    processor = make_processor()
    processor.teacher_force_logprobs(sequences)
    processor.parts.causal.set_output_embeddings(torch.nn.Linear(64, 384, bias=False))
    with pytest.raises(InputError, match="head of LlamaForCausalLM was replaced"):
        processor.teacher_force_logprobs(sequences)
    with pytest.raises(InputError, match="make a new one"):
        processor.generate_batched(["The ferry"], 1, seed=0)
