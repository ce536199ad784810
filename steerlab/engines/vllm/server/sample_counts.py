"""How many tokens each sample of a request has, from vLLM's outputs."""

from typing import Any


class SampleCounts:
    """Counts tokens per sample, whether outputs bring the new ones or all so far.

    Args:
        params: the request's sampling parameters.
    """

    def __init__(self, params: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._brings_new_ones = params.output_kind == RequestOutputKind.DELTA
        self._counts: dict[int, int] = {}

    def add(self, output: Any) -> None:
        """Takes in one of vLLM's RequestOutputs."""
        for sample in output.outputs:
            before = self._counts.get(sample.index, 0) if self._brings_new_ones else 0
            self._counts[sample.index] = before + len(sample.token_ids)

    def of(self, sample: int) -> int:
        """Tokens of a sample."""
        return self._counts.get(sample, 0)
