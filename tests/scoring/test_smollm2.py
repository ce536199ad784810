"""The real model on real prose against a sliding-window computation of its own."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.shipped import reference_text

pytestmark = pytest.mark.slow

CONTEXT = 128


@pytest.fixture(scope="module")
def plain_model(smollm2_path):
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()


def independent(model, ids, stride):
    """Perplexity by plain Hugging Face: a mask of which tokens of each window count, and the model's own loss."""
    total, counted, seen = 0.0, 0, 1
    while seen < len(ids):
        stop = min(len(ids), CONTEXT if seen == 1 else seen + min(stride, CONTEXT - 1))
        window = torch.tensor([ids[max(0, stop - CONTEXT) : stop]])
        labels = window.clone()
        labels[:, : window.shape[1] - (stop - seen)] = -100
        with torch.no_grad():
            loss = model(window, labels=labels).loss
        total += loss.item() * (stop - seen)
        counted += stop - seen
        seen = stop
    return math.exp(total / counted), counted


@pytest.mark.parametrize("stride", [CONTEXT, CONTEXT // 2])
def test_perplexity_of_shipped_prose(lens_engine, plain_model, stride):
    ids = lens_engine.tokenizer(reference_text())["input_ids"][:260]
    wanted, counted = independent(plain_model, ids, stride)
    found = sl.perplexity(lens_engine, ids, context_length=CONTEXT, stride=stride)
    assert found.num_tokens == counted == len(ids) - 1
    assert found.perplexity == pytest.approx(wanted, rel=1e-4)
    assert 5 < wanted < 60
