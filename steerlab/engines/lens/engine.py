"""LensEngine: generate, score and capture on a TransformerBridge."""

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from steerlab.core.batching import batches_by_tokens
from steerlab.core.engine import DEFAULT_POLICY, ModelInfo
from steerlab.core.errors import ContextLengthError, InputError, PlanError, TargetError
from steerlab.core.hook_points import HookPoint, check_site, resolve_layer, resolve_layers
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Activations, Completion, Generations, Score, Scores, check_pool
from steerlab.core.seeds import SeedLike, check_seed, row_key, uniforms
from steerlab.core.shipped import reference_text
from steerlab.core.text import (
    Boundary,
    EncodedPair,
    EncodedPrompt,
    PromptLike,
    TargetLike,
    as_prompts,
    as_targets,
    encode_pair,
    encode_prompt,
    is_single_prompt,
)
from steerlab.engines.lens.capturing import Capture, plan_hooks
from steerlab.engines.lens.generation import RowOutput, StopRules, decode, find_stop, generate_rows
from steerlab.engines.lens.hooking import attached
from steerlab.engines.lens.info import describe_model, eos_token_ids
from steerlab.engines.lens.rows import Rows, left_padded
from steerlab.engines.lens.teacher_forcing import Budget, ForcedPair, Measures, TeacherForcing
from steerlab.measures.log_probs import chosen_log_probs
from steerlab.steering.assign import AssignedPlan, PlanArgument, assign_plans, group_by_plan
from steerlab.steering.receipts import Receipt
from steerlab.steering.run import PlanRun
from steerlab.steering.where import RowPositions, Where
from steerlab.steering.where import all as all_positions
from steerlab.steering.where import index as index_positions

REFERENCE_WINDOW = 256


