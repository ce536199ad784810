"""Replayed supports: the sets that tokens were drawn from, kept with them, and q on them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.core.token_sets import TokenSets
from steerlab.measures.nucleus import nucleus
from steerlab.sequences import (
    BatchedSequences,
    LogprobResults,
    SequenceProcessor,
    importance_weights,
    ratio_summary,
    rewards_of,
    tag_reward,
    token_ratios,
)
from tests.sequences.test_forcing import flat

PROMPTS = ["The ferry", "Nobody knew why the"]
NARROW = {"func_override": {"cast_params": False}}  # scores as the sampler runs


@pytest.mark.parametrize(
    "policy", [{}, {"top_p": 0.7}, {"temperature": 0.6, "top_p": 0.9}, {"do_sample": False}], ids=str
)
def test_every_token_carries_the_set_it_was_drawn_from(make_processor, policy):
    processor = make_processor(max_new_tokens=9, **policy)
    drawn = processor.generate_batched(PROMPTS, 3, gen_batch_size=4, seed=0, stop=["e"])
    assert len({length for row in drawn.gen_lens for length in row}) > 1  # rows end at different steps
    logits = [processor.functional_logits(drawn.sequences[b], drawn.attention_masks[b]) for b in range(2)]
    for b, row in enumerate(drawn.supports):
        for g, sets in enumerate(row):
            assert len(sets) == drawn.gen_lens[b][g]
            start = drawn.prompt_lens[b] - 1
            steps = logits[b][g, start : start + len(sets)]
            expected = nucleus(steps, drawn.policy).numpy()
            assert (sets.masks() != expected).any(axis=1).mean() <= 0.1  # rounding may move a boundary
            assert all(token in ids for token, ids in zip(drawn.response_ids(b, g), sets, strict=True))
    replayed = processor.teacher_force_logprobs(drawn, support="replayed", compute_rb=True)
    np.testing.assert_allclose(flat(replayed.token_logqs), flat(drawn.sampler_logqs), atol=1e-4)
    assert replayed.support == "replayed"
    assert processor.generate_batched(PROMPTS, 1, seed=0, with_support=False).supports is None


def test_lens_engines_say_it_too(tiny_llama_engine):
    policy = sl.SamplingPolicy(0.8, top_p=0.6, top_k=40)
    rows = {}
    for engine in ("bridge", "fast", "graph"):
        made = tiny_llama_engine.generate(
            PROMPTS, policy=policy, max_new_tokens=5, n=2, with_support=True, engine=engine
        )
        assert all(len(row.supports) == len(row.token_ids) for row in made)
        assert max(int(row.supports.sizes.max()) for row in made) <= 40
        assert all(t in ids for row in made for t, ids in zip(row.token_ids, row.supports, strict=True))
        rows[engine] = [row.supports for row in made]
    assert rows["bridge"] == rows["fast"] == rows["graph"]
    assert tiny_llama_engine.generate(PROMPTS, max_new_tokens=2)[0].supports is None


def test_replayed_ratios_are_exactly_one_in_half_precision(tiny_llama_path):
    with sl.load(tiny_llama_path, dtype="bfloat16") as engine:
        config = {"generation": {"top_p": 0.8, "max_new_tokens": 30}, "precision": NARROW}
        processor = SequenceProcessor(engine, config=config)
        for through in (None, engine):
            drawn = processor.generate_batched(PROMPTS, 8, seed=0, engine=through)
            old = processor.teacher_force_logprobs(drawn, support="replayed")
            for with_grad in (False, True):
                ratios = flat(token_ratios(processor.teacher_force_logprobs(drawn, with_grad, support="replayed"), old))
                assert len(ratios) > 300
                assert (ratios == 1).all()
            health = processor.ratio_health(drawn)
            assert health.num_flipped > 0
            assert health.replayed.num_impossible == 0


def test_health_counts_what_it_says(make_processor):
    processor = make_processor(top_p=0.8, max_new_tokens=10)
    drawn = processor.generate_batched(PROMPTS, 2, seed=0)
    whole = TokenSets.everything(10, drawn.supports[0][0].d_vocab)
    wider = replace(drawn, supports=[[whole if g else sets for g, sets in enumerate(row)] for row in drawn.supports])
    health = processor.ratio_health(wider)
    n = drawn.gen_lens[0][1] + drawn.gen_lens[1][1]
    assert n == 20
    assert health.num_flipped == n
    ratios = flat(token_ratios(processor.teacher_force_logprobs(wider, support="replayed"), wider))
    expected = np.mean((ratios < 0.9) | (ratios > 1.1))
    assert health.replayed.share_outside == pytest.approx(expected)
    assert expected == pytest.approx(n / len(ratios))  # a fifth of the mass came back in at the others
    weights = np.array([values.prod() for row in token_ratios_of(processor, wider) for values in row])
    assert health.replayed.effective_sample_size == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-6)
    assert health.recomputed.effective_sample_size == pytest.approx(4, rel=1e-3)
    assert health.recomputed.share_outside == 0
    assert health.replayed.max_deviation == pytest.approx(np.abs(np.log(ratios)).max())
    assert health.to_frame().num_tokens.tolist() == [len(ratios)] * 2


def token_ratios_of(processor, sequences):
    return token_ratios(processor.teacher_force_logprobs(sequences, support="replayed"), sequences)


def test_moved_parameters_keep_the_sets(make_processor):
    processor = make_processor(top_p=0.5, max_new_tokens=12)
    drawn, old, diagnostics = processor.generate_with_logprobs(
        PROMPTS, G=4, seed=0, compute_rb=True, support="replayed"
    )
    sizes = [pack.steps.support_size for row in diagnostics.diagnostics for pack in row]
    np.testing.assert_array_equal(np.concatenate(sizes), np.concatenate([s.sizes for r in drawn.supports for s in r]))
    name = "model.layers.1.mlp.up_proj.weight"
    v = {name: torch.randn(128, 64, generator=torch.Generator().manual_seed(0))}
    moved = processor.params_override(v, 0.3)
    new = processor.teacher_force_logprobs(drawn, params_override=moved, support="replayed")
    assert not flat(new.outside_nucleus).any()
    weights = importance_weights(new, old)  # without a warning: nothing that it can reach is missing
    assert not weights.biased
    assert (weights.weights > 0).all()
    recomputed = processor.teacher_force_logprobs(drawn, params_override=moved)
    assert flat(recomputed.outside_nucleus).any()
    with pytest.raises(InputError, match="new was scored on recomputed supports, old on replayed ones"):
        importance_weights(recomputed, old)
    with pytest.raises(InputError, match=r"has log q = -inf on the side that drew it.*support='replayed'"):
        token_ratios(recomputed, recomputed)


def test_what_cannot_be_replayed(make_processor, sequences):
    processor = make_processor(top_p=0.5)
    with pytest.raises(InputError, match=r"do not carry: draw them with generate_batched\(…, with_support=True\)"):
        processor.teacher_force_logprobs(sequences, support="replayed")
    with pytest.raises(InputError, match="support is 'recomputed' or 'replayed', got 'both'"):
        processor.teacher_force_logprobs(sequences, support="both")
    everything = make_processor().teacher_force_logprobs(sequences, support="replayed")  # nothing to know
    np.testing.assert_array_equal(
        flat(everything.token_logqs), flat(make_processor().teacher_force_logprobs(sequences).token_logqs)
    )
    drawn = processor.generate_batched(PROMPTS, 1, seed=0)
    other = replace(drawn, supports=[[TokenSets.everything(len(s), 9) for s in row] for row in drawn.supports])
    with pytest.raises(InputError, match=r"vocabulary of \[9\] tokens, the model's has 384"):
        processor.teacher_force_logprobs(other, support="replayed")
    processor.config = processor.config.changed(generation={"temperature": 0.5})
    with pytest.raises(InputError, match=r"drawn under SamplingPolicy\(temperature=1.0.*their supports belong to"):
        processor.teacher_force_logprobs(drawn, support="replayed")
    with pytest.raises(InputError, match="one set per generated token"):
        replace(drawn, supports=[[sets[1:] for sets in row] for row in drawn.supports])


def test_sets_of_another_sampler_count_whatever_the_policy(make_processor, sequences):
    """A sampler whose cut the configuration cannot state, such as top_k, with sets given by hand."""
    processor = make_processor()
    ids = [[sequences.response_ids(b, g) for g in range(3)] for b in range(2)]
    supports = [[TokenSets.of([{token, 7, 300} for token in row], 384) for row in some] for some in ids]
    given = replace(sequences, supports=supports, sampler_logqs=[[np.zeros(len(row)) for row in some] for some in ids])
    found = processor.teacher_force_logprobs(given, compute_rb=True, support="replayed")
    whole = processor.functional_logits(sequences.sequences[0, :1], sequences.attention_masks[0, :1]).detach()
    first = sequences.prompt_lens[0] - 1
    kept = [sorted({token, 7, 300}) for token in ids[0][0]]
    for step, (token, members) in enumerate(zip(ids[0][0], kept, strict=True)):
        q = whole[0, first + step, members].log_softmax(dim=0)
        assert float(found.token_logqs[0][0][step]) == pytest.approx(float(q[members.index(token)]), abs=1e-5)
        assert found.rb_entropies[0][0][step] == pytest.approx(float(-(q.exp() * q).sum()), abs=1e-5)
    assert processor.ratio_health(given).num_flipped == sum(map(sum, sequences.gen_lens))


def test_an_engine_that_cannot_say(make_processor, tiny_llama_engine, monkeypatch):
    traits = replace(tiny_llama_engine.traits, gives_supports=False)
    monkeypatch.setattr(type(tiny_llama_engine), "traits", traits)
    processor = make_processor(top_p=0.5)
    assert processor.generate_batched(PROMPTS, 1, seed=0, engine=tiny_llama_engine).supports is None
    with pytest.raises(InputError, match=r"\(lens\) does not say which sets it draws from; pass with_support=False"):
        processor.generate_batched(PROMPTS, 1, seed=0, engine=tiny_llama_engine, with_support=True)


def test_supports_policy_rewards_and_indices_are_saved(make_processor, tmp_path):
    processor = make_processor(top_p=0.6, max_new_tokens=7)
    drawn, scored, _ = processor.generate_with_replacement_sampling(6, "arithmetic", seed=1, support="replayed")
    found = BatchedSequences.load(drawn.save(tmp_path / "drawn"))
    assert found.supports == drawn.supports
    assert (found.policy, found.rewards) == (drawn.policy, drawn.rewards)
    np.testing.assert_array_equal(found.pool_indices, drawn.pool_indices)
    again = processor.teacher_force_logprobs(found, support="replayed")
    assert again.rewards == scored.rewards == rewards_of(found, tag_reward)
    assert LogprobResults.load(scored.save(tmp_path / "scored")).support == "replayed"
    some = found.select([(4, 0), (1, 0)])
    assert some.supports == [drawn.supports[4], drawn.supports[1]]
    assert some.rewards == [drawn.rewards[4], drawn.rewards[1]]
    assert some.pool_indices.tolist() == drawn.pool_indices[[4, 1]].tolist()
    size = sum(sets.nbytes for row in drawn.supports for sets in row)
    tokens = sum(map(sum, drawn.gen_lens))
    assert size <= tokens * 384 // 8


def test_summaries_of_sequences_without_a_sampler(make_processor, sequences):
    scored = make_processor().teacher_force_logprobs(sequences)
    with pytest.raises(InputError, match="carry no log q of their sampler"):
        ratio_summary(scored, sequences)
    assert ratio_summary(scored, scored).share_outside == 0
