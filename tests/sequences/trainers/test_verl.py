import pytest
import torch

from steerlab.core.errors import InputError
from steerlab.sequences.trainers.verl import VerlStep
from tests.sequences.helpers import entropy_of, reference_q

PROMPTS = [[5, 6, 7], [9, 11, 13, 15, 17]]
RESPONSES = [[20, 21, 22, 23], [30, 31]]


@pytest.fixture
def micro_batch():
    """Two rows as verl pads them: prompts on the left, responses on the right."""
    prompts = torch.tensor([[0, 0, *PROMPTS[0]], PROMPTS[1]])
    responses = torch.tensor([RESPONSES[0], [*RESPONSES[1], 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    ids = torch.cat([prompts, responses], dim=1)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "responses": responses}


def reference(model, batch, temperature):
    """verl's own arithmetic: the whole model on the padded batch, logits over the temperature."""
    found = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    )
    length = batch["responses"].shape[1]
    log_p = (found.logits[:, -length - 1 : -1] / temperature).log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    return entropies, log_p.gather(-1, batch["responses"][..., None])[..., 0]


def test_the_step_gives_what_verl_gives(make_model, micro_batch):
    model = make_model()
    step = VerlStep(model)
    kept = micro_batch["attention_mask"][:, -4:].bool()
    for temperature in (1.0, 0.7):
        with torch.no_grad():
            entropies, log_probs = step(micro_batch, temperature, calculate_entropy=True)
            expected = reference(model, micro_batch, temperature)
        torch.testing.assert_close(entropies[kept], expected[0][kept], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(log_probs[kept], expected[1][kept], atol=1e-5, rtol=1e-5)
        assert (entropies[~kept] == 0).all()
        assert (log_probs[~kept] == 0).all()
        assert not log_probs.requires_grad
    assert step(micro_batch, 1.0)[0] is None


def test_gradients_are_those_of_the_plain_model(make_model, micro_batch):
    model = make_model()
    kept = micro_batch["attention_mask"][:, -4:].bool()
    parameters = [model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight]
    gradients = []
    for found in (VerlStep(model)(micro_batch, 0.8, True), reference(model, micro_batch, 0.8)):
        entropies, log_probs = found
        loss = (log_probs * kept).sum() + 0.1 * (entropies * kept).sum()
        gradients.append(torch.autograd.grad(loss, parameters))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_nucleus(make_model, micro_batch):
    model = make_model()
    entropies, _ = VerlStep(model, top_p=0.5)(micro_batch, 1.0, calculate_entropy=True)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].double().numpy()
    assert entropies[0, 0].item() == pytest.approx(entropy_of(reference_q(logits, 1.0, 0.5)), abs=1e-4)


def test_bad_batches_are_named(make_model, micro_batch):
    step = VerlStep(make_model())
    with pytest.raises(InputError, match="has images"):
        step(micro_batch | {"multi_modal_inputs": torch.zeros(2)}, 1.0)
    del micro_batch["responses"]
    with pytest.raises(InputError, match="no 'responses'"):
        step(micro_batch, 1.0)
