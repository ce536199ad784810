"""One call of `score`: prompt and target are submitted as one prompt, and vLLM says what it thought of every token."""

from collections.abc import Sequence
from typing import Any

from steerlab.core.errors import SteerlabError
from steerlab.core.results import Score
from steerlab.core.text import EncodedPair, EncodedPrompt
from steerlab.engines.vllm.encoding import raise_error
from steerlab.engines.vllm.planning import Planner, Ready
from steerlab.engines.vllm.requests import Outcome, Request
from steerlab.engines.vllm.targeting import Row
from steerlab.steering.content import PromptContent

Pair = tuple[int, int, EncodedPrompt, EncodedPair]

ARGUMENTS = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}


def score_requests(
    pairs: Sequence[Pair], plans: Sequence[Ready | SteerlabError], planner: Planner, tokenizer: Any
) -> list[Request]:
    """A request per pair. The target's tokens count as generated, and the last of them drives nothing.

    Raises:
        PlanError: for a plan that cannot run here.
    """
    return [
        _request(row, pair, raise_error(plans[pair[0]]), planner, len(plans), tokenizer)
        for row, pair in enumerate(pairs)
    ]


def _request(row: int, pair: Pair, ready: Ready, planner: Planner, n_prompts: int, tokenizer: Any) -> Request:
    index, _, prompt, ids = pair
    assigned, compiled = ready
    tokens = (*ids.context_ids, *ids.target_ids)
    content = PromptContent(index, n_prompts, prompt.token_ids, prompt.text, tokenizer)
    known = Row(tokens, len(ids.context_ids), len(tokens) - 1, content)
    return Request(
        prompt_index=index,
        row_index=row,
        token_ids=tokens,
        arguments=ARGUMENTS,
        assigned=assigned,
        compiled=compiled,
        groups=planner.positions(compiled, known),
    )


def score_of(pair: Pair, outcome: Outcome) -> Score:
    """The log-probability of every target token.

    Raises:
        SteerlabError: if vLLM left one out.
    """
    index, target, _, ids = pair
    start = len(ids.context_ids)
    given = outcome.output.prompt_logprobs
    tokens = (*ids.context_ids, *ids.target_ids)
    if given is None or len(given) != len(tokens):
        raise SteerlabError(f"vLLM returned no log-probs for target {target} of prompt {index}.")
    found = tuple(float(given[place][tokens[place]].logprob) for place in range(start, len(tokens)))
    return Score(index, target, ids.target_ids, found, ids.boundary)
