"""Drawing responses from the user's own model, and reading in what an engine has drawn."""

import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from steerlab._runtime.autocast import without_autocast
from steerlab._runtime.decoding import Decoding, RowOutput, StopRules, eos_token_ids
from steerlab._runtime.evaluation import evaluating
from steerlab._runtime.growth import fresh_rows
from steerlab._runtime.jobs import GenerationJob, generation_jobs, ran_tokens
from steerlab._runtime.model_parts import ModelParts
from steerlab.core._not_finite_errors import not_finite
from steerlab.core._numbers import as_integer, shown
from steerlab.core._progress import progress
from steerlab.core._seeds import SeedLike, check_seed
from steerlab.core._spelling import Continuation
from steerlab.core._stopping import find_stop
from steerlab.core._text import EncodedPrompt, PromptLike, as_prompts, encode_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import ContextLengthError, InputError
from steerlab.core.receipts import Receipt
from steerlab.core.results import Completion
from steerlab.core.token_sets import TokenSets
from steerlab.sequences._plan_resolver import PlanResolver, apply_plan
from steerlab.sequences._sharded_head import whole_logits
from steerlab.sequences.config import GenerationConfig
from steerlab.sequences.types import BatchedSequences
from steerlab.steering._plan_assignment import AssignedPlan, PlanArgument, group_by_plan
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._prompt_lookup import PromptContent


@dataclass(frozen=True)
class SampledRow:
    """What one response holds, in arrays: lists of numbers would take twenty times the memory.

    Attributes:
        token_ids: the ids, as C integers.
        finish_reason: why it ended.
        log_qs: log q of each, nats.
        supports: what each was drawn from; None if unknown.
    """

    token_ids: "array.array[int]"
    finish_reason: str
    log_qs: Float[np.ndarray, " tokens"]
    supports: TokenSets | None

    @classmethod
    def of(cls, row: RowOutput | Completion) -> "SampledRow":
        """A row of a decoding loop or of an engine."""
        log_qs = np.array(row.token_log_qs, dtype=np.float32)
        return cls(array.array("i", row.token_ids), row.finish_reason, log_qs, row.supports)


@dataclass(frozen=True)
class SamplingRequest:
    """The arguments of one call; see `SequenceProcessor.generate_batched`.

    Attributes:
        n: responses per prompt.
        rows_at_once: rows per batch.
        seed: one integer, or one per prompt.
        stop: strings that end a response.
        plan: a plan, None, or a list with one per prompt.
        chat: take strings as user turns of a chat.
        with_support: record the set that each token was drawn from; None does where that is possible.
    """

    n: int
    rows_at_once: int
    seed: SeedLike
    stop: tuple[str, ...]
    plan: PlanArgument = None
    chat: bool = False
    with_support: bool | None = None


