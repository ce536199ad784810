"""LensEngine: generate, score and capture on a TransformerBridge."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from steerlab._runtime.capturing import HookPair, plan_hooks, whole_prompt_hooks
from steerlab._runtime.contexts import Budget
from steerlab._runtime.differentiable import DifferentiableScores
from steerlab._runtime.encoding import Encoder
from steerlab._runtime.growth import fresh_rows
from steerlab._runtime.jobs import generation_jobs
from steerlab._runtime.reference_norm import reference_windows
from steerlab._runtime.rows import left_padded
from steerlab._runtime.shared_beginnings import run_together
from steerlab._runtime.teacher_forcing import ForcedPair, Measures, TeacherForcing
from steerlab.core._arguments import explains_arguments
from steerlab.core._batching import batches_by_tokens
from steerlab.core._hook_points import HookPoint, read_point, resolve_layer, resolve_layers
from steerlab.core._not_finite_errors import failed_prompts, not_finite
from steerlab.core._numbers import as_integer, check_flag, check_integer, shown
from steerlab.core._progress import progress
from steerlab.core._seeds import SeedLike, check_seed, check_single_seed
from steerlab.core._stopping import stop_strings
from steerlab.core._text import Boundary, EncodedPair, PromptLike
from steerlab.core.engine import DEFAULT_POLICY, EngineTraits, ModelInfo, engine_pieces
from steerlab.core.errors import InputError, NonFiniteError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt, Receipts, warn_if_idle
from steerlab.core.results import Activations, Generations, Measured, Score, Scores, check_pool
from steerlab.display import Piece, Shown
from steerlab.engines.lens._backends import BridgedCall, BridgedModel, embedding_device, exact_backend, plain_model
from steerlab.engines.lens._capture_task import CaptureTask
from steerlab.engines.lens._generating import GenerationTask, stop_rules
from steerlab.engines.lens._heads import head_outputs
from steerlab.engines.lens._info import describe_model
from steerlab.measures.log_probs import chosen_log_probs, rows_not_finite
from steerlab.measures.quantities import check_named
from steerlab.steering._plan_assignment import AssignedPlan, PlanArgument, assign_plans, group_by_plan
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan
from steerlab.steering.positions._by_tokens import on_model
from steerlab.steering.positions._prompt_lookup import PromptContent
from steerlab.steering.positions.where import Where, WhereLike, as_where
from steerlab.steering.positions.where import all as all_positions
from steerlab.steering.positions.where import index as index_positions
from steerlab.steering.top_tokens import check_streams

GREEDY = SamplingPolicy.greedy()

_Result = TypeVar("_Result", Generations, Scores, Measured, Activations)


class LensEngine(Shown):
    """The Engine protocol on a TransformerBridge; make one with `steerlab.load`.

    Attributes:
        model: the TransformerBridge, for whatever this class does not cover.
        tokenizer: the model's own tokenizer.
        receipts: what the last call's plans edited, one per row of its result.
        errors: by index, the prompts of the last `generate` with a row whose logits were not finite.
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
        self.batch_tokens = check_integer(batch_tokens, "batch_tokens", least=1)
        self.receipts: Sequence[Receipt] = Receipts()
        self.errors: dict[int, NonFiniteError] = {}
        self._name, self._path, self._revision = name, path, revision
        self._given: Any = None  # the model in memory that this engine was made from, if it was
        self._info: ModelInfo | None = None
        self._median_norms: dict[HookPoint, float] = {}

    def __enter__(self) -> "LensEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finding(self) -> str:
        if self.model is None:
            return "closed"
        return f"{self.info.name!r}, {self.info.n_layers} layers, {self.info.dtype}"

    def _pieces(self) -> Sequence[Piece]:
        return [] if self.model is None else engine_pieces(self.info, self.traits, self.receipts)

    @property
    def info(self) -> ModelInfo:
        """The model that runs."""
        if self._info is None:
            self._info = describe_model(self.model, self._name, self._path, self._revision, self._given)
        return self._info

    @property
    def traits(self) -> EngineTraits:
        """How this engine differs from others."""
        device = next(self.model.parameters()).device.type
        layers = tuple(range(self.info.n_layers))
        return EngineTraits("lens", device, layers, takes_functions=True, gives_supports=True)

    def plain_model(self) -> Any:
        """The Hugging Face model without hook points, on this engine's weights: the same tensors, nothing copied.

        Its modules are its own, so that hooks and modes of one do not affect the other; an optimiser's step on one
        changes both.

        Raises:
            InputError: if the bridge computes something else than the plain model.
        """
        if self.model is None:
            raise InputError("This engine is closed; load the model again.")
        return plain_model(self.model)

    def close(self) -> None:
        """Frees the model. The engine cannot be used afterwards."""
        self.model = self._given = None
        self._median_norms.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @explains_arguments
    @torch.inference_mode()
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
        batch_size: int | str = "auto",
        engine: str = "auto",
        with_support: bool = False,
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
            batch_size: rows per batch; "auto" fills batches up to `batch_tokens`. The order of results is the same.
            engine: how the model runs: `bridge` with every hook point, `fast` with those of the stream and of sublayer
                outputs, `graph` and `compiled` by a program, see the page on generation; `auto` is `graph` on a
                GPU, steered or not, else `fast`, where that is possible.
            with_support: also record the set of tokens that each token was drawn from, in `completion.supports`.

        Raises:
            ContextLengthError: if a prompt and its new tokens exceed the context.
            NonFiniteError: if no row's logits are finite without any plan, as in float16 on a model made for bfloat16.
                A single row whose logits are not ends with the finish reason `error`, which `errors` explains, and no
                other row changes.
            PromptError, PlanError, VectorShapeError, HookPointError: for input that cannot be used.
        """
        max_new_tokens = check_integer(max_new_tokens, "max_new_tokens", least=0)
        encoded = self._encoder.prompts(prompts, chat, max_new_tokens)
        seed = check_seed(seed, len(encoded))
        strings = stop_strings(stop)
        task = GenerationTask(
            bridge=self.model,
            tokenizer=self.tokenizer,
            policy=policy,
            rules=stop_rules(self.model, self.tokenizer, strings, max_new_tokens),
            engine=engine,
            contents=self._encoder.contents(encoded),
            with_support=check_flag(with_support, "with_support"),
        )
        jobs = generation_jobs([p.token_ids for p in encoded], n, seed, max_new_tokens)
        each = len(jobs) // len(encoded)
        plans = self._assign(plan, len(encoded))
        with progress(len(jobs), "generate") as bar:
            for assigned, members in group_by_plan(plans):
                mine = [job for index in members for job in jobs[index * each : (index + 1) * each]]
                for batch in _batches([len(j.prompt) + max_new_tokens for j in mine], batch_size, self.batch_tokens):
                    task.run([mine[k] for k in batch], assigned)
                    bar.update(len(batch))
        completions = tuple(task.completion(job) for job in jobs)
        steered = {index for index, assigned in enumerate(plans) if len(assigned.plan)}
        self.errors = failed_prompts(completions, steered, self.info.dtype)
        receipts = tuple(task.receipts[job.row_index] for job in jobs)
        ids = tuple(p.token_ids for p in encoded)
        made = Generations(completions, ids, task.engine_used, receipts=receipts, errors=self.errors)
        return self._noted(made, warn=max_new_tokens > 0)  # with 0, nothing ran, so nothing was edited

    @explains_arguments
    @torch.inference_mode()
    def stream(
        self,
        prompt: PromptLike,
        *,
        plan: Plan | None = None,
        policy: SamplingPolicy = DEFAULT_POLICY,
        max_new_tokens: int = 64,
        seed: int = 0,
        stop: Sequence[str] | str = (),
        chat: bool = False,
        engine: str = "auto",
    ) -> Iterator[str]:
        """Continues one prompt, yielding text as it comes: complete characters only, nothing of a stop string.

        The pieces joined are the text that `generate` gives with the same arguments. `receipts` is set when the stream
        ends.

        Args:
            prompt: a string, chat messages or token ids.
            plan: a plan, or None.
            policy: the sampling policy.
            max_new_tokens: tokens at most.
            seed: of the draws.
            stop: strings that end the text.
            chat: take a string as a user turn of a chat.
            engine: as in `generate`.
        """
        max_new_tokens = check_integer(max_new_tokens, "max_new_tokens", least=0)
        encoded = self._encoder.prompts([prompt] if not isinstance(prompt, str) else prompt, chat, max_new_tokens)
        seed = check_single_seed(seed)
        strings = stop_strings(stop)
        rules = stop_rules(self.model, self.tokenizer, strings, max_new_tokens)
        task = GenerationTask(self.model, self.tokenizer, policy, rules, engine, self._encoder.contents(encoded))
        (job,) = generation_jobs([encoded[0].token_ids], 1, seed, max_new_tokens)
        yield from task.stream(job, self._assign(plan, 1)[0])
        self.receipts = Receipts([task.receipts[0]])

    @explains_arguments
    def score(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Any],
        *,
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        variants: Sequence[str] = ("",),
        score_eos: bool = False,
        chat: bool = False,
    ) -> Scores:
        """The exact log-probability of every target after its prompt, in nats.

        Targets of one prompt share the prompt's forward pass. A target's tokens count as generated, so a plan edits the
        positions it would edit while generating them.

        Args:
            prompts: strings, chat messages or token ids.
            targets: one list of strings (or lists of ids) per prompt.
            plan: a plan, None, or a list with one per prompt. Plans in a list that are given the same prompts share
                what none of them edits, by default all but a prompt's last token: it runs once.
            boundary: `joint` encodes prompt and target together, `separate` each alone.
            variants: prefixes; each makes a separate string of every target, e.g. ("", " ") scores "Paris" and
                " Paris". Scores are in order of prompt, target, variant.
            score_eos: score the tokenizer's EOS after each target too.
            chat: take strings as user turns of a chat.

        Raises:
            TargetError: for an empty target, one that gives no token, or a variant of a target given as ids.
            ContextLengthError: if a prompt and its target exceed the context; nothing is cut.
        """
        pairs, contents = self._encoder.pairs(
            prompts, targets, boundary=boundary, variants=variants, score_eos=score_eos, chat=chat
        )
        values = self._force(pairs, contents, plan, {"log_prob": chosen_log_probs})
        rows = tuple(
            Score.of_pair(i, j, pair, found["log_prob"].tolist())
            for (i, j, pair), found in zip(pairs, values, strict=True)
        )
        return self._noted(Scores(rows, self.info.dtype, receipts=values.receipts))

    @explains_arguments
    def measure(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Any],
        measures: Measures,
        *,
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        chat: bool = False,
    ) -> Measured:
        """Your own quantities of every target token's prediction, teacher-forced as in `score`.

        Args:
            prompts: as in `score`.
            targets: as in `score`.
            measures: named functions of (logits [tokens, d_vocab], token ids [tokens]) → [tokens], or several numbers
                per token, [tokens, values], e.g. a whole distribution.
            plan: as in `score`.
            boundary: as in `score`.
            chat: as in `score`.

        Returns:
            Per (prompt, target), in order: name → float64 array [target tokens], or float32 [target tokens, values].
            All arrays of a call are held at once: 0.2 MB a token for a vocabulary of 49,152.

        Raises:
            InputError: for a measure that returns another shape, or what is no dictionary of functions.
        """
        check_named(measures)
        pairs, contents = self._encoder.pairs(prompts, targets, boundary=boundary, chat=chat)
        return self._noted(self._force(pairs, contents, plan, measures))

    @torch.no_grad()
    def _force(
        self,
        pairs: list[tuple[int, int, EncodedPair]],
        contents: Sequence[PromptContent],
        plan: PlanArgument,
        measures: Measures,
    ) -> Measured:
        by_prompt: dict[int, list[ForcedPair]] = {}
        for row, (i, _, p) in enumerate(pairs):
            by_prompt.setdefault(i, []).append(ForcedPair(p.context_ids, p.target_ids, i, row))
        values: dict[int, dict[str, np.ndarray]] = {}
        receipts: list[Receipt] = []
        model, budget = BridgedCall(self.model), Budget(self.batch_tokens)
        with progress(len(pairs), "score") as bar:
            tasks = [
                (
                    TeacherForcing(model, assigned, measures, budget, self.info.d_vocab, bar.update, contents),
                    [pair for member in members for pair in by_prompt.get(member, ())],
                )
                for assigned, members in group_by_plan(self._assign(plan, len(contents)))
            ]
            if isinstance(plan, list | tuple):
                run_together(tasks)
            else:
                for task, its_pairs in tasks:
                    task.run(its_pairs)
        for task, _ in tasks:
            values.update(task.values)
            receipts += task.receipts
        in_order = sorted(receipts, key=lambda receipt: receipt.row_index)
        return Measured([values[row] for row in range(len(pairs))], in_order)

    @explains_arguments
    @torch.no_grad()
    def logits(self, prompt: PromptLike, *, plan: PlanArgument = None, chat: bool = False) -> Tensor:
        """Logits at every position of one prompt, shape [pos, d_vocab], in the model's dtype."""
        encoded = self._encoder.prompts([prompt] if not isinstance(prompt, str) else prompt, chat)
        assigned = self._assign(plan, 1)[0]
        token_ids = encoded[0].token_ids
        run = PlanRun(assigned.plan, 1, self._encoder.contents(encoded))
        backend = exact_backend(self.model, plan_hooks(run))
        rows = fresh_rows(backend.model, run, [len(token_ids)], "step")
        with backend.attached(plan_hooks(run)):
            logits = rows.extend(*left_padded([token_ids]))
        self.receipts = Receipts(
            run.receipts(
                token_ids=[token_ids],
                prompt_lens=[len(token_ids)],
                prompt_indices=[0],
                row_indices=[0],
                plan_hash=assigned.given_hash,
            )
        )
        if bool(rows_not_finite(logits[0]).any()):
            raise not_finite("The logits of the prompt", logits.dtype, steered=bool(len(assigned.plan)))
        return logits[0]

    def added_vector_scores(
        self, prompts: Any, targets: Sequence[Any], point: HookPoint, where: Where, *, chat: bool = False
    ) -> DifferentiableScores:
        """Scores as in `score`, differentiable in what is added at a hook point; rows in order of pairs."""
        pairs, contents = self._encoder.pairs(prompts, targets, chat=chat)
        rows = [(pair, contents[i]) for i, _, pair in pairs]
        model, known = BridgedModel(self.model), on_model(where, self.tokenizer, self.info)
        return DifferentiableScores(model, rows, point.check(self.info.n_layers), known, self.batch_tokens)

    @explains_arguments
    @torch.no_grad()
    def capture(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        layers: Any,
        site: str = "resid_post",
        where: WhereLike = None,
        pool: str | None = None,
        plan: PlanArgument = None,
        chat: bool = False,
        max_new_tokens: int = 0,
        policy: SamplingPolicy = GREEDY,
        seed: SeedLike = 0,
    ) -> Activations:
        """Activations at chosen layers and positions, float32 on the CPU; with a plan, as they are after its edits.

        Args:
            prompts: strings, chat messages or token ids.
            layers: "all", an index, or several; negative ones count from the end.
            site: `resid_pre`, `resid_mid`, `resid_post`, `attn_out` or `mlp_out`; or `z`, what each attention head puts
                out before W_O, with values shaped [..., head, d_head].
            where: the positions; all by default.
            pool: `mean` or `last` over a prompt's positions, or None to keep each.
            plan: a plan, None, or a list with one per prompt.
            chat: take strings as user turns of a chat.
            max_new_tokens: with more than 0, generates and reads in the same passes; generated tokens have positions
                from the prompt's length on, and the last one, which drives nothing, is never read.
            policy: the sampling policy of that generation; greedy by default.
            seed: as in `generate`.

        Raises:
            InputError: if `where` selects nothing in a row, so that nothing can be read there.
        """
        return self._noted(self._capture(prompts, layers, site, where, pool, plan, chat, max_new_tokens, policy, seed))

    @torch.no_grad()
    def _capture(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        layers: Any,
        site: str,
        where: WhereLike,
        pool: str | None = None,
        plan: PlanArgument = None,
        chat: bool = False,
        max_new_tokens: int = 0,
        policy: SamplingPolicy = GREEDY,
        seed: SeedLike = 0,
    ) -> Activations:
        max_new_tokens = check_integer(max_new_tokens, "max_new_tokens", least=0)
        encoded = self._encoder.prompts(prompts, chat, max_new_tokens)
        seed = check_seed(seed, len(encoded))
        points = [read_point(layer, site) for layer in resolve_layers(layers, self.info.n_layers)]
        task = CaptureTask(
            bridge=self.model,
            tokenizer=self.tokenizer,
            points=points,
            where=on_model(as_where(where, all_positions()), self.tokenizer, self.info),
            pool=check_pool(pool),
            rules=stop_rules(self.model, self.tokenizer, (), max_new_tokens),
            policy=policy,
            contents=self._encoder.contents(encoded),
        )
        jobs = generation_jobs([p.token_ids for p in encoded], 1, seed, max_new_tokens)
        with progress(len(jobs), "capture") as bar:
            for assigned, members in group_by_plan(self._assign(plan, len(encoded))):
                for batch in batches_by_tokens(
                    [len(jobs[i].prompt) + max_new_tokens for i in members], self.batch_tokens
                ):
                    task.run([jobs[members[k]] for k in batch], assigned)
                    bar.update(len(batch))
        return task.activations(site, jobs)

    @torch.no_grad()
    def unembed(self, streams: Tensor) -> Tensor:
        """Logits of streams as they are after the last layer, by the model's own final norm and unembedding.

        Args:
            streams: shape [rows, d_model], of any dtype on any device.

        Returns:
            float32 on the CPU, shape [rows, d_vocab].

        Raises:
            VectorShapeError: for another width.
        """
        rows = check_streams(streams, self.info)
        point = HookPoint(self.info.n_layers - 1, "resid_post").name
        found = []
        for part in rows.split(max(1, self.batch_tokens // 4)):

            def put(value: Tensor, hook: Any = None, part: Tensor = part) -> Tensor:
                return part[:, None].to(value)

            backend = exact_backend(self.model, [(point, put)])
            with backend.attached([(point, put)]):
                ids = torch.zeros(len(part), 1, dtype=torch.long, device=embedding_device(backend.model))
                found.append(backend.model(input_ids=ids, use_cache=False).logits[:, 0].float().cpu())
        return torch.cat(found)

    def head_outputs(self, layer: int) -> Tensor:
        """W_O of a layer by head, with which the heads' z make up attn_out: float32 on the CPU.

        Returns:
            shape [n_heads, d_head, d_model]; a row says what one number of a head's z adds to the stream.

        Raises:
            HookPointError: for a model in which attn_out is no such sum, as with a norm after attention.
        """
        return head_outputs(self.model, resolve_layer(layer, self.info.n_layers))

    def hooks_of(self, plan: Plan) -> list[HookPair]:
        """A resolved plan as (hook name, function) pairs for the bridge; see `Plan.hooks`."""
        return whole_prompt_hooks(plan)

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
        windows = reference_windows(self.tokenizer, self.info.d_vocab, self.info.context_length)
        found = self._capture(windows, "all", site, ~index_positions(0))
        for layer in found.layers:
            self._median_norms[HookPoint(layer, site)] = float(found[layer].norm(dim=-1).median())

    def _noted(self, result: _Result, *, warn: bool = True) -> _Result:
        """The result itself; its receipts are those of the last call from now on."""
        self.receipts = Receipts(result.receipts)
        if warn:
            warn_if_idle(self.receipts)
        return result

    def _assign(self, plan: PlanArgument, n_prompts: int) -> list[AssignedPlan]:
        return assign_plans(plan, n_prompts, self.info, self.median_norm, self.tokenizer)

    @property
    def _encoder(self) -> Encoder:
        if self.model is None:
            raise InputError("This engine is closed; load the model again.")
        return Encoder(self.tokenizer, self.info)


def _batches(lengths: Sequence[int], batch_size: int | str, budget: int) -> list[list[int]]:
    """Indices per batch: by a token budget, or a fixed number of rows."""
    if isinstance(batch_size, str) and batch_size == "auto":
        return batches_by_tokens(lengths, budget)
    size = as_integer(batch_size)
    if size is None or size < 1:
        raise InputError(f"batch_size is 'auto' or an integer ≥ 1, got {shown(batch_size)}.")
    indices = list(range(len(lengths)))
    return [indices[start : start + size] for start in range(0, len(indices), size)]
