from types import SimpleNamespace

import numpy as np
import pytest
import torch

from steerlab.core.errors import VectorFileError
from steerlab.steering.formats.steering_vectors import export_steering_vectors, import_steering_vectors
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector, VectorSet


def theirs(activations, kind="decoder_block"):
    return SimpleNamespace(layer_activations=activations, layer_type=kind)


def vector(layer=3, site="resid_post"):
    return SteeringVector.from_tensor(torch.arange(4.0), layer=layer, site=site)


@pytest.mark.parametrize(
    ("kind", "site"), [("decoder_block", "resid_post"), ("self_attn", "attn_out"), ("mlp", "mlp_out")]
)
def test_layer_types_are_sites(kind, site):
    vectors = VectorSet.from_steering_vectors(theirs({0: torch.ones(4), 5: torch.zeros(4)}, kind))
    assert [v.hook_point.name for v in vectors.by_layer] == [f"blocks.0.hook_{site}", f"blocks.5.hook_{site}"]
    back = vectors.to_steering_vectors()
    assert back["layer_type"] == kind
    assert {layer: row.tolist() for layer, row in back["layer_activations"].items()} == {0: [1.0] * 4, 5: [0.0] * 4}


def test_values_are_copies():
    row = torch.ones(4, dtype=torch.bfloat16)
    vectors = import_steering_vectors(theirs({1: row}))
    row.zero_()
    assert vectors[1].values.tolist() == [1.0] * 4
    export_steering_vectors(vectors)["layer_activations"][1].zero_()
    assert vectors[1].values.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "given",
    [
        theirs({1: torch.ones(4)}, "input_layernorm"),
        theirs({1: torch.ones(4)}, "post_attention_layernorm"),
        theirs({1: torch.ones(4)}, None),
        theirs({}),
        theirs([torch.ones(4)]),
        theirs({-1: torch.ones(4)}),
        theirs({"1": torch.ones(4)}),
        theirs({True: torch.ones(4)}),
        theirs({1: ["a", "b"]}),
        theirs({1: torch.ones(4, dtype=torch.int32)}),
        theirs({1: torch.ones(2, 4)}),
        theirs({1: torch.tensor([1.0, float("inf")])}),
        theirs({1: torch.ones(4), 2: torch.ones(5)}),
        {"layer_activations": {1: torch.ones(4)}, "layer_type": "decoder_block"},
        3,
    ],
)
def test_what_is_no_such_object_is_refused(given):
    with pytest.raises(VectorFileError):
        import_steering_vectors(given)


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid"])
def test_sites_without_a_layer_type_are_refused(site):
    with pytest.raises(VectorFileError, match=f"no layer type for blocks.3.hook_{site}"):
        VectorSet((vector(site=site),)).to_steering_vectors()


@pytest.mark.usefixtures("unchecked_types")
def test_a_plan_is_no_vector_set():
    for given in (Plan(add(vector(), coef=1.0)), VectorSet(())):
        with pytest.raises(VectorFileError, match="pass a vector set"):
            export_steering_vectors(given)


@pytest.mark.parametrize(
    "values", [torch.arange(4.0)[None], np.arange(4.0), np.arange(4.0)[None, None], [0.0, 1.0, 2.0, 3.0]]
)
def test_rows_as_other_tools_keep_them(values):
    assert import_steering_vectors(theirs({np.int64(3): values}))[3].values.tolist() == [0.0, 1.0, 2.0, 3.0]
