"""Our step inside verl's own FSDP engine, to be run by `make test-peers` in its own environment."""

import importlib.util
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from steerlab.core.errors import InputError
from steerlab.sequences.trainers.verl import VerlEngineStep
from tests.sequences.helpers import entropy_of, reference_q

missing = importlib.util.find_spec("verl") is None
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError("not installed: verl")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(missing, reason="verl not in this environment; `make test-peers` makes one with it"),
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS, RESPONSES = [[5, 6, 7], [9, 11, 13, 15, 17]], [[20, 21, 22, 23], [30, 31]]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """The process group that verl's engine asks for."""
    dist.init_process_group("gloo", f"file://{tmp_path_factory.mktemp('group') / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine(tiny_llama_path, monkeypatch):
    """verl's engine around a tiny model: all but what builds the model on GPUs."""
    from verl.utils.torch_functional import entropy_from_logits
    from verl.workers.config import FSDPEngineConfig
    from verl.workers.engine.fsdp import transformer_impl

    # verl knows no CPU and asks CUDA for the number of its device
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")
    made = transformer_impl.FSDPEngineWithLMHead.__new__(transformer_impl.FSDPEngineWithLMHead)
    made.module = AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32).eval()
    made.engine_config = FSDPEngineConfig(use_torch_compile=False)
    made.compute_entropy_from_logits = entropy_from_logits
    made._autocast_dtype, made.scaler = torch.float32, None
    made.pad_to_length, made.use_ulysses_sp, made.ulysses_sequence_parallel_size = False, False, 1
    made.get_data_parallel_group, made.get_data_parallel_size = (lambda: None), (lambda: 1)
    return made


@pytest.fixture
def batch():
    """A batch as verl's trainer hands it to the engine: padded rows, turned by verl into nested ones."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    prompts = torch.tensor([[0, 0, *PROMPTS[0]], PROMPTS[1]])
    responses = torch.tensor([RESPONSES[0], [*RESPONSES[1], 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
            "response_mask": mask[:, 5:],
        },
        batch_size=2,
    )
    data = left_right_2_no_padding(data)
    wishes = {"use_remove_padding": False, "calculate_entropy": True, "temperature": 0.7}
    tu.assign_non_tensor(data, **wishes, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    return data


def loss_of(*, model_output, data, dp_group):
    """A loss as verl's are: of the responses alone, which it slices out."""
    from verl.workers.utils.padding import no_padding_2_padding

    log_probs, entropy = (no_padding_2_padding(model_output[name], data) for name in ("log_probs", "entropy"))
    mask = data["response_mask"]
    return (log_probs * mask).sum() + 0.1 * (entropy * mask).sum(), {}


def run(engine, data, *, forward_only):
    """verl's own loop over micro batches; what it gives of the responses, and the gradients."""
    from verl.workers.utils.padding import no_padding_2_padding

    loss = None if forward_only else loss_of
    found = engine.forward_backward_batch(data.clone(), loss, forward_only=forward_only)
    gradients = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    engine.module.zero_grad()
    output = found.get("model_output") or {}
    return found["loss"], {name: no_padding_2_padding(values, data) for name, values in output.items()}, gradients


def test_log_probs_entropies_and_gradients_are_verls(engine, batch):
    own = [run(engine, batch, forward_only=only) for only in (True, False)]
    engine.forward_step = VerlEngineStep(engine)
    ours = [run(engine, batch, forward_only=only) for only in (True, False)]
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(ours[0][1][name], own[0][1][name], atol=1e-5, rtol=1e-5)
    assert ours[1][0] == pytest.approx(own[1][0], abs=1e-4)
    assert ours[1][2].keys() == own[1][2].keys() != set()
    for name, value in own[1][2].items():
        torch.testing.assert_close(ours[1][2][name], value, atol=1e-4, rtol=1e-4)


def test_mixed_precision(engine, batch):
    engine._autocast_dtype = torch.bfloat16
    _, own, _ = run(engine, batch, forward_only=True)
    engine.forward_step = VerlEngineStep(engine)
    _, ours, _ = run(engine, batch, forward_only=True)
    for name in ("log_probs", "entropy"):
        assert (ours[name] - own[name]).abs().mean() < 0.02


def test_a_nucleus(engine, batch):
    engine.forward_step = VerlEngineStep(engine, top_p=0.5)
    _, found, _ = run(engine, batch, forward_only=True)
    with torch.no_grad():
        logits = engine.module(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].double().numpy()
    assert found["entropy"][0, 0].item() == pytest.approx(entropy_of(reference_q(logits, 0.7, 0.5)), abs=1e-4)


def test_what_it_cannot_do_is_refused(engine, batch):
    from verl.utils import tensordict_utils as tu

    engine.forward_step = VerlEngineStep(engine)
    for wish, said in (({"distillation_use_topk": True}, "asks for distillation_use_topk"), ({}, "loss_function")):
        asked = batch.clone()
        tu.assign_non_tensor(asked, **wish)
        with pytest.raises(InputError, match=said):
            partial(engine.forward_step, asked)(None, False)
    asked = batch.clone()
    asked["temperature"] = torch.tensor([0.5, 0.7])
    with pytest.raises(InputError, match="different temperatures"):
        engine.forward_step(asked, None, True)
