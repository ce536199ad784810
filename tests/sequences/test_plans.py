from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import PlanError, VectorShapeError
from steerlab.sequences import BatchedSequences
from tests.sequences.test_forcing import flat

BY_TOKENS = sl.where.between({*range(0, 300, 5)}, {*range(1, 300, 5)}) | sl.where.after({*range(2, 300, 4), (3, 4)}, 2)


@pytest.fixture
def vector():
    return sl.SteeringVector.from_tensor(3 * torch.randn(64, generator=torch.Generator().manual_seed(0)), layer=2)


def engine_scores(engine, sequences, plan):
    prompts = [sequences.prompt_ids(b) for b in range(2)]
    targets = [[sequences.response_ids(b, g) for g in range(3) if sequences.gen_lens[b][g]] for b in range(2)]
    return np.concatenate(engine.score(prompts, targets, plan=plan).token_log_probs)


@pytest.mark.parametrize("site", ["resid_post", "resid_pre"])
@pytest.mark.parametrize("where", [None, sl.where.all(), sl.where.last_prompt(), BY_TOKENS])
@pytest.mark.parametrize("with_grad", [False, True])
def test_equals_the_lens_engine(make_processor, tiny_llama_engine, sequences, vector, site, where, with_grad):
    moved = sl.SteeringVector.from_tensor(vector.values, layer=2, site=site)
    options = {} if where is None else {"where": where}
    plan = sl.Plan(sl.add(moved, coef=1.5, **options), sl.ablate(vector, **options))
    processor = make_processor()
    found = flat(processor.teacher_force_logprobs(sequences, plan=plan, with_grad=with_grad).logprobs)
    np.testing.assert_allclose(found, engine_scores(tiny_llama_engine, sequences, plan), atol=2e-5)
    assert np.abs(found - flat(processor.teacher_force_logprobs(sequences).logprobs)).max() > 0.01
    assert [r.edited for r in processor.receipts] == [r.expected for r in processor.receipts]
    assert len(processor.receipts) == 5  # the empty response was not run


def test_a_dose_means_what_it_means_on_the_engine(make_processor, tiny_llama_engine, sequences, vector):
    plan = sl.Plan(sl.add(vector, dose=0.4))
    processor = make_processor()
    for site in ("resid_post", "resid_pre"):
        ours, theirs = (found.median_norm(2, site) for found in (processor._resolver, tiny_llama_engine))
        assert ours == pytest.approx(theirs, rel=1e-5)
    found = flat(processor.teacher_force_logprobs(sequences, plan=plan).logprobs)
    np.testing.assert_allclose(found, engine_scores(tiny_llama_engine, sequences, plan), atol=2e-5)


def test_extracted_vectors_are_at_home(make_processor, tiny_llama_engine, sequences):
    pairs = sl.ContrastPairs.from_lists(["I really liked it", "a happy day"], ["it was stale", "a terrible evening"])
    vectors = sl.extract(tiny_llama_engine, pairs, layers=[2])
    make_processor().teacher_force_logprobs(
        sequences, plan=sl.Plan(sl.add(vectors[2], dose=0.1))
    )  # warnings are errors
    processor = make_processor()
    with torch.no_grad():
        processor.parts.root.lm_head.weight.mul_(1.1)
    with pytest.warns(UserWarning, match="made on"):
        processor.teacher_force_logprobs(sequences, plan=sl.Plan(sl.add(vectors[2], dose=0.1)))


def test_a_plan_per_prompt(make_processor, sequences, vector):
    processor, plan = make_processor(), sl.Plan(sl.add(vector, coef=1.0))
    mixed = processor.teacher_force_logprobs(sequences, plan=[None, plan])
    assert {r.plan_hash for r in processor.receipts[:3]} == {None}
    assert {r.plan_hash for r in processor.receipts[3:]} == {plan.hash}
    plain, steered = (processor.teacher_force_logprobs(sequences, plan=p) for p in (None, plan))
    for g in range(3):
        torch.testing.assert_close(mixed.logprobs[0][g], plain.logprobs[0][g], atol=1e-5, rtol=0)
        torch.testing.assert_close(mixed.logprobs[1][g], steered.logprobs[1][g], atol=1e-5, rtol=0)


def test_scaled_by_zero_is_the_unsteered_model(make_processor, sequences, vector):
    processor = make_processor()
    found = processor.teacher_force_logprobs(sequences, plan=sl.Plan(sl.add(vector, coef=1.0)).scaled(0.0))
    np.testing.assert_array_equal(flat(found.logprobs), flat(processor.teacher_force_logprobs(sequences).logprobs))


