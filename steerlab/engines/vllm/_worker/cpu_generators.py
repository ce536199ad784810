"""Wraps `_prepare_inputs` and `sample_tokens` of the V1 runner's instance, on a CPU only.

When a prefill is cut into chunks, V1 samples a token for every chunk, throws it away and rewinds the request's
generator. A CPU generator cannot be rewound, so vLLM ends with "CPU Generator does not use offset" as soon as a
seeded request is chunked. Here the generators of such requests are put aside for that step, so they are never advanced.
"""

from typing import Any


def install(runner: Any) -> None:
    """Wraps the runner's instance."""
    prepare, sample = runner._prepare_inputs, runner.sample_tokens
    aside: dict[int, Any] = {}

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        batch = runner.input_batch
        thrown_away = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        for row in thrown_away.tolist():
            if row in batch.generators:
                aside[row] = batch.generators.pop(row)
        return result

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        try:
            return sample(*args, **kwargs)
        finally:
            runner.input_batch.generators.update(aside)
            aside.clear()

    runner._prepare_inputs = prepare_inputs
    runner.sample_tokens = sample_tokens
