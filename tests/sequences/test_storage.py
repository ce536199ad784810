import json
import math
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file, save

from steerlab.core._hashing import bytes_hash
from steerlab.core.errors import DataError
from steerlab.sequences import BatchedSequences, DiagnosticsResults, LogprobResults
from steerlab.sequences.diagnostics import COLUMNS


@pytest.fixture
def run(make_processor):
    processor = make_processor(top_p=0.9, max_new_tokens=6)
    return processor.generate_with_logprobs(num_prompts=2, G=2, seed=0, compute_rb=True)


def test_sequences(run, tmp_path):
    path = run[0].save(tmp_path / "run" / "sequences")
    assert path.name == "sequences.json"
    found = BatchedSequences.load(path)
    assert found.sequences.equal(run[0].sequences)
    assert found.attention_masks.equal(run[0].attention_masks)
    for name in ("prompt_lens", "gen_lens", "responses_text", "finish_reasons", "prompts", "examples"):
        assert getattr(found, name) == getattr(run[0], name)
    for ours, theirs in zip(found.sampler_logqs[1], run[0].sampler_logqs[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_sequences_without_the_optional_fields(sequences, tmp_path):
    found = BatchedSequences.load(sequences.save(tmp_path / "s"))
    assert found.sequences.equal(sequences.sequences)
    assert (found.sampler_logqs, found.prompts) == (None, None)


@pytest.mark.parametrize("with_grad", [False, True])
def test_logprobs(make_processor, sequences, tmp_path, with_grad):
    processor = make_processor(top_p=0.3)
    results = processor.teacher_force_logprobs(sequences, with_grad, compute_rb=True, return_baseline_features=True)
    assert np.isinf(results.sequence_logqs[0][2])
    found = LogprobResults.load(results.save(tmp_path / "scores.json"))
    for b in range(2):
        for g in range(3):
            for name in ("logprobs", "token_logqs", "entropies", "rb_entropies", "baseline_feats_torch"):
                ours, theirs = getattr(found, name)[b][g], getattr(results, name)[b][g]
                np.testing.assert_array_equal(ours, theirs.detach() if hasattr(theirs, "detach") else theirs)
            assert not found.logprobs[b][g].requires_grad
    assert found.sequence_logprobs == results.sequence_logprobs
    assert found.sequence_logqs == results.sequence_logqs
    assert found.policy == results.policy
    assert math.isnan(found.rewards[0][0])
    assert (found.rb_entropies_torch is None) is not with_grad


def test_logprobs_without_entropies(make_processor, sequences, tmp_path):
    found = LogprobResults.load(make_processor().teacher_force_logprobs(sequences).save(tmp_path / "scores"))
    assert all(len(values) == 0 for row in found.rb_entropies for values in row)
    assert found.baseline_feats_torch is None


def test_rewards(run, tmp_path):
    assert LogprobResults.load(run[1].save(tmp_path / "scores")).rewards == run[1].rewards == [[0.0, 0.0], [0.0, 0.0]]


def test_diagnostics(make_processor, sequences, tmp_path):
    processor = make_processor()
    processor.early_steps = 2
    _, results = processor.teacher_force_logprobs_with_diagnostics(sequences)
    found = DiagnosticsResults.load(results.save(tmp_path / "diagnostics"))
    for name in COLUMNS:
        ours, theirs = (getattr(r.diagnostics[0][0].steps, name) for r in (found, results))
        np.testing.assert_array_equal(ours, theirs)
    assert found.to_frame().equals(results.to_frame())


def test_saving_again_replaces(make_processor, sequences, tmp_path):
    for top_p in (0.9, 0.5):
        results = make_processor(top_p=top_p).teacher_force_logprobs(sequences)
        results.save(tmp_path / "scores")
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert LogprobResults.load(tmp_path / "scores").policy.top_p == 0.5


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_an_interrupted_save_leaves_the_old_one(make_processor, sequences, tmp_path, monkeypatch, suffix):
    from steerlab.sequences import _storage as storage

    old = make_processor().teacher_force_logprobs(sequences)
    old.save(tmp_path / "scores")
    write = storage.write_atomic

    def fail_on_one(path, data):
        if path.suffix == suffix:
            raise KeyboardInterrupt
        return write(path, data)

    monkeypatch.setattr(storage, "write_atomic", fail_on_one)
    with pytest.raises(KeyboardInterrupt):
        make_processor(temperature=2.0).teacher_force_logprobs(sequences).save(tmp_path / "scores")
    assert LogprobResults.load(tmp_path / "scores").sequence_logqs == old.sequence_logqs


def test_damage_is_noticed(run, tmp_path):
    path = run[1].save(tmp_path / "scores")
    with pytest.raises(DataError, match="holds 'logprobs' in format 1, not 'sequences'"):
        BatchedSequences.load(path)
    with pytest.raises(DataError, match="Cannot read logprobs from"):
        LogprobResults.load(tmp_path / "nothing")
    (tensors,) = tmp_path.glob("*.safetensors")
    payload = bytearray(tensors.read_bytes())
    payload[-1] ^= 1
    tensors.write_bytes(payload)
    with pytest.raises(DataError, match="is damaged"):
        LogprobResults.load(path)
    path.write_text("{}")
    with pytest.raises(DataError, match="KeyError"):
        LogprobResults.load(path)
    stored = {"format": 1, "kind": "logprobs", "tensors": "../elsewhere.safetensors", "data": {}}
    path.write_text(json.dumps(stored))
    with pytest.raises(DataError, match="Cannot read"):
        LogprobResults.load(path)


def test_saving_again_leaves_other_files(make_processor, sequences, tmp_path):
    others = [tmp_path / f"scores-{name}.safetensors" for name in ("best_checkpoints", "x-0123456789abcdef")]
    for other in others:
        other.write_bytes(b"mine")
    for top_p in (0.9, 0.5):
        make_processor(top_p=top_p).teacher_force_logprobs(sequences).save(tmp_path / "scores")
    assert all(other.read_bytes() == b"mine" for other in others)
    assert len(list(tmp_path.iterdir())) == 4


def test_what_is_not_json_is_named(sequences, tmp_path):
    with pytest.raises(DataError, match=r"sequences cannot be saved as JSON: .*float32"):
        replace(sequences, examples=[{"score": np.float32(1)}] * 2).save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_files_written_before_supports_still_load(run, tmp_path):
    for result, kind in ((run[0], BatchedSequences), (run[1], LogprobResults)):
        path = result.save(tmp_path / kind.__name__)
        content = json.loads(path.read_text())
        for name in ("policy", "rewards", "support_vocabulary", "support"):
            if kind is BatchedSequences or name == "support":
                content["data"].pop(name, None)
        plain = {k: v for k, v in load_file(path.parent / content["tensors"]).items() if not k.startswith("support_")}
        payload = save(plain)
        content["tensors"] = f"{path.stem}-{bytes_hash(payload)}.safetensors"
        (path.parent / content["tensors"]).write_bytes(payload)
        path.write_text(json.dumps(content))
        found = kind.load(path)
        if kind is BatchedSequences:
            assert (found.supports, found.policy, found.rewards, found.pool_indices) == (None, None, None, None)
            assert found.sequences.equal(run[0].sequences)
        else:
            assert found.support == "recomputed"
            assert found.sequence_logqs == run[1].sequence_logqs