def test_plan_and_override_together(make_processor, sequences, vector):
    processor, plan = make_processor(torch.float64), sl.Plan(sl.add(vector, coef=1.0))
    name = "model.layers.3.mlp.up_proj.weight"
    v = {name: torch.randn(128, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    eta = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    override = processor.params_override(v, eta)
    total = sum(
        x.sum()
        for row in processor.teacher_force_logprobs(sequences, True, plan=plan, params_override=override).logprobs
        for x in row
    )
    (slope,) = torch.autograd.grad(total, eta)
    ends = [
        flat(
            processor.teacher_force_logprobs(
                sequences, plan=plan, params_override=processor.params_override(v, 0.1 + step)
            ).logprobs
        ).sum()
        for step in (-1e-3, 1e-3)
    ]
    assert slope.item() == pytest.approx((ends[1] - ends[0]) / 2e-3, rel=1e-2)


def test_steering_in_generation_is_the_steering_in_scoring(make_processor, tiny_llama_engine, vector):
    plan = sl.Plan(sl.add(vector, coef=2.0))
    processor = make_processor(top_p=0.9, max_new_tokens=16)
    prompts = ["The ferry leaves", "Two plus two equals four, and"]
    drawn = processor.generate_batched(prompts, 3, seed=4, plan=plan)
    assert all(r.edited == r.expected > 0 for r in processor.receipts)
    scored = processor.teacher_force_logprobs(drawn, plan=plan)
    for b in range(2):
        for g in range(3):
            np.testing.assert_allclose(scored.token_logqs[b][g], drawn.sampler_logqs[b][g], atol=1e-4)
    theirs = tiny_llama_engine.generate(
        prompts, plan=plan, policy=sl.SamplingPolicy(top_p=0.9), max_new_tokens=16, n=3, seed=4, stop=["</answer>"]
    )
    assert [c.token_ids for c in theirs] == [drawn.response_ids(b, g) for b in range(2) for g in range(3)]


def test_what_cannot_run_is_refused(make_processor, sequences, vector, unchecked_types):
    processor = make_processor()
    middle = sl.SteeringVector.from_tensor(vector.values, layer=2, site="resid_mid")
    with pytest.raises(PlanError, match=r"blocks\.2\.hook_resid_mid cannot run on a plain Hugging Face model"):
        processor.teacher_force_logprobs(sequences, plan=sl.Plan(sl.add(middle, coef=1.0)))
    narrow = sl.SteeringVector.from_tensor(torch.ones(3), layer=2)
    with pytest.raises(VectorShapeError):
        processor.teacher_force_logprobs(sequences, plan=sl.Plan(sl.add(narrow, coef=1.0)))
    with pytest.raises(PlanError, match="one per prompt"):
        processor.teacher_force_logprobs(sequences, plan=[None])
    with pytest.raises(PlanError, match="takes a Plan"):
        processor.teacher_force_logprobs(sequences, plan=vector)


def test_hooks_are_gone_even_on_error(make_processor, sequences, vector):
    processor = make_processor()
    layer = processor.parts.layers()[2]
    mine = []
    handle = layer.register_forward_hook(lambda *_: mine.append(1))

    def fail(*_):
        raise RuntimeError("half way")

    broken = processor.parts.layers()[3].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="half way"):
        processor.teacher_force_logprobs(sequences, plan=sl.Plan(sl.add(vector, coef=1.0)))
    broken.remove()
    assert list(layer._forward_hooks.values()) == [layer._forward_hooks[handle.id]]
    assert not layer._forward_pre_hooks
    handle.remove()


def test_span_and_mask_positions(make_processor, tokenizer, vector):
    processor = make_processor()
    ids = [tokenizer(text)["input_ids"] for text in ("The old clock had stopped", "Nobody knew the old clock")]
    drawn = BatchedSequences.from_ids(ids, [[[9, 10]], [[11, 12]]])
    plan = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.span("clock")))
    processor.teacher_force_logprobs(drawn, plan=plan)
    assert all(r.edited == r.expected > 0 for r in processor.receipts)


def test_a_dose_follows_weights_written_through_data(make_processor, sequences, vector):
    processor = make_processor()
    plan = sl.Plan(sl.add(vector, dose=0.5))
    before = flat(processor.teacher_force_logprobs(sequences, plan=plan).logprobs)
    processor.parts.causal.model.embed_tokens.weight.data.mul_(5)  # moves no version counter
    after = flat(processor.teacher_force_logprobs(sequences, plan=plan).logprobs)
    fresh = make_processor(model=processor.parts.causal).teacher_force_logprobs(sequences, plan=plan)
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_array_equal(after, flat(fresh.logprobs))


def test_quantised_weights_are_recorded(make_processor):
    processor = make_processor()
    processor.parts.causal.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert processor._resolver.info.weight_processing == "gptq 4-bit"


def test_a_row_that_is_not_finite_is_named(make_processor, sequences):
    """Scores came back NaN, without a word."""
    processor = make_processor()
    weight = processor.parts.causal.get_input_embeddings().weight
    token = sequences.response_ids(1, 0)[0]
    with torch.no_grad():
        weight[token] = torch.nan
    with pytest.raises(sl.NonFiniteError, match=r"The final states of prompt \d, response \d, are not finite"):
        processor.teacher_force_logprobs(sequences)
    with pytest.raises(sl.NonFiniteError, match="The logits of prompt 1, sample 0, are not finite"):
        processor.generate_batched([[5, 6], [7, token]], 1, seed=0)


@pytest.mark.parametrize(("token", "named"), [(11, "prompt 0, response 0"), (14, "prompt 1, response 0")])
def test_the_row_that_is_not_finite_is_the_one_named(make_processor, token, named):
    processor = make_processor()
    rows = BatchedSequences.from_ids([[5, 6], [7, 8]], [[[9, 10, 11, 12]], [[13, 14, 15]]])
    with torch.no_grad():
        processor.parts.causal.get_input_embeddings().weight[token] = -torch.inf
    with pytest.raises(sl.NonFiniteError, match=f"The final states of {named}, are not finite"):
        processor.teacher_force_logprobs(rows, tf_batch_size=2)


def test_no_thread_steers_anothers_call(make_processor, sequences, vector):
    processor, plan, barrier = make_processor(), sl.Plan(sl.add(vector, coef=3.0)), Barrier(4)

    def call(k):
        options = {"plan": (None, plan)[k % 2]}
        drawn = processor.generate_batched([[5, 60, 12]], 1, seed=0, **options)
        scored = processor.teacher_force_logprobs(sequences, **options)
        return drawn.response_ids(0, 0), flat(scored.logprobs).tolist()

    def work(k):
        barrier.wait()
        return [call(k) for _ in range(3)]

    expected = [call(0), call(1)]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[each] * 3 for each in expected] * 2
