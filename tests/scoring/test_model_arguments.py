"""Plans and engines by the arguments that other packages' command lines pass on."""

import json

import pytest

import steerlab as sl
from steerlab.engines._wired_points import wiring_for
from steerlab.scoring._model_arguments import engine_of, take_plan


def vector(layer=1, site="resid_post"):
    return sl.SteeringVector.from_tensor([1.0, 2.0, 3.0], layer=layer, site=site)


PLAN = sl.Plan(sl.add(vector(), dose=0.2), sl.ablate(vector(3, "attn_out")))


def test_a_plan_in_a_file_or_as_json(tmp_path):
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    for source in (str(tmp_path / "plan.json"), tmp_path / "plan.json", json.loads(PLAN.to_json())):
        arguments = {"plan": source, "dtype": "float32"}
        assert take_plan(arguments) == PLAN
        assert arguments == {"dtype": "float32"}
        assert take_plan({"plan": source, "scale": 0.5}) == PLAN.scaled(0.5)
    assert take_plan({"dtype": "float32", "vector": None}) is None


def test_an_addition_of_a_vector_in_a_file(tmp_path):
    sl.VectorSet((vector(1), vector(2))).save(tmp_path / "v.safetensors")
    stated = {"vector": str(tmp_path / "v.safetensors"), "layer": 2, "coef": 3.0, "where": "all"}
    assert take_plan(stated) == sl.Plan(sl.add(vector(2), coef=3.0, where=sl.where.all()))
    with pytest.raises(sl.InputError, match="holds vectors for the layers 1, 2; set layer"):
        take_plan({"vector": str(tmp_path / "v.safetensors"), "coef": 3.0})
    with pytest.raises(sl.InputError, match="where='Where' names no positions; those with a name are default, all"):
        take_plan({"vector": str(tmp_path / "v.safetensors"), "layer": 2, "coef": 3.0, "where": "Where"})


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"dose": 0.2}, "The argument dose needs vector=FILE"),
        ({"scale": 2}, "The argument scale needs plan=FILE"),
        ({"plan": "p.json", "dose": 0.2}, r"dose needs vector=FILE.*, and there is plan=\."),
        ({"vector": "v", "scale": 0.2}, r"scale needs plan=FILE, and there is vector=\."),
        ({"plan": "nowhere.json"}, "cannot read 'nowhere.json'"),
        ({"plan": {"format": 1, "edits": []}, "scale": "much"}, "scale is a number, got 'much'"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, wanted):
    with pytest.raises(sl.InputError, match=wanted):
        take_plan(arguments)


def test_what_vllm_is_started_with():
    read = sl.when(vector(5, "mlp_out"), above=0.0)
    plan = PLAN + sl.Plan(sl.add(vector(3, "resid_pre"), coef=1.0, when=read))
    assert wiring_for(plan) == {"layers": [1, 2, 3, 5], "sites": ["resid_post", "attn_out", "mlp_out"]}
    assert wiring_for(None) == {"layers": []}
    with pytest.raises(sl.PlanError, match="cannot be reached inside vLLM"):
        wiring_for(sl.Plan(sl.add(vector(0, "resid_pre"), coef=1.0)))
    with pytest.raises(sl.InputError, match="engine is lens or vllm, got engine='tpu'"):
        engine_of("smollm2-135m", None, {"engine": "tpu"})
