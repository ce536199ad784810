"""Steering inside vLLM: what users call, under one short name.

Examples:
    >>> from steerlab.vllm import RepControl, VLLMEngine  # doctest: +SKIP
"""

from steerlab.engines.vllm import RepControl, SequenceProb, VLLMEngine, vllm_config

__all__ = ["RepControl", "SequenceProb", "VLLMEngine", "vllm_config"]
