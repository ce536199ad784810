"""What is remembered about a model: outside the model, and gone with it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab._runtime import model_state
from steerlab._runtime.model_state import remembered, state_of
from tests.tiny_models import build_tiny_family

GREEDY = sl.SamplingPolicy.greedy()


def use(engine, *engines):
    """Every call that remembers something about the model."""
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=1), coef=1.0))
    for name in engines:
        engine.generate(["Hi", "Two plus"], plan=plan, policy=GREEDY, max_new_tokens=3, engine=name)
    engine.score(["Hi"], [[" you"]], plan=plan)
    engine.capture(["Hi"], layers="all", plan=plan)


def freed(reference):
    gc.collect()
    return reference() is None


def test_what_is_found_out_once_is_remembered():
    model, made = nn.Linear(2, 2), []
    assert [remembered(model, "size", lambda: made.append(1) or 4) for _ in range(3)] == [4, 4, 4]
    assert made == [1]
    assert state_of(model).lock is state_of(model).lock
    assert state_of(model) is not state_of(nn.Linear(2, 2))


def test_nothing_of_ours_is_in_the_model_or_its_copies(tiny_llama_path):
    with sl.load(tiny_llama_path, device="cpu") as engine:
        use(engine, "bridge", "fast")
        modules = (engine.model, *engine.model.original_model.modules())
        assert not [name for module in modules for name in module.__dict__ if "steerlab" in name]
        assert state_of(engine.model).known
        plain = nn.Linear(2, 2)
        remembered(plain, "size", lambda: 4)
        assert not state_of(copy.deepcopy(plain)).known


@pytest.mark.parametrize("engines", [("bridge", "fast"), ("graph",)])
def test_a_closed_model_is_freed(tiny_llama_path, engines):
    engine = sl.load(tiny_llama_path, device="cpu")
    use(engine, *engines)
    watched = [weakref.ref(m) for m in (engine.model, engine.model.original_model, engine.model.blocks[0])]
    weight = weakref.ref(engine.model.original_model.get_input_embeddings().weight)
    count = len(model_state._states)
    engine.close()
    assert all(map(freed, [*watched, weight]))
    assert len(model_state._states) < count


def test_a_model_whose_shortcuts_were_tried_is_freed(tmp_path):
    path = build_tiny_family(tmp_path / "bloom", "bloom")
    model = AutoModelForCausalLM.from_pretrained(path).eval()

    processor = sl.SequenceProcessor(
        model, AutoTokenizer.from_pretrained(path), config={"generation": {"max_new_tokens": 2}}
    )
    processor.generate_batched(["Hi"], 1, seed=0)
    assert any(name.startswith("growth") for name in state_of(model).known)
    watched = weakref.ref(model)
    del model, processor
    assert freed(watched)
