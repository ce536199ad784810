"""The exact probability of target sequences inside vLLM, as plain dictionaries."""

import math
from collections.abc import Sequence
from typing import Any

from steerlab.core._arguments import explains_arguments
from steerlab.core._numbers import as_list
from steerlab.core._text import Boundary, PromptLike, TargetLike, as_prompts, is_target
from steerlab.core.errors import TargetError
from steerlab.core.results import Score
from steerlab.engines.vllm.engine import VLLMEngine, check_vllm_engine
from steerlab.steering._plan_assignment import PlanArgument


class SequenceProb:
    """Log-probabilities of given sequences after prompts, steered or not.

    Every value is exact: all tokens of a sequence are scored by the model's own softmax in float32, whatever their
    rank. A sequence with and one without a leading space are different strings with different tokens; `variants` asks
    for both, and both are returned.

    Args:
        engine: a `VLLMEngine`, or a `vllm.LLM` that was started with `additional_config=sl.vllm_config(layers=[…])`.

    Examples:
        >>> SequenceProb(engine).get_log_prob(["The capital of France is"], [" Paris", " Rome"])  # doctest: +SKIP
    """

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = check_vllm_engine(engine, "SequenceProb")

    @explains_arguments
    def get_log_prob(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        target_sequences: Sequence[Any],
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        variants: Sequence[str] = ("",),
    ) -> list[dict[str, Any]]:
        """The probability of every sequence after every prompt.

        Args:
            prompts: a prompt or several.
            target_sequences: a list of strings (or lists of ids), scored after every prompt; or a list of such lists,
                one per prompt.
            plan: a plan, None, or a list with one per prompt.
            boundary: `joint` encodes prompt and sequence together, `separate` each alone.
            variants: strings put before each sequence; each result is reported on its own.

        Returns:
            A dictionary per prompt, sequence and variant, in that order: `sequence` as it was scored, `log_prob` in
            nats (sum over its tokens), `prob` = exp(log_prob), `perplexity` = exp(−log_prob / num_tokens),
            `num_tokens`, `boundary` (`merged` if the tokenizer joined prompt and sequence across the cut).

        Raises:
            TargetError: for sequences that are not lists of strings or ids, or variants of ids.
        """
        given = as_prompts(prompts)
        rows = [[_with(v, t) for t in row for v in variants] for row in _per_prompt(target_sequences, len(given))]
        scores = self.engine.score(given, rows, plan=plan, boundary=boundary)
        return [_entry(score, rows[score.prompt_index][score.target_index]) for score in scores]


def _per_prompt(target_sequences: Sequence[Any], n_prompts: int) -> list[list[TargetLike]]:
    listed = as_list(target_sequences, ordered=True)
    if listed is None:
        raise TargetError(
            f"target_sequences is a list of strings or one list per prompt, got {target_sequences!r:.80}."
        )
    target_sequences = listed
    if all(is_target(target) for target in target_sequences):
        return [list(target_sequences)] * n_prompts
    if len(target_sequences) != n_prompts:
        raise TargetError(
            f"There are {n_prompts} prompts and {len(target_sequences)} lists of sequences; pass one list per prompt, "
            "or one list of strings for all of them."
        )
    for index, row in enumerate(target_sequences):
        if as_list(row) is None:
            raise TargetError(f"Prompt {index} has {row!r:.80} where a list of sequences belongs, as the others have.")
    return [as_list(row) or [] for row in target_sequences]


def _with(variant: str, target: TargetLike) -> TargetLike:
    if not variant:
        return target
    if not isinstance(target, str):
        raise TargetError(f"The variant {variant!r} cannot be put before token ids {list(target)[:8]}; pass text.")
    return variant + target


def _entry(score: Score, sequence: TargetLike) -> dict[str, Any]:
    return {
        "sequence": sequence,
        "log_prob": score.log_prob,
        "prob": math.exp(score.log_prob),
        "perplexity": score.perplexity,
        "num_tokens": score.num_tokens,
        "boundary": score.boundary,
    }
