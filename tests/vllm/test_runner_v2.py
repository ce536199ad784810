"""Model Runner V2 runs on GPUs only; what it is wrapped with to report rows that are not finite runs here."""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from steerlab.measures.log_probs import rows_not_finite

pytestmark = pytest.mark.vllm

NAN, INF = float("nan"), float("inf")
ROWS = [[0.0, 1.0, 2.0], [NAN, 1.0, 2.0], [0.0, INF, NAN], [-INF, 1.0, -INF], [-INF] * 3, [0.0, INF, 1.0]]


@pytest.fixture
def reported(monkeypatch):
    """Runs one step: what vLLM's own output says of its rows, and the tokens."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    module: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler")

    from steerlab.engines.vllm._worker import runner_v2

    for owner, name in ((AsyncOutput, "get_output"), (module, "get_num_nans")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards

    def step(logits, drawn):
        sampler = SimpleNamespace(sample=lambda given, *rest: (torch.tensor(drawn), given), compute_nans=False)
        runner_v2._count_failed(sampler)
        runner_v2._count_failed(SimpleNamespace(sample=sampler.sample))  # a second engine of this process
        num_nans = module.get_num_nans(logits) if sampler.compute_nans else None
        tokens, _ = sampler.sample(logits)
        output: Any = AsyncOutput.__new__(AsyncOutput)
        output.copy_event = SimpleNamespace(synchronize=lambda: None)
        output.num_nans = np.asarray(num_nans)
        output.sampled_token_ids = tokens.view(-1, 1).numpy()
        output.num_sampled_tokens_np = np.ones(len(tokens), dtype=np.int64)
        output.model_runner_output = SimpleNamespace(
            req_ids=[f"{i}" for i in range(len(tokens))], num_nans_in_logits=None
        )
        for name in ("logprobs_tensors", "sampling_mask_tensors", "pending_aux_output", "_has_fault"):
            setattr(output, name, None)
        output.prompt_logprobs_dict = output.prompt_token_id_logprobs_dict = {}
        return output.get_output()

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vllm_is_told_which_rows_fail(reported, dtype):
    logits = torch.tensor(ROWS, dtype=dtype)
    counts = reported(logits, [2] * len(ROWS)).num_nans_in_logits
    assert [bool(counts[f"{i}"]) for i in range(len(ROWS))] == rows_not_finite(logits).tolist()
    assert list(counts.values()) == [0, 1, 1, 0, 1, 1]


def test_where_no_row_fails_nothing_is_reported(reported):
    assert reported(torch.tensor([ROWS[0], ROWS[3]]), [2, 1]).num_nans_in_logits is None


def test_a_token_beyond_the_vocabulary_is_replaced_by_one_of_it(reported):
    found = reported(torch.tensor(ROWS[:3]), [1, 3, -1])
    assert found.sampled_token_ids == [[1], [2], [0]]
