"""One call of `generate`: prompts and plans to requests, vLLM's outputs to completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from steerlab.core._not_finite_errors import failed_prompts
from steerlab.core._seeds import SeedLike, row_key
from steerlab.core._spelling import Continuation
from steerlab.core._stopping import before_stop
from steerlab.core._text import EncodedPrompt
from steerlab.core.errors import InputError, ReceiptError, SteerlabError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Completion, Generations
from steerlab.core.token_sets import TokenSets
from steerlab.engines.vllm._client.build_receipts import receipts_of
from steerlab.engines.vllm._client.position_runs import Row
from steerlab.engines.vllm._client.ready_plans import Planner, ReadyPlan
from steerlab.engines.vllm._client.requests import Outcome, Request
from steerlab.engines.vllm._client.sampling import must_measure_q, policy_arguments, request_seed, token_log_qs
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens
from steerlab.measures.nucleus import truncates
from steerlab.steering.positions._prompt_lookup import PromptContent


@dataclass(frozen=True)
class GenerationCall:
    """What one call asks for.

    Attributes:
        tokenizer: decodes; None leaves texts empty.
        policy: the sampling policy.
        max_new_tokens: tokens at most.
        n: samples per prompt.
        seed: as in `generate`.
        stop: strings that end a row.
        eos_ids: ids that end a row.
        log_probs: whether log-probs are wanted.
        cache_salt: the caller's own salt for the prefix cache.
        measures_q: whether the workers measure log q of sampled tokens where that takes the whole distribution.
        with_support: whether the set that every token was drawn from is wanted.
        d_vocab: number of logits.
    """

    tokenizer: Any
    policy: SamplingPolicy
    max_new_tokens: int
    n: int
    seed: SeedLike
    stop: tuple[str, ...]
    eos_ids: frozenset[int]
    log_probs: bool
    cache_salt: str | None
    measures_q: bool = False
    with_support: bool = False
    d_vocab: int = 0

    def __post_init__(self) -> None:
        if self.stop and self.tokenizer is None:
            raise InputError(
                "Stop strings need a tokenizer, and this engine was started with skip_tokenizer_init=True."
            )
        if self._asks_for_support and not self.measures_q:
            raise InputError("This engine was started with score_bytes=0, so it cannot say which sets it draws from.")

    def requests(
        self,
        encoded: Sequence[EncodedPrompt | SteerlabError],
        plans: Sequence[ReadyPlan | SteerlabError],
        planner: Planner,
    ) -> list[list[Request] | SteerlabError]:
        """Per prompt its n requests, or what is wrong with it."""
        found: list[list[Request] | SteerlabError] = []
        for index, (prompt, ready) in enumerate(zip(encoded, plans, strict=True)):
            wrong = next((part for part in (prompt, ready) if isinstance(part, SteerlabError)), None)
            if wrong is not None or isinstance(prompt, SteerlabError) or isinstance(ready, SteerlabError):
                found.append(wrong or InputError("unreachable"))
                continue
            content = PromptContent(index, len(encoded), prompt.token_ids, prompt.text, self.tokenizer)
            length = len(prompt.token_ids) + self.max_new_tokens
            try:
                groups = planner.positions(
                    ready.compiled, Row(prompt.token_ids, len(prompt.token_ids), length, content)
                )
            except SteerlabError as error:
                found.append(error)
                continue
            found.append(self._of_prompt(index, prompt, ready, groups))
        return found

    def _of_prompt(
        self, index: int, prompt: EncodedPrompt, ready: ReadyPlan, groups: tuple[Runs | RunsByTokens, ...]
    ) -> list[Request]:
        return [
            Request(
                prompt_index=index,
                row_index=index * self.n + sample,
                first_ids=prompt.token_ids,
                arguments=self._arguments,
                seed=None if self.policy.is_greedy else request_seed(row_key(self.seed, index, sample)),
                assigned=ready.assigned,
                compiled=ready.compiled,
                groups=groups,
                draw=self._asks_for_q or self._asks_for_support,
                support=self._asks_for_support,
                cache_salt=self.cache_salt,
            )
            for sample in range(self.n)
        ]

    @property
    def _asks_for_q(self) -> bool:
        return self.measures_q and self.log_probs and must_measure_q(self.policy)

    @property
    def _asks_for_support(self) -> bool:
        """Whether the workers must say; a greedy set is the token itself, and others may hold all tokens."""
        return self.with_support and truncates(self.policy) and not self.policy.is_greedy

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        """What vLLM is told of every request."""
        return {
            **policy_arguments(self.policy),
            "max_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "stop_token_ids": sorted(self.eos_ids),
            "ignore_eos": True,  # the ids above are the model's EOS ids, found as the other engine finds them
            "logprobs": 0 if self.log_probs else None,
            "detokenize": bool(self.stop),
        }

    def generations(
        self,
        encoded: Sequence[EncodedPrompt | SteerlabError],
        made: Sequence[list[Request] | SteerlabError],
        outcomes: Sequence[Outcome],
        errors: Mapping[int, SteerlabError],
        runner: str,
        dtype: str,
        *,
        must_run: bool,
    ) -> Generations:
        """The call's result.

        Args:
            encoded: the prompts.
            made: what `requests` made of them.
            outcomes: of these requests, in order; none if no token was wanted.
            errors: what was wrong with prompts that did not run.
            runner: what ran them.
            dtype: of the model.
            must_run: whether it is an error if no row has finite logits, without any plan.

        Raises:
            NonFiniteError: see `must_run`.
        """
        requests = [request for row in made if isinstance(row, list) for request in row][: len(outcomes)]
        completions = [self.completion(*row) for row in zip(requests, outcomes, strict=True)]
        lengths = [ran_tokens(*row) for row in zip(requests, outcomes, completions, strict=True)]
        receipts, inherited = receipts_of(requests, outcomes, lengths)
        steered = {request.prompt_index for request in requests if request.compiled is not None}
        failed = failed_prompts(completions, steered, dtype, must_run=must_run)
        by_row = {request.row_index: one for request, one in zip(requests, completions, strict=True)}
        rows = tuple(
            by_row.get(i * self.n + j) or self.empty(i, j, error=isinstance(row, SteerlabError))
            for i, row in enumerate(made)
            for j in range(self.n)
        )
        ids = tuple(() if isinstance(prompt, SteerlabError) else prompt.token_ids for prompt in encoded)
        return Generations(rows, ids, runner, receipts, {**errors, **failed}, inherited)

    def completion(self, request: Request, outcome: Outcome) -> Completion:
        """What vLLM sampled, in our terms."""
        (result,) = outcome.output.outputs
        ids = list(result.token_ids)
        text = "" if self.tokenizer is None else Continuation(self.tokenizer, request.first_ids).text(ids)
        reason = "length"
        if outcome.has_failed:
            reason = "error"
        elif ids and ids[-1] in self.eos_ids:
            reason = "eos"
        elif result.finish_reason == "stop":
            reason = "stop"
            text = before_stop(text, self.stop)
        log_probs = self._log_probs(result, ids)
        return Completion(
            text=text,
            token_ids=ids,
            finish_reason=reason,
            prompt_index=request.prompt_index,
            sample_index=request.row_index % self.n,
            token_log_probs=log_probs,
            token_log_qs=token_log_qs(self.policy, log_probs, self._measured(request, outcome, len(ids))),
            supports=self._supports(request, outcome, ids) if self.with_support else None,
        )

    def _supports(self, request: Request, outcome: Outcome, ids: Sequence[int]) -> TokenSets:
        """The set that each token was drawn from.

        Raises:
            ReceiptError: if one was not noted.
        """
        if self.policy.is_greedy:
            return TokenSets.singletons(ids, self.d_vocab)
        if not self._asks_for_support or not ids:
            return TokenSets.everything(len(ids), self.d_vocab)
        places = {position: place for place, position in enumerate(outcome.at.tolist())}
        wanted = range(request.n_tokens - 1, request.n_tokens - 1 + len(ids))
        if outcome.supports is None or not all(position in places for position in wanted):
            raise ReceiptError(
                f"Row {request.row_index}: vLLM's workers did not note the sets of all {len(ids)} sampled tokens. Pass "
                "with_support=False to go without."
            )
        return outcome.supports.take([places[position] for position in wanted])

    def _measured(self, request: Request, outcome: Outcome, count: int) -> list[float] | None:
        """Log q of a row's tokens: token k is drawn after position prompt length − 1 + k.

        Raises:
            ReceiptError: if one was not measured.
        """
        if not self._asks_for_q:
            return None
        found = dict(zip(outcome.at.tolist(), outcome.measured[0].tolist(), strict=True)) if len(outcome.at) else {}
        first = request.n_tokens - 1
        missing = [k for k in range(count) if first + k not in found]
        if missing:
            raise ReceiptError(
                f"Row {request.row_index}: log q was measured of {count - len(missing)} of {count} sampled tokens; "
                f"the first one missing is token {missing[0]}. Pass log_probs=False to go without."
            )
        return [found[first + k] for k in range(count)]

    def _log_probs(self, result: Any, ids: Sequence[int]) -> list[float]:
        if not self.log_probs:
            return [float("nan")] * len(ids)
        return [float(step[token].logprob) for token, step in zip(ids, result.logprobs, strict=True)]

    def empty(self, prompt_index: int, sample: int, *, error: bool) -> Completion:
        """A completion without tokens: of a prompt that could not run, or of a call for no tokens."""
        supports = TokenSets.everything(0, self.d_vocab) if self.with_support else None
        return Completion("", [], "error" if error else "length", prompt_index, sample, [], [], supports)


def ran_tokens(request: Request, outcome: Outcome, completion: Completion) -> int:
    """Tokens that the row's result rests on: the last sampled one drives nothing, or what it drove was not finite."""
    count = request.n_tokens + len(completion.token_ids)
    if completion.finish_reason == "error":
        return min(count, outcome.end)
    return max(request.n_tokens, count - 1)
