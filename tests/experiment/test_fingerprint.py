from dataclasses import replace

import pytest

import steerlab as sl
from steerlab.experiment._store.fingerprint import Fingerprint, engine_versions, expected_device, numeric_options


@pytest.fixture
def fingerprint(tiny_llama_engine: sl.LensEngine) -> Fingerprint:
    return Fingerprint.of(tiny_llama_engine, {})


def test_it_says_what_runs(fingerprint: Fingerprint, tiny_llama_engine: sl.LensEngine) -> None:
    assert (fingerprint.backend, fingerprint.device) == ("lens", "cpu")
    assert fingerprint.info == tiny_llama_engine.info
    assert {"steerlab", "torch", "transformers", "transformer-lens"} == set(fingerprint.versions)
    assert "transformer-lens" not in engine_versions("vllm")


def test_it_survives_json(fingerprint: Fingerprint) -> None:
    again = Fingerprint.from_json(fingerprint.to_json())
    assert again == fingerprint
    assert again.hash == fingerprint.hash


def test_names_do_not_matter_and_what_computes_does(fingerprint: Fingerprint) -> None:
    def with_info(**changes: object) -> Fingerprint:
        return replace(fingerprint, info=replace(fingerprint.info, **changes))

    assert with_info(name="other", revision="r").hash == fingerprint.hash
    others = [
        with_info(weights_hash="w"),
        with_info(dtype="bfloat16"),
        with_info(weight_processing="compatibility_mode"),
        with_info(context_length=8),
        replace(fingerprint, backend="vllm"),
        replace(fingerprint, device="cuda"),
        replace(fingerprint, versions={"torch": "1.0"}),
        replace(fingerprint, options={"quantization": "fp8"}),
    ]
    assert len({other.hash for other in [fingerprint, *others]}) == len(others) + 1


def test_options_that_only_change_speed_are_left_out() -> None:
    given = {"layers": [1], "gpu_memory_utilization": 0.5, "quantization": "fp8", "tensor_parallel_size": 2}
    assert numeric_options(given) == {"quantization": "fp8", "tensor_parallel_size": "2"}


def test_the_device_a_model_would_load_onto() -> None:
    assert expected_device({"device": "cuda:1"}) == "cuda"
    assert expected_device({"device": "cpu"}) == "cpu"