@dataclass(frozen=True)
class Sampler:
    """Draws responses: from the plain model, with a cache and left-padded prompts, or through an engine.

    Attributes:
        parts: the model's parts.
        resolver: its layers, for plans.
        tokenizer: the model's own tokenizer.
        config: policy and length.
    """

    parts: ModelParts
    resolver: PlanResolver
    tokenizer: Any
    config: GenerationConfig

    def run(
        self, prompts: Any, request: SamplingRequest, engine: Engine | None
    ) -> tuple[BatchedSequences, list[Receipt]]:
        """Draws every response; receipts are in order of rows."""
        self.parts.check_head()
        given = as_prompts(prompts)
        request = replace(request, seed=check_seed(request.seed, len(given)))
        encoded = encode_prompts(self.parts, self.tokenizer, given, self.config.max_new_tokens, request.chat)
        ids = [prompt.token_ids for prompt in encoded]
        if engine is None:
            rows, receipts = self._from_model(encoded, request)
        else:
            rows, receipts = self._from_engine(engine, ids, request)
        return self._sequences(given, ids, rows, request), receipts

    def _from_engine(
        self, engine: Engine, ids: Sequence[tuple[int, ...]], request: SamplingRequest
    ) -> tuple[list[SampledRow], list[Receipt]]:
        if request.with_support and not engine.traits.gives_supports:
            raise InputError(
                f"The engine {engine.info.name} ({engine.traits.backend}) does not say which sets it draws from; pass "
                "with_support=False, and score with support='recomputed'."
            )
        with_support = engine.traits.gives_supports and request.with_support is not False
        options: dict[str, Any] = {"with_support": True} if with_support else {}
        generations = engine.generate(
            [list(row) for row in ids],
            plan=request.plan,
            policy=self.config.policy,
            max_new_tokens=self.config.max_new_tokens,
            n=request.n,
            seed=request.seed,
            stop=request.stop,
            **options,
        )
        failed = [c for c in generations if c.finish_reason == "error"]
        if failed:
            what = f"The logits of prompt {failed[0].prompt_index}, sample {failed[0].sample_index}"
            raise not_finite(what, engine.info.dtype, steered=request.plan is not None)
        return list(map(SampledRow.of, generations)), list(generations.receipts)

    def _from_model(
        self, encoded: Sequence[EncodedPrompt], request: SamplingRequest
    ) -> tuple[list[SampledRow], list[Receipt]]:
        if self.parts.is_sharded:
            raise InputError(
                "A model sharded by fully_shard cannot draw responses here: the processes would have to make equally "
                "many steps. Draw through an engine with the same weights (engine=), and score on the sharded model."
            )
        rules = rules_of(self.parts, self.tokenizer, request.stop, self.config.max_new_tokens)
        jobs = generation_jobs(
            [prompt.token_ids for prompt in encoded], request.n, request.seed, self.config.max_new_tokens
        )
        contents = [
            PromptContent(index, len(encoded), prompt.token_ids, prompt.text, self.tokenizer)
            for index, prompt in enumerate(encoded)
        ]
        outputs: dict[int, SampledRow] = {}
        receipts: list[Receipt] = []
        with progress(len(jobs), "generate") as bar:
            for assigned, members in group_by_plan(self.resolver.assign(request.plan, len(encoded))):
                wanted = set(members)
                mine = [job for job in jobs if job.prompt_index in wanted]
                for start in range(0, len(mine), request.rows_at_once):
                    batch = mine[start : start + request.rows_at_once]
                    looked_at = [contents[job.prompt_index] for job in batch]
                    made, edited = self._batch(batch, looked_at, assigned, rules, request.with_support is not False)
                    outputs |= zip([job.row_index for job in batch], map(SampledRow.of, made), strict=True)
                    receipts += edited
                    bar.update(len(batch))
        self._check_finite(jobs, outputs, steered=request.plan is not None)
        return [outputs[job.row_index] for job in jobs], sorted(receipts, key=lambda receipt: receipt.row_index)

    def _check_finite(self, jobs: Sequence[GenerationJob], outputs: dict[int, SampledRow], *, steered: bool) -> None:
        failed = next((job for job in jobs if outputs[job.row_index].finish_reason == "error"), None)
        if failed is not None:
            what = f"The logits of prompt {failed.prompt_index}, sample {failed.sample_index},"
            raise not_finite(what, self.parts.head.weight.dtype, steered=steered)

    @torch.inference_mode()
    def _batch(
        self,
        jobs: Sequence[GenerationJob],
        contents: Sequence[PromptContent],
        assigned: AssignedPlan,
        rules: StopRules,
        with_support: bool,
    ) -> tuple[list[RowOutput], list[Receipt]]:
        run = PlanRun(assigned.plan, len(jobs), contents)
        keys = torch.from_numpy(np.stack([job.keys for job in jobs]))
        prompts = [job.prompt for job in jobs]
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.parts.root))
            stack.enter_context(without_autocast(self.parts.device.type))
            stack.enter_context(whole_logits(self.parts.head))
            rows = fresh_rows(self.parts.causal, run, list(map(len, prompts)), "step")
            decoding = Decoding(
                rows, prompts, self.config.policy, keys, rules, self.tokenizer, with_support=with_support
            )
            if len(run.plan):
                stack.enter_context(apply_plan(self.resolver.layers, run))
            outputs = decoding.run()
        if rules.max_new_tokens == 0:
            return outputs, []
        receipts = run.receipts(
            token_ids=[ran_tokens(job, output) for job, output in zip(jobs, outputs, strict=True)],
            prompt_lens=[len(job.prompt) for job in jobs],
            prompt_indices=[job.prompt_index for job in jobs],
            row_indices=[job.row_index for job in jobs],
            plan_hash=assigned.given_hash,
        )
        return outputs, receipts

    def _sequences(
        self,
        given: Sequence[PromptLike],
        ids: Sequence[Sequence[int]],
        rows: Sequence[SampledRow],
        request: SamplingRequest,
    ) -> BatchedSequences:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        pad = getattr(self.tokenizer, "eos_token_id", None) if pad is None else pad
        nested = [rows[start : start + request.n] for start in range(0, len(rows), request.n)]
        return BatchedSequences.from_ids(
            ids,
            [[row.token_ids for row in group] for group in nested],
            pad_id=pad if isinstance(pad, int) else 0,
            responses_text=[
                [text_of(self.tokenizer, prompt, row.token_ids, request.stop) for row in group]
                for prompt, group in zip(ids, nested, strict=True)
            ],
            finish_reasons=[[row.finish_reason for row in group] for group in nested],
            sampler_logqs=[[row.log_qs for row in group] for group in nested],
            prompts=list(given),
            supports=_supports(nested),
            policy=self.config.policy,
        )