class LensEngine:
    """The Engine protocol on a TransformerBridge; make one with `steerlab.load`.

    Attributes:
        model: the TransformerBridge, for whatever this class does not cover.
        tokenizer: the model's own tokenizer.
        receipts: what the last call's plans edited, one per row of its result.
        batch_tokens: tokens per forward pass, padding included; lower it if memory is short.

    Args:
        model: a TransformerBridge.
        tokenizer: the model's tokenizer as Hugging Face loads it. (TransformerLens changes the one it is given: it
            makes it add a BOS that the model was not trained with.)
        name: the name to record in results.
        path: directory of the weights, if they came from one.
        revision: hub revision, if there is one.
        batch_tokens: tokens per forward pass.

    Raises:
        InputError: if there is no tokenizer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str | None = None,
        path: Any = None,
        revision: str | None = None,
        batch_tokens: int = 4096,
    ) -> None:
        if tokenizer is None:
            raise InputError("The model has no tokenizer; pass one, so that prompts can be text.")
        self.model: Any = model
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.receipts: list[Receipt] = []
        self._name, self._path, self._revision = name, path, revision
        self._info: ModelInfo | None = None
        self._median_norms: dict[HookPoint, float] = {}

    def __enter__(self) -> "LensEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LensEngine({self.info.name!r}, {self.info.n_layers} layers, {self.info.dtype})"

    @property
    def info(self) -> ModelInfo:
        """The model that runs."""
        if self._info is None:
            self._info = describe_model(self.model, self._name, self._path, self._revision)
        return self._info

    def close(self) -> None:
        """Frees the model. The engine cannot be used afterwards."""
        self.model = None
        self._median_norms.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        plan: PlanArgument = None,
        policy: SamplingPolicy = DEFAULT_POLICY,
        max_new_tokens: int = 64,
        n: int = 1,
        seed: SeedLike = 0,
        stop: Sequence[str] | str = (),
        chat: bool = False,
    ) -> Generations:
        """Samples n continuations of each prompt, with a cache; the plan is active at every step.

        Args:
            prompts: strings, chat messages or token ids.
            plan: a plan, None, or a list with one per prompt.
            policy: the sampling policy.
            max_new_tokens: tokens at most; 0 returns empty completions.
            n: samples per prompt.
            seed: an integer, whose draws are keyed by (seed, prompt, sample); or one integer per prompt, keyed by
                (seed, sample), so that a prompt draws the same in any batch.
            stop: strings that end a row as soon as its text contains one; the text is cut before it.
            chat: take strings as user turns of a chat.

        Raises:
            ContextLengthError: if a prompt and its new tokens exceed the context.
            PromptError, PlanError, VectorShapeError, HookPointError: for input that cannot be used.
        """
        encoded = self._encode(prompts, chat)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise InputError(f"max_new_tokens is an integer ≥ 0, got {max_new_tokens!r}.")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"n is an integer ≥ 1, got {n!r}.")
        check_seed(seed, len(encoded))
        self._check_lengths([len(p.token_ids) + max_new_tokens for p in encoded], "prompt and new tokens")
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(strings):
            raise InputError("A stop string is empty; it would end every row at once.")
        rules = StopRules(eos_token_ids(self.model.original_model, self.tokenizer), strings, max_new_tokens)
        jobs = [(i, g) for i in range(len(encoded)) for g in range(n)]
        done: dict[tuple[int, int], RowOutput] = {}
        receipts: dict[tuple[int, int], Receipt] = {}
        with _progress(len(jobs), "generate") as bar:
            for assigned, members in group_by_plan(self._assign(plan, len(encoded))):
                mine = [job for job in jobs if job[0] in set(members)]
                lengths = [len(encoded[i].token_ids) + max_new_tokens for i, _ in mine]
                for batch in batches_by_tokens(lengths, self.batch_tokens):
                    chosen = [mine[k] for k in batch]
                    draws = [uniforms(row_key(seed, *job), max_new_tokens) for job in chosen]
                    outputs, made = self._generate_batch(encoded, chosen, assigned, policy, np.stack(draws), rules, n)
                    done.update(zip(chosen, outputs, strict=True))
                    receipts.update(zip(chosen, made, strict=True))
                    bar.update(len(chosen))
        self.receipts = [receipts[job] for job in jobs]
        return Generations(
            tuple(self._completion(job, done[job], strings) for job in jobs), tuple(p.token_ids for p in encoded)
        )

    def _generate_batch(
        self,
        encoded: list[EncodedPrompt],
        jobs: list[tuple[int, int]],
        assigned: AssignedPlan,
        policy: SamplingPolicy,
        draws: np.ndarray,
        rules: StopRules,
        n: int,
    ) -> tuple[list[RowOutput], list[Receipt]]:
        ids = [encoded[i].token_ids for i, _ in jobs]
        lens = [len(row) for row in ids]
        run = PlanRun(assigned.plan, len(ids))
        rows = Rows(self.model.original_model, run, lens)
        hooks = plan_hooks(run) if rules.max_new_tokens else []
        with attached(self.model, hooks):
            outputs = generate_rows(rows, ids, policy, torch.from_numpy(draws), rules, self.tokenizer)
        run_lengths = [
            length + len(out.token_ids) - 1 if out.token_ids else 0 for length, out in zip(lens, outputs, strict=True)
        ]
        receipts = run.receipts(
            lengths=run_lengths,
            prompt_lens=lens,
            prompt_indices=[i for i, _ in jobs],
            row_indices=[i * n + g for i, g in jobs],
            plan_hash=assigned.given_hash,
        )
        return outputs, receipts

    def _completion(self, job: tuple[int, int], output: RowOutput, strings: tuple[str, ...]) -> Completion:
        text = decode(self.tokenizer, output.token_ids)
        cut = find_stop(text, strings)
        assert output.finish_reason is not None
        return Completion(
            text=text if cut is None else text[:cut],
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            prompt_index=job[0],
            sample_index=job[1],
            token_log_probs=output.token_log_probs,
            token_log_qs=output.token_log_qs,
        )

    def score(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Any],
        *,
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        score_eos: bool = False,
        chat: bool = False,
    ) -> Scores:
        """The exact log-probability of every target after its prompt, in nats.

        Targets of one prompt share the prompt's forward pass. A target's tokens count as generated, so a plan edits the
        positions it would edit while generating them.

        Args:
            prompts: strings, chat messages or token ids.
            targets: one list of strings (or lists of ids) per prompt.
            plan: a plan, None, or a list with one per prompt.
            boundary: `joint` encodes prompt and target together, `separate` each alone.
            score_eos: score the tokenizer's EOS after each target too.
            chat: take strings as user turns of a chat.

        Raises:
            TargetError: for an empty target, or one that gives no token.
            ContextLengthError: if a prompt and its target exceed the context; nothing is cut.
        """
        pairs = self._encode_pairs(prompts, targets, boundary, score_eos, chat)
        values = self._force(pairs, plan, {"log_prob": chosen_log_probs})
        return Scores(
            tuple(
                Score(i, j, pair.target_ids, tuple(values[row]["log_prob"].tolist()), pair.boundary)
                for row, (i, j, pair) in enumerate(pairs)
            )
        )

    def measure(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Any],
        measures: Measures,
        *,
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        chat: bool = False,
    ) -> list[dict[str, np.ndarray]]:
        """Your own quantities of every target token's prediction, teacher-forced as in `score`.

        Args:
            prompts: as in `score`.
            targets: as in `score`.
            measures: named functions of (logits [tokens, d_vocab], token ids [tokens]) → [tokens].
            plan: as in `score`.
            boundary: as in `score`.
            chat: as in `score`.

        Returns:
            Per (prompt, target), in order: name → float64 array [target tokens].
        """
        pairs = self._encode_pairs(prompts, targets, boundary, False, chat)
        return self._force(pairs, plan, measures)

    @torch.no_grad()
    def _force(
        self, pairs: list[tuple[int, int, EncodedPair]], plan: PlanArgument, measures: Measures
    ) -> list[dict[str, np.ndarray]]:
        n_prompts = 1 + max(i for i, _, _ in pairs)
        forced = [ForcedPair(p.context_ids, p.target_ids, i, row) for row, (i, _, p) in enumerate(pairs)]
        values: dict[int, dict[str, list[float]]] = {}
        receipts: list[Receipt] = []
        with _progress(len(pairs), "score") as bar:
            for assigned, members in group_by_plan(self._assign(plan, n_prompts)):
                task = TeacherForcing(
                    self.model, assigned, measures, Budget(self.batch_tokens), self.info.d_vocab, bar.update
                )
                wanted = set(members)
                task.run([pair for pair in forced if pair.prompt_index in wanted])
                values.update(task.values)
                receipts += task.receipts
        self.receipts = sorted(receipts, key=lambda receipt: receipt.row_index)
        return [{name: np.array(found) for name, found in values[row].items()} for row in range(len(pairs))]

    @torch.no_grad()
    def logits(self, prompt: PromptLike, *, plan: PlanArgument = None, chat: bool = False) -> Tensor:
        """Logits at every position of one prompt, shape [pos, d_vocab], in the model's dtype."""
        encoded = self._encode([prompt] if not isinstance(prompt, str) else prompt, chat)
        assigned = self._assign(plan, 1)[0]
        length = len(encoded[0].token_ids)
        run = PlanRun(assigned.plan, 1)
        rows = Rows(self.model.original_model, run, [length])
        with attached(self.model, plan_hooks(run)):
            logits = rows.extend(*left_padded([encoded[0].token_ids]))
        self.receipts = run.receipts(
            lengths=[length], prompt_lens=[length], prompt_indices=[0], row_indices=[0], plan_hash=assigned.given_hash
        )
        return logits[0]

    @torch.no_grad()
    def capture(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        layers: Any,
        site: str = "resid_post",
        where: Where | None = None,
        pool: str | None = None,
        plan: PlanArgument = None,
        chat: bool = False,
    ) -> Activations:
        """Activations at chosen layers and positions, float32 on the CPU; with a plan, as they are after its edits.

        Args:
            prompts: strings, chat messages or token ids; every token counts as prompt.
            layers: "all", an index, or several; negative ones count from the end.
            site: `resid_pre`, `resid_mid`, `resid_post`, `attn_out` or `mlp_out`.
            where: the positions; all by default.
            pool: `mean` or `last` over a prompt's positions, or None to keep each.
            plan: a plan, None, or a list with one per prompt.
            chat: take strings as user turns of a chat.

        Raises:
            InputError: if `where` selects nothing in a prompt, so that nothing can be read there.
        """
        encoded = self._encode(prompts, chat)
        self._check_lengths([len(p.token_ids) for p in encoded], "prompt")
        points = [HookPoint(layer, check_site(site)) for layer in resolve_layers(layers, self.info.n_layers)]
        check_pool(pool)
        chosen = all_positions() if where is None else where
        positions = [_positions(chosen, len(p.token_ids), i) for i, p in enumerate(encoded)]
        values: dict[HookPoint, dict[int, Tensor]] = {point: {} for point in points}
        receipts: list[Receipt] = []
        with _progress(len(encoded), "capture") as bar:
            for assigned, members in group_by_plan(self._assign(plan, len(encoded))):
                lengths = [len(encoded[i].token_ids) for i in members]
                for batch in batches_by_tokens(lengths, self.batch_tokens):
                    indices = [members[k] for k in batch]
                    capture = Capture(points, chosen, pool)
                    receipts += self._capture_batch(encoded, indices, assigned, capture)
                    for point in points:
                        values[point].update(zip(indices, capture.values[point], strict=True))
                    bar.update(len(indices))
        self.receipts = sorted(receipts, key=lambda receipt: receipt.row_index)
        join = torch.cat if pool is None else torch.stack
        return Activations(
            site=site,
            layers=tuple(point.layer for point in points),
            values=tuple(join([values[point][i] for i in range(len(encoded))]) for point in points),
            positions=tuple(positions),
            pool=pool,
            prompt_token_ids=tuple(p.token_ids for p in encoded),
        )

    def _capture_batch(
        self, encoded: list[EncodedPrompt], indices: list[int], assigned: AssignedPlan, capture: Capture
    ) -> list[Receipt]:
        ids = [encoded[i].token_ids for i in indices]
        lens = [len(row) for row in ids]
        run = PlanRun(assigned.plan, len(ids))
        rows = Rows(self.model.original_model, run, lens)
        capture.begin(RowPositions.of_rows(lens, lens))
        with attached(self.model, plan_hooks(run) + capture.hooks()):
            rows.extend(*left_padded(ids), keep=1)
        return run.receipts(
            lengths=lens, prompt_lens=lens, prompt_indices=indices, row_indices=indices, plan_hash=assigned.given_hash
        )

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """Median norm of the stream at a hook point, over the shipped reference text, position 0 left out.

        The text runs unsteered in windows of at most 256 tokens; each window's first token is left out. This is the
        unit of a dose.
        """
        point = HookPoint(resolve_layer(layer, self.info.n_layers), site)
        if point not in self._median_norms:
            self._measure_norms(site)
        return self._median_norms[point]

    def _measure_norms(self, site: str) -> None:
        ids = encode_prompt(self.tokenizer, reference_text(), d_vocab=self.info.d_vocab).token_ids
        width = min(REFERENCE_WINDOW, self.info.context_length)
        windows = [list(ids[start : start + width]) for start in range(0, len(ids), width)]
        receipts = self.receipts
        found = self.capture([w for w in windows if len(w) > 1], layers="all", site=site, where=~index_positions(0))
        self.receipts = receipts
        for layer in found.layers:
            self._median_norms[HookPoint(layer, site)] = float(found[layer].norm(dim=-1).median())

    def _assign(self, plan: PlanArgument, n_prompts: int) -> list[AssignedPlan]:
        return assign_plans(plan, n_prompts, self.info, self.median_norm)

    def _encode(self, prompts: Sequence[PromptLike] | PromptLike, chat: bool) -> list[EncodedPrompt]:
        found = as_prompts(prompts)
        encoded = [encode_prompt(self.tokenizer, p, chat=chat, d_vocab=self.info.d_vocab) for p in found]
        self._check_lengths([len(p.token_ids) for p in encoded], "prompt")
        return encoded

    def _encode_pairs(
        self, prompts: Any, targets: Sequence[Any], boundary: Boundary, score_eos: bool, chat: bool
    ) -> list[tuple[int, int, EncodedPair]]:
        found = as_prompts(prompts)
        single = is_single_prompt(prompts)
        encoded = self._encode(found, chat)
        rows = as_targets(targets, len(encoded), single)
        pairs = [
            (i, j, self._encode_pair(prompt, target, boundary, score_eos))
            for i, (prompt, row) in enumerate(zip(encoded, rows, strict=True))
            for j, target in enumerate(row)
        ]
        self._check_lengths([len(p.context_ids) + len(p.target_ids) for _, _, p in pairs], "prompt and target")
        return pairs

    def _encode_pair(self, prompt: EncodedPrompt, target: TargetLike, boundary: Boundary, eos: bool) -> EncodedPair:
        pair = encode_pair(self.tokenizer, prompt, target, boundary=boundary, d_vocab=self.info.d_vocab)
        if not eos:
            return pair
        if self.tokenizer.eos_token_id is None:
            raise TargetError("score_eos=True needs an EOS token, and this tokenizer has none.")
        return EncodedPair(pair.context_ids, (*pair.target_ids, self.tokenizer.eos_token_id), pair.boundary)

    def _check_lengths(self, lengths: Sequence[int], what: str) -> None:
        limit = self.info.context_length
        for index, length in enumerate(lengths):
            if length > limit:
                raise ContextLengthError(
                    f"Row {index}: {what} need {length} tokens, {length - limit} more than the context of {limit}. "
                    "Shorten it; nothing is cut silently."
                )


def _positions(where: Where, length: int, index: int) -> tuple[int, ...]:
    if not isinstance(where, Where):
        raise PlanError(f"where takes positions such as sl.where.last_prompt(), got {where!r}.")
    chosen = where.resolve(RowPositions.of_rows([length], [length]))[0].nonzero()[:, 0].tolist()
    if not chosen:
        raise InputError(f"{where} selects no token in prompt {index} of {length} tokens; nothing can be read there.")
    return tuple(chosen)


def _progress(total: int, what: str) -> Any:
    """A bar on a terminal or in a notebook, once the work has taken two seconds."""
    return tqdm(total=total, desc=what, delay=2.0, leave=False, disable=None)
