import logging
import math

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError, RunError
from steerlab.scoring import distributions as module
from steerlab.scoring import distributions_bytes, read_distributions
from tests.tiny_models import SENTENCES

TEXT = " ".join(SENTENCES)
SIZES = {"context_length": 40, "stride": 20}


def test_every_scored_position_has_its_whole_distribution(tiny_llama_engine, tmp_path):
    ids = tiny_llama_engine.tokenizer(TEXT)["input_ids"]
    folder = tmp_path / "d"
    found = sl.perplexity(tiny_llama_engine, TEXT, **SIZES, distributions=folder, distribution_dtype="float32")
    shards = list(read_distributions(folder))
    assert len(shards) > 3
    positions = np.concatenate([shard.positions for shard in shards])
    assert positions.tolist() == list(range(1, len(ids)))
    assert np.concatenate([shard.token_ids for shard in shards]).tolist() == ids[1:]
    log_probs = torch.cat([shard.log_probs for shard in shards])
    assert log_probs.dtype == torch.float32
    assert log_probs.exp().sum(-1).numpy() == pytest.approx(1, abs=1e-5)
    chosen = log_probs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert -chosen.numpy() == pytest.approx(found.token_nlls, abs=1e-5)
    plain = sl.perplexity(tiny_llama_engine, TEXT, **SIZES)
    assert found.nll == pytest.approx(plain.nll, abs=1e-6)
    # independently: the first window is one uncached pass
    logits = tiny_llama_engine.logits(ids[:40])
    assert torch.allclose(log_probs[:39], logits[:39].log_softmax(-1), atol=1e-4)


def test_half_precision_takes_half_the_room(tiny_llama_engine, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = sl.perplexity(tiny_llama_engine, TEXT, **SIZES, distributions=tmp_path / "d")
    size = distributions_bytes(found.num_tokens, 384)
    assert size == found.num_tokens * 384 * 2
    assert f"{found.num_tokens} tokens × 384 log-probs in float16 take {size / 1e9:.3f} GB" in caplog.text
    on_disk = sum(path.stat().st_size for path in (tmp_path / "d").glob("*.safetensors"))
    assert size < on_disk < 1.3 * size
    (first, *_) = read_distributions(tmp_path / "d")
    chosen = first.log_probs[torch.arange(39), torch.tensor(first.token_ids)]
    assert -chosen.float().numpy() == pytest.approx(found.token_nlls[:39], rel=2**-10)


def test_steered_distributions(tiny_llama_engine, tmp_path):
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(torch.ones(64), layer=1), coef=2.0))
    found = sl.perplexity(tiny_llama_engine, TEXT, **SIZES, plan=plan, distributions=tmp_path / "d")
    assert found.nll == pytest.approx(sl.perplexity(tiny_llama_engine, TEXT, **SIZES, plan=plan).nll, abs=1e-6)


def test_bos_each_window(tiny_llama_engine, tmp_path):
    options = {**SIZES, "bos_each_window": True}
    found = sl.perplexity(tiny_llama_engine, TEXT, **options, distributions=tmp_path / "d")
    positions = np.concatenate([shard.positions for shard in read_distributions(tmp_path / "d")])
    assert positions.tolist() == list(range(found.num_tokens))
    assert found.nll == pytest.approx(sl.perplexity(tiny_llama_engine, TEXT, **options).nll, abs=1e-6)


def test_going_on_with_a_folder(tiny_llama_engine, tmp_path):
    options = {**SIZES, "distributions": tmp_path / "d", "resume": tmp_path / "run"}
    first = sl.perplexity(tiny_llama_engine, TEXT, **options)
    again = sl.perplexity(tiny_llama_engine, TEXT, **options)
    assert np.array_equal(first.token_nlls, again.token_nlls)
    with pytest.raises(InputError, match="already holds distributions"):
        sl.perplexity(tiny_llama_engine, TEXT, **SIZES, distributions=tmp_path / "d")
    with pytest.raises(RunError, match="stride was 20, now 10"):
        sl.perplexity(
            tiny_llama_engine, TEXT, context_length=40, stride=10, distributions=tmp_path / "d", resume=tmp_path / "b"
        )


def test_an_unfinished_folder_says_so(tiny_llama_engine, tmp_path, monkeypatch):
    from steerlab.scoring import sliding

    options = {**SIZES, "distributions": tmp_path / "d", "resume": tmp_path / "run"}
    real, left = sliding.window_values, [3]

    def failing(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sliding, "window_values", failing)
    with pytest.raises(KeyboardInterrupt):
        sl.perplexity(tiny_llama_engine, TEXT, **options)
    with pytest.raises(DataError, match="beginning of a text only"):
        next(read_distributions(tmp_path / "d"))
    monkeypatch.undo()
    (tmp_path / "d" / "000000000001.safetensors").rename(tmp_path / "kept")
    with pytest.raises(RunError, match="lacks the distributions of 1 windows"):
        sl.perplexity(tiny_llama_engine, TEXT, **options)
    (tmp_path / "kept").rename(tmp_path / "d" / "000000000001.safetensors")
    found = sl.perplexity(tiny_llama_engine, TEXT, **options)
    assert sum(len(shard.positions) for shard in read_distributions(tmp_path / "d")) == found.num_tokens


def test_places_and_sizes_that_cannot_be(tiny_llama_engine, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(InputError, match="not an empty folder"):
        sl.perplexity(tiny_llama_engine, TEXT, distributions=tmp_path)
    with pytest.raises(InputError, match="float16 or float32, got 'int8'"):
        sl.perplexity(tiny_llama_engine, TEXT, distributions=tmp_path / "d", distribution_dtype="int8")
    with pytest.raises(DataError, match="holds no distributions"):
        next(read_distributions(tmp_path))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="GB free"):
        sl.perplexity(tiny_llama_engine, TEXT, distributions=tmp_path / "e")
    assert not (tmp_path / "e").exists() or not list((tmp_path / "e").glob("*.safetensors"))


def test_a_window_too_large_for_memory_is_refused(tiny_llama_engine, tmp_path, monkeypatch):
    from steerlab.scoring import sliding

    monkeypatch.setattr(sliding, "WINDOW_BYTES", 4 * 384 * 30)
    with pytest.raises(InputError, match="context_length of at most 30"):
        sl.perplexity(tiny_llama_engine, TEXT, context_length=31, distributions=tmp_path / "d")
    assert math.isfinite(sl.perplexity(tiny_llama_engine, TEXT, context_length=30, distributions=tmp_path / "d").nll)


def test_a_run_that_was_killed_while_it_wrote_can_start_again(tmp_path):
    (tmp_path / f".{module.INDEX}.x.tmp").write_bytes(b"tw")
    module.DistributionWriter(tmp_path, "float16", {"model": "m"}, resume=False)
    (tmp_path / ".000000000001.safetensors.x.tmp").write_bytes(b"tw")
    module.DistributionWriter(tmp_path, "float16", {"model": "m"}, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == [module.INDEX]