def _supports(nested: Sequence[Sequence[SampledRow]]) -> list[list[TokenSets]] | None:
    """What every token was drawn from; None unless all rows say."""
    found = [[row.supports for row in group if row.supports is not None] for group in nested]
    return found if all(len(sets) == len(group) for sets, group in zip(found, nested, strict=True)) else None


def single_seed(seed: Any) -> int:
    """The seed, or for None one from torch's global generator.

    Raises:
        InputError: for anything else than an integer ≥ 0, a list of seeds included.
    """
    if seed is None:
        return int(torch.randint(0, 2**31 - 1, ()).item())
    found = as_integer(seed)
    if found is None or found < 0:
        raise InputError(
            f"seed is one integer ≥ 0 here, got {shown(seed)}. A list with one seed per prompt is for calls that get "
            "the prompts too: generate_batched, and generate_with_logprobs with prompts=."
        )
    return found


def encode_prompts(
    parts: ModelParts, tokenizer: Any, prompts: Any, max_new_tokens: int, chat: bool
) -> list[EncodedPrompt]:
    """Ids of every prompt.

    Raises:
        PromptError: for a prompt that cannot run.
        ContextLengthError: if a prompt and its new tokens exceed the context.
    """
    texts: dict[str, EncodedPrompt] = {}  # draws with replacement hold few prompts many times
    encoded = []
    for prompt in as_prompts(prompts):
        found = texts.get(prompt) if isinstance(prompt, str) else None
        found = found or encode_prompt(tokenizer, prompt, chat=chat, d_vocab=parts.d_vocab)
        if isinstance(prompt, str):
            texts[prompt] = found
        encoded.append(found)
    limit = parts.context_length
    for index, prompt in enumerate(encoded):
        length = len(prompt.token_ids) + max_new_tokens
        if limit is not None and length > limit:
            raise ContextLengthError(
                f"Prompt {index}: prompt and new tokens came to {length} tokens, {length - limit} more than the "
                f"context of {limit}. Shorten it, or lower max_new_tokens; nothing is cut silently."
            )
    return encoded


def rules_of(parts: ModelParts, tokenizer: Any, strings: tuple[str, ...], max_new_tokens: int) -> StopRules:
    """When rows end: any EOS id that model or tokenizer name, a stop string, or the length.

    Raises:
        InputError: for an empty stop string.
    """
    if not all(strings):
        raise InputError("A stop string is empty; it would end every row at once.")
    return StopRules(eos_token_ids(parts.causal, tokenizer), strings, max_new_tokens)


def text_of(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], stop: Sequence[str]) -> str:
    """A response's text after its prompt, special tokens left out, up to the end of its first stop string."""
    text = Continuation(tokenizer, prompt).text(ids)
    start = find_stop(text, stop)
    if start is None:
        return text
    ended = [start + len(string) for string in stop if text.startswith(string, start)]
    return text[: min(ended)]
