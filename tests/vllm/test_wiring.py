"""What happens before a model runs: versions, patches, configuration, and the search for its layers."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steerlab.core.errors import BackendMissingError, HookPointError, InputError
from steerlab.engines.vllm._patches import versions
from steerlab.engines.vllm._wire.config import KEY, SteeringConfig
from steerlab.engines.vllm._worker.layers import find_layers, stream_parts
from steerlab.engines.vllm._worker.probe import _check_handed_on, _rule_of, _Seen
from steerlab.engines.vllm._worker.wiring import check_features


def test_a_missing_vllm_names_the_command(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda: None)
    with pytest.raises(BackendMissingError, match=r"pip install vllm==0\.32\.0"):
        versions.require_vllm()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0"])
def test_other_versions_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    with pytest.raises(BackendMissingError, match=rf"vLLM {version} .* 0\.32\.x and 0\.33\.x only"):
        versions.require_vllm()


@pytest.mark.vllm
def test_patch_releases_are_taken(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.1+cu130")
    assert versions.require_vllm() == "0.32.1+cu130"


@pytest.mark.vllm
def test_the_plugin_patches_once():
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu_worker import Worker

    from steerlab.engines.vllm._plugin import register

    register()
    first = (Worker.load_model, kv_cache_utils.generate_block_hash_extra_keys)
    register()
    assert first == (Worker.load_model, kv_cache_utils.generate_block_hash_extra_keys)


@pytest.mark.vllm
def test_vllm_finds_the_plugin():
    from importlib.metadata import entry_points

    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "steerlab"]
    assert point.value == "steerlab.engines.vllm._plugin:register"


@pytest.mark.vllm
def test_unsteered_requests_keep_their_block_keys():
    from steerlab.engines.vllm._patches.block_keys import block_key
    from steerlab.engines.vllm._wire.request_spec import RequestSpec

    def request(extra_args):
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args))

    assert block_key(request(None), 0, 16) is None
    assert block_key(request({"kv_transfer_params": {}}), 0, 16) is None
    assert block_key(SimpleNamespace(sampling_params=None), 0, 16) is None
    steered = request(RequestSpec("0", "abc", (((20, 30),),)).to_args())
    assert block_key(steered, 0, 16) is None
    assert block_key(steered, 16, 32) is not None


@pytest.mark.vllm
@pytest.mark.parametrize(
    "body",
    [
        "a ticket",
        None,
        7,
        [1, 2],
        {},
        {"row": "0"},
        {"row": "0", "plan": "abc", "groups": [[0]], "read": []},
        {"row": "0", "plan": "abc", "groups": [["a", "b"]], "read": []},
        {"row": "0", "plan": "abc", "groups": 3, "read": []},
        {"row": "0", "plan": 5, "groups": [], "read": []},
        {"row": "0", "plan": "abc", "groups": [], "read": None},
        {"row": "0", "plan": "abc", "groups": [[0, 9]], "read": [], "more": 1},
    ],
)
def test_what_is_not_ours_leaves_an_engine_without_steering_alone(body):
    from steerlab.engines.vllm._patches.block_keys import block_key

    for value in (body, json.dumps(body)):
        request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={KEY: value}))
        assert block_key(request, 0, 16) is None
        assert block_key(request, 16, 32) is None


@pytest.mark.vllm
@pytest.mark.slow
def test_what_is_wired_is_part_of_the_compile_cache_key(tiny_path):
    from vllm.engine.arg_utils import EngineArgs

    def key(additional):
        arguments = EngineArgs(str(tiny_path), dtype="float32", enforce_eager=True, additional_config=additional)
        return arguments.create_engine_config().compute_hash()

    wired = [
        {},
        {KEY: SteeringConfig((1,)).to_json()},
        {KEY: SteeringConfig((1, 2)).to_json()},
        {KEY: SteeringConfig((1,), max_directions=2).to_json()},
        {KEY: SteeringConfig((1,), op_version=99).to_json()},
    ]
    keys = [key(additional) for additional in wired]
    assert len(set(keys)) == len(wired)
    assert key(wired[1]) == keys[1]


def test_a_configuration_without_steering_asks_for_nothing():
    assert SteeringConfig.of(SimpleNamespace(additional_config={})) is None
    assert SteeringConfig.of(SimpleNamespace(additional_config={"other": 1})) is None
    config = SteeringConfig((2, 1), max_runs=3)
    assert SteeringConfig.of(SimpleNamespace(additional_config={KEY: config.to_json()})) == config


def features(**changed):
    parallel = {"enable_dbo": False, "prefill_context_parallel_size": 1, "data_parallel_size": 1}
    parallel |= {"pipeline_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **changed.get("parallel", {})}),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=changed.get("enable_sp", False))),
        speculative_config=changed.get("speculative_config"),
        kv_transfer_config=changed.get("kv_transfer_config"),
        model_config=SimpleNamespace(enforce_eager=changed.get("eager", False)),
        device_config=SimpleNamespace(device_type=changed.get("device", "cpu")),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=changed.get("fast", False)),
    )


def test_features_that_break_steering_are_named():
    check_features(features())
    cases = {
        "speculative decoding": {"speculative_config": object()},
        "kv_transfer_config": {"kv_transfer_config": object()},
        "enable_dbo": {"parallel": {"enable_dbo": True}},
        "enable_sp": {"enable_sp": True},
        "kv_sharing_fast_prefill": {"fast": True},
        "data parallelism": {"parallel": {"data_parallel_size": 2}},
        "enforce_eager on pipeline stages": {"parallel": {"pipeline_parallel_size": 2}, "eager": True},
    }
    for words, changed in cases.items():
        with pytest.raises(InputError, match=words):
            check_features(features(**changed))
    check_features(features(parallel={"pipeline_parallel_size": 2}))
    check_features(features(parallel={"pipeline_parallel_size": 2}, eager=True, device="cuda"))


# --- finding the stream -------------------------------------------------------------------------------------------


def stack(n):
    return nn.ModuleList([nn.Linear(4, 4) for _ in range(n)])


@pytest.mark.vllm
def test_layers_are_found_and_ambiguity_is_refused():
    assert len(find_layers(nn.ModuleDict({"layers": stack(3), "experts": stack(2)}), 3)) == 3
    nested = nn.ModuleDict({"layers": nn.ModuleList([stack(2), stack(2)])})
    assert find_layers(nested, 2) == list(nested["layers"])
    both = nn.ModuleDict({"vision": stack(3), "language_model": nn.ModuleDict({"layers": stack(3)})})
    assert find_layers(both, 3)[0] is both["language_model"]["layers"][0]
    layers = stack(3)
    twice = nn.ModuleDict({"layers": layers, "decoder": nn.ModuleDict({"layers": nn.ModuleList(layers)})})
    assert find_layers(twice, 3) == list(layers)  # as Gemma 4 has them
    with pytest.raises(HookPointError, match=r"2 lists of 3 layers .*With layers=\[\] it generates and scores"):
        find_layers(nn.ModuleDict({"a": stack(3), "b": stack(3)}), 3)
    with pytest.raises(HookPointError, match="0 lists of 5 layers"):
        find_layers(nn.ModuleDict({"a": stack(3)}), 5)


def test_the_rule_is_the_one_whose_norm_is_the_output():
    norm = nn.LayerNorm(4)
    h, r = torch.randn(2, 8, 4)
    cases = [(h, norm(h), "single"), ((h, r), norm(h + r), "sum"), ((h, r), norm(h), "first"), ((h,), norm(h), "first")]
    for output, result, rule in cases:
        assert _rule_of(_Seen({2: output}, {}, [(norm, None)], result), 2, "Made") == rule
        hidden, residual = stream_parts(output, rule)
        assert (hidden is h, residual is r) == (True, rule == "sum")
    with pytest.raises(HookPointError, match="In Made the stream"):
        _rule_of(_Seen({2: (h, r)}, {}, [(norm, None)], norm(2 * h - r)), 2, "Made")


def test_a_stream_that_changes_between_layers_is_refused():
    h, r = torch.randn(2, 8, 4)
    _check_handed_on(_Seen({0: (h, r), 1: (h, r)}, {1: [r, h]}), [0, 1], "sum", "Made")
    with pytest.raises(HookPointError, match="layer 1 does not get what layer 0 puts out"):
        _check_handed_on(_Seen({0: (h, r), 1: (h, r)}, {1: [2 * r, h]}), [0, 1], "sum", "Made")


@pytest.mark.vllm
def test_a_layer_may_write_into_its_inputs():
    """As fused norms do where nothing is compiled."""
    from steerlab.engines.vllm._worker.probe import _watched

    class Greedy(nn.Module):
        def forward(self, hidden, residual):
            residual += hidden
            hidden.mul_(0.5)
            return hidden.sin(), residual

    layers = nn.ModuleList([Greedy(), Greedy()])
    h, r = torch.randn(2, 8, 4)
    seen = _Seen()
    with _watched(layers, list(layers), seen):
        layers[1](*layers[0](h, r))
    _check_handed_on(seen, [0, 1], "sum", "Made")


def test_asking_for_the_engine_without_vllm_says_what_to_install():
    """In a process in which neither vLLM nor what comes with it can be imported."""
    code = (
        "import sys; sys.modules.update(vllm=None, psutil=None)\n"
        "import importlib.util; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'vllm' else real(name, *a)\n"
        "import steerlab.vllm\n"
        "try:\n    steerlab.vllm.VLLMEngine('smollm2-135m', layers=[1])\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("BackendMissingError The vLLM engine needs vLLM"), done.stderr
