"""VLLMEngine: generate, score and capture on vLLM, each request under its own plan."""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch

from steerlab._runtime.encoding import Encoder, Pair
from steerlab._runtime.reference_norm import reference_windows, window_width
from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint, check_site, resolve_layer, resolve_layers
from steerlab.core._numbers import check_flag, check_integer
from steerlab.core._seeds import SeedLike, check_seed
from steerlab.core._stopping import stop_strings
from steerlab.core._text import Boundary, PromptLike
from steerlab.core.engine import DEFAULT_POLICY, EngineTraits, ModelInfo, engine_pieces
from steerlab.core.errors import InputError, SteerlabError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Inherited, Receipt, Receipts, warn_if_idle
from steerlab.core.results import Activations, Generations, Measured, Score, Scores, check_pool
from steerlab.display import Piece, Shown
from steerlab.engines.vllm._client.build_receipts import RowsBeside
from steerlab.engines.vllm._client.capturing import MEDIAN_NORM, CaptureCall
from steerlab.engines.vllm._client.compiled_plan import wired_point
from steerlab.engines.vllm._client.connection import Connection
from steerlab.engines.vllm._client.generating import GenerationCall
from steerlab.engines.vllm._client.info import read_config, read_tokenizer
from steerlab.engines.vllm._client.isolation import check_isolation
from steerlab.engines.vllm._client.ready_plans import Planner, ReadyPlan
from steerlab.engines.vllm._client.reproducible import check_reproducible
from steerlab.engines.vllm._client.requests import RunRows
from steerlab.engines.vllm._client.run_requests import run_requests
from steerlab.engines.vllm._client.sampling import check_policy
from steerlab.engines.vllm._client.scoring import Measures, check_measures, run_scores, score_requests
from steerlab.engines.vllm._client.served_model import ServedModel
from steerlab.engines.vllm._patches.versions import require_vllm
from steerlab.engines.vllm._wire.config import SteeringConfig, sites_in_order
from steerlab.engines.vllm.adopting import adopted_config, wired_layers
from steerlab.measures.quantities import LogDistribution, Quantity, TokenLogProb
from steerlab.models import resolve
from steerlab.models._resolver import ResolvedModel
from steerlab.steering._plan_assignment import PlanArgument
from steerlab.steering.plan import Plan
from steerlab.steering.positions._by_tokens import on_model
from steerlab.steering.positions._prompt_lookup import PromptContent
from steerlab.steering.positions.where import WhereLike, as_where
from steerlab.steering.positions.where import all as all_positions
from steerlab.steering.positions.where import index as index_positions

_Result = TypeVar("_Result", Generations, Scores, Measured, Activations)


class VLLMEngine(Shown):
    """The Engine protocol on vLLM, with steering inside its compiled graphs.

    Every request of a batch may have its own plan; unsteered requests beside them are not touched, and the prefix
    cache never hands a steered block to a request that did not ask for the same edits at the same positions.

    Attributes:
        llm: the `vllm.LLM`, for whatever this class does not cover.
        tokenizer: the model's own tokenizer; None with `skip_tokenizer_init=True`.
        receipts: what the last call's plans edited, one per row of its result.
        inherited: per row, the edited positions that came from the prefix cache, written under the same edits.
        errors: what was wrong with each prompt of the last call that did not run to its end: its logits were not
            finite, or, with `on_error="return"`, it could not run at all.

    Args:
        model: an alias, a model directory or a hub id, as in `steerlab.load`.
        layers: layers to wire: "all", an index or several; negative ones count from the end. Only these can be edited
            or read (and, as resid_pre, the layer after each). `[]` wires none: any model that vLLM runs then generates
            and scores, unsteered.
        max_directions: directions that one plan may have at one hook point; edits, and terms of them, may be twice as
            many.
        max_runs: separate runs of positions that one edit may act on.
        capture_tokens: positions that one forward pass may read; 0 switches `capture` and doses off.
        score_bytes: working memory for scoring that each device reserves, whatever the length of a prompt; 0 switches
            `score`, `measure` and the log q of sampled tokens off.
        max_conditions: conditions (`sl.when`) that one plan may have; at most 4.
        max_token_rules: sets that look at generated tokens (`where.ids`, `between`, `after`) that one plan may have; at
            most 4.
        sites: where in these layers: of `attn_out`, `resid_mid`, `mlp_out` and `resid_post`.
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: groups of GPUs that share the layers.
        dtype: of weights and activations; by default the weights' own, but half precision for float32 weights, as in
            vLLM (`sl.load` has float32). `engine.info.dtype` says which it is, and so do scores.
        seed: of vLLM itself; draws are keyed by the `seed` of each call.
        revision: branch, tag or commit, for a hub id.
        **vllm_kwargs: further arguments of `vllm.LLM`.

    Raises:
        BackendMissingError: without vLLM, or with a version that is not supported.
        ModelNotFoundError: if there is no such model.
        HookPointError: for an unknown layer, or layers of a model family whose residual stream cannot be identified.
        InputError: for a vLLM feature that steering does not work with, or an argument that vLLM refuses.
        EngineError: if vLLM does not start; the message has the cause and names vLLM's log.

    Examples:
        >>> engine = VLLMEngine("smollm2-135m", layers=[10, 14])  # doctest: +SKIP
    """

    @explains_arguments
    def __init__(
        self,
        model: str | Path,
        *,
        layers: "str | int | range | list[int] | tuple[int, ...]",
        max_directions: int = 4,
        max_runs: int = 8,
        capture_tokens: int = 2048,
        score_bytes: int = 1 << 29,
        sites: "str | list[str] | tuple[str, ...]" = ("resid_post",),
        max_conditions: int = 2,
        max_token_rules: int = 2,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        dtype: Any = None,
        seed: int = 0,
        revision: str | None = None,
        **vllm_kwargs: Any,
    ) -> None:
        require_vllm()
        found = resolve(model, revision=revision)
        hf_config = read_config(found.path)
        wired = wired_layers(layers, int(hf_config.get_text_config().num_hidden_layers))
        config = SteeringConfig(
            wired,
            max_directions,
            max_runs,
            capture_tokens,
            score_bytes,
            sites_in_order(sites),
            max_conditions,
            max_token_rules,
        )
        tokenizer = None if vllm_kwargs.get("skip_tokenizer_init") else read_tokenizer(found.path)
        parallel = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
        arguments = {"dtype": "auto" if dtype is None else str(dtype).removeprefix("torch."), "seed": seed}
        connection = Connection.start(str(found.path), config, {**parallel, **arguments, **vllm_kwargs})
        self._take(connection, found, hf_config, tokenizer)

    @classmethod
    def adopt(cls, llm: Any) -> "VLLMEngine":
        """An engine on a `vllm.LLM` of your own, which goes on working beside it; `close` leaves the LLM running.

        Calls of the engine must not meet requests of the LLM's own that are under way.

        Args:
            llm: started with `additional_config=sl.vllm_config(layers=[…])`.

        Raises:
            InputError: for one that was started without it; says what to do.
            HookPointError: if a worker is not wired.

        Examples:
            >>> llm = vllm.LLM(name, additional_config=sl.vllm_config(layers=[14]))  # doctest: +SKIP
            >>> engine = VLLMEngine.adopt(llm)  # doctest: +SKIP
        """
        require_vllm()
        config, model = adopted_config(llm), llm.llm_engine.vllm_config.model_config
        found = resolve(model.model, revision=model.revision)
        source = found.path if model.tokenizer == model.model else resolve(model.tokenizer).path
        tokenizer = None if model.skip_tokenizer_init else read_tokenizer(source)
        engine = cls.__new__(cls)
        engine._take(Connection.adopt(llm, config), found, read_config(found.path), tokenizer)
        return engine

    def _take(self, connection: Connection, found: ResolvedModel, hf_config: Any, tokenizer: Any) -> None:
        """Works on a running vLLM from now on."""
        try:
            model = ServedModel.of(found, hf_config, tokenizer, connection.config, connection.llm.model_config)
            check_isolation(connection, model.info)
            check_reproducible(connection, model.info)
        except BaseException:
            connection.close()
            raise
        self._begin(model, connection, functools.partial(run_requests, connection))

    @classmethod
    def served(cls, model: ServedModel, connection: Any, run: RunRows) -> "VLLMEngine":
        """An engine over a vLLM that is running already, in a server.

        Args:
            model: what it serves.
            connection: the running vLLM: has `workers`, what each says of itself, and `close`.
            run: runs the rows of a call, as `run_requests` does on a connection of its own.
        """
        engine = cls.__new__(cls)
        engine._begin(model, connection, run)
        return engine

    def _begin(self, model: ServedModel, connection: Any, run: RunRows) -> None:
        self.receipts: Sequence[Receipt] = Receipts()
        self.inherited: list[Inherited] = []
        self.errors: dict[int, SteerlabError] = {}
        self.config, self.tokenizer = model.config, model.tokenizer
        self._model, self._run = model, run
        self._connection: Connection | None = connection
        self._plans: OrderedDict[Any, ReadyPlan] = OrderedDict()

    def __enter__(self) -> "VLLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finding(self) -> str:
        return f"{self.info.name!r}, layers={list(self.config.layers)}, {self.info.dtype}"

    def _pieces(self) -> Sequence[Piece]:
        return [] if self._connection is None else engine_pieces(self.info, self.traits, self.receipts)

    @property
    def info(self) -> ModelInfo:
        """The model that runs."""
        return self._model.info

    @property
    def traits(self) -> EngineTraits:
        """How this engine differs from others."""
        return traits_of(self.config)

    @property
    def llm(self) -> Any:
        """The `vllm.LLM` behind this engine."""
        return self._running.llm

    def check_wired(self, plan: Plan) -> None:
        """Checks that every hook point of a plan is wired.

        Raises:
            PlanError: otherwise; says which `layers` and `sites` to start with.
        """
        for point in plan.hook_points:
            wired_point(point, self.config)

    def close(self) -> None:
        """Ends vLLM and its processes, unless the LLM was adopted. The engine cannot be used afterwards."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @explains_arguments
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
        log_probs: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        cache_salt: str | None = None,
        with_support: bool = False,
    ) -> Generations:
        """Samples n continuations of each prompt, all in one batch, each under its prompt's plan.

        Args:
            prompts: strings, chat messages or token ids.
            plan: a plan, None, or a list with one per prompt.
            policy: the sampling policy.
            max_new_tokens: tokens at most; 0 returns empty completions.
            n: samples per prompt.
            seed: an integer, whose draws are keyed by (seed, prompt, sample); or one integer per prompt. The draws are
                vLLM's, so they differ from the TransformerLens engine's.
            stop: strings that end a row as soon as its text contains one; the text is cut before it.
            chat: take strings as user turns of a chat.
            log_probs: False leaves `token_log_probs` and `token_log_qs` NaN and is faster.
            on_error: `raise` raises what is wrong with a prompt or its plan before anything runs; `return` gives such
                prompts completions with finish_reason `error`, explained in `engine.errors`, and runs the others.
                A row whose logits are no longer finite ends so in either case, with the tokens drawn before; it changes
                no other row.
            cache_salt: keeps this call's part of the prefix cache apart from other calls'.
            with_support: also record the set of tokens that each token was drawn from, in `completion.supports`.

        Returns:
            Completions in order of prompt, then sample. `token_log_qs` is exact under every policy: it is taken from
            the distribution that vLLM drew the token from. That is the policy's own but where logits are equal (as
            half-precision ones often are), all of which vLLM's top_k keeps.

        Raises:
            PolicyError: for a policy that vLLM does not sample from exactly.
            NonFiniteError: if no row has finite logits, without any plan.
            PromptError, ContextLengthError, PlanError, VectorShapeError, HookPointError: for input that cannot be used.
        """
        encoder, planner = self._tools()
        max_new_tokens, n = check_integer(max_new_tokens, "max_new_tokens", least=0), check_integer(n, "n", least=1)
        encoded = encoder.each_prompt(prompts, chat, max_new_tokens)
        call = GenerationCall(
            tokenizer=self.tokenizer,
            policy=check_policy(policy),
            max_new_tokens=max_new_tokens,
            n=n,
            seed=check_seed(seed, len(encoded)),
            stop=stop_strings(stop),
            eos_ids=self._model.eos_ids,
            log_probs=check_flag(log_probs, "log_probs"),
            cache_salt=cache_salt,
            measures_q=bool(self.config.score_bytes),
            with_support=check_flag(with_support, "with_support"),
            d_vocab=self.info.d_vocab,
        )
        made = call.requests(encoded, planner.plans(plan, len(encoded)), planner)
        self._note_errors(made, on_error)
        requests = [request for row in made if isinstance(row, list) for request in row]
        outcomes = self._run(requests if max_new_tokens else [], "generate")
        runner = f"vllm-{self._running.workers[0]['runner']}"
        found = call.generations(
            encoded, made, outcomes, self.errors, runner, self.info.dtype, must_run=on_error == "raise"
        )
        self.errors = dict(found.errors)
        return self._noted(found)

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

        A target's tokens count as generated, so a plan edits the positions it would edit while generating them.

        Args:
            prompts: strings, chat messages or token ids.
            targets: one list of strings (or lists of ids) per prompt.
            plan: a plan, None, or a list with one per prompt.
            boundary: `joint` encodes prompt and target together, `separate` each alone.
            variants: prefixes; each makes a separate string of every target, e.g. ("", " ") scores "Paris" and
                " Paris". Scores are in order of prompt, target, variant.
            score_eos: score the tokenizer's EOS after each target too.
            chat: take strings as user turns of a chat.

        Raises:
            TargetError: for an empty target, one that gives no token, or a variant of a target given as ids.
            ContextLengthError: if a prompt and its target exceed the context; nothing is cut.
        """
        encoder, _ = self._tools()
        pairs, contents = encoder.pairs(
            prompts, targets, boundary=boundary, variants=variants, score_eos=score_eos, chat=chat
        )
        values, receipts = self._measured(pairs, contents, plan, [TokenLogProb()])
        found = [one[TokenLogProb()].tolist() for one in values]
        rows = tuple(Score.of_pair(i, j, p, x) for (i, j, p), x in zip(pairs, found, strict=True))
        return self._noted(Scores(rows, self.info.dtype, *receipts))

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
        """Quantities of every target token's prediction, teacher-forced as in `score`.

        Args:
            prompts: as in `score`.
            targets: as in `score`.
            measures: named quantities of `steerlab.measures.quantities`: TokenLogProb, PolicyEntropy, PolicyLogQ and
                LogDistribution. A repetition penalty and other functions need the TransformerLens engine.
            plan: as in `score`.
            boundary: as in `score`.
            chat: as in `score`.

        Returns:
            Per (prompt, target), in order: name → float64 array [target tokens], in nats; of a LogDistribution float32
            [target tokens, d_vocab], which takes 4·d_vocab bytes a token on this host.

        Raises:
            InputError: for a function that cannot be sent to vLLM's workers.
            ReceiptError: if a prediction was not measured.
        """
        quantities = check_measures(measures)
        encoder, _ = self._tools()
        pairs, contents = encoder.pairs(prompts, targets, boundary=boundary, chat=chat)
        found, receipts = self._measured(pairs, contents, plan, list(quantities.values()))
        rows = [{name: _wide(quantity, values[quantity]) for name, quantity in quantities.items()} for values in found]
        return self._noted(Measured(rows, *receipts))

    def _measured(
        self, pairs: Sequence[Pair], contents: Sequence[PromptContent], plan: PlanArgument, measures: Sequence[Quantity]
    ) -> tuple[list[dict[Quantity, np.ndarray]], RowsBeside]:
        """What is measured of every pair's target tokens, and the rows' receipts and inherited positions."""
        if not self.config.score_bytes:
            raise InputError("This engine was started with score_bytes=0, so it cannot score.")
        _, planner = self._tools()
        plans = planner.plans(plan, len(contents))
        requests = score_requests(pairs, contents, plans, planner, measures)
        return run_scores(pairs, requests, self._run, self.info.dtype)

    @explains_arguments
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
    ) -> Activations:
        """Activations of prompts at wired layers, float32 on the CPU; with a plan, as they are after its edits.

        Prompts run whatever the prefix cache holds of them, so every position can be read.

        Args:
            prompts: strings, chat messages or token ids.
            layers: "all", an index, or several; each must be wired.
            site: one that is wired, or `resid_pre` of a layer after one with a wired `resid_post`.
            where: the positions; all by default.
            pool: `mean` or `last` over a prompt's positions, or None to keep each.
            plan: a plan, None, or a list with one per prompt.
            chat: take strings as user turns of a chat.

        Raises:
            PlanError: for a layer or site that is not wired.
            InputError: if `where` selects nothing in a prompt.
        """
        return self._noted(self._capture(prompts, layers, site, where, pool, plan, chat))

    def _capture(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        layers: Any,
        site: str,
        where: WhereLike,
        pool: str | None = None,
        plan: PlanArgument = None,
        chat: bool = False,
        what: str = "capture",
    ) -> Activations:
        if not self.config.capture_tokens:
            raise InputError("This engine was started with capture_tokens=0, so it cannot read activations.")
        encoder, planner = self._tools()
        encoded = encoder.prompts(prompts, chat, 1)  # vLLM samples one token after each
        points = [HookPoint(layer, check_site(site)) for layer in resolve_layers(layers, self.info.n_layers)]
        call = CaptureCall(
            layers=[point.layer for point in points],
            wired=[wired_point(point, self.config) for point in points],
            site=site,
            where=on_model(as_where(where, all_positions()), self.tokenizer, self.info),
            pool=check_pool(pool),
            room=self.config.capture_tokens,
        )
        requests = call.requests(encoder.contents(encoded), planner.plans(plan, len(encoded)), planner)
        return call.run(requests, self._run, self.info.dtype, what)

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """Median norm of the stream at a wired hook point, over the shipped reference text, position 0 left out.

        The text runs unsteered in windows of at most 256 tokens; each window's first token is left out. This is the
        unit of a dose.
        """
        point = HookPoint(resolve_layer(layer, self.info.n_layers), site)
        known = self._model.median_norms
        if point not in known:
            known[point] = self._measure_norm(point)
        return known[point]

    def _measure_norm(self, point: HookPoint) -> float:
        if self.tokenizer is None:
            raise InputError("A dose is measured on text, and this engine has no tokenizer; give coef= instead.")
        width = window_width(self._model.own_context)
        if width + 1 > self.info.context_length:
            raise InputError(
                f"A dose is measured in windows of {width} tokens, and vLLM adds one: start the engine with "
                f"max_model_len ≥ {width + 1} (it is {self.info.context_length}), or give coef= instead of dose=."
            )
        windows = reference_windows(self.tokenizer, self.info.d_vocab, self._model.own_context)
        found = self._capture(windows, point.layer, point.site, ~index_positions(0), what=MEDIAN_NORM)
        return float(found[point.layer].norm(dim=-1).median())

    def _tools(self) -> tuple[Encoder, Planner]:
        _ = self._running
        encoder = Encoder(self.tokenizer, self.info, ", or start the engine with a larger max_model_len")
        return encoder, Planner(self.config, self.info, self.median_norm, self._plans, self.tokenizer)

    def _note_errors(self, made: Sequence[Any], on_error: str) -> None:
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error is 'raise' or 'return', got {on_error!r}.")
        errors = {index: row for index, row in enumerate(made) if isinstance(row, SteerlabError)}
        if errors and on_error == "raise":
            raise next(iter(errors.values()))
        self.errors = errors

    def _noted(self, result: _Result) -> _Result:
        """The result itself; its receipts and inherited positions are those of the last call from now on."""
        self.receipts, self.inherited = Receipts(result.receipts), list(result.inherited)
        warn_if_idle(self.receipts)
        return result

    @property
    def _running(self) -> Connection:
        if self._connection is None:
            raise InputError("This engine is closed; start a new one.")
        return self._connection


def traits_of(config: SteeringConfig) -> EngineTraits:
    """How an engine on vLLM differs from others, given what is wired."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EngineTraits("vllm", device, config.layers, takes_functions=False, gives_supports=bool(config.score_bytes))


def _wide(quantity: Quantity, values: np.ndarray) -> np.ndarray:
    """As `measure` returns it: one value per token in float64, whole distributions as they are."""
    return values if isinstance(quantity, LogDistribution) else values.astype(np.float64)


def check_vllm_engine(engine: object, user: str) -> VLLMEngine:
    """The engine itself, if it can carry out plans as `VLLMEngine` does; a `vllm.LLM` is adopted.

    Raises:
        InputError: for something else, such as a `vllm.LLM` that was started without `sl.vllm_config`.
    """
    if hasattr(engine, "llm_engine") and hasattr(engine, "collective_rpc"):
        return VLLMEngine.adopt(engine)
    if not all(hasattr(engine, name) for name in ("generate", "score", "info", "receipts")):
        raise InputError(
            f"{user} takes a sl.VLLMEngine, or a vllm.LLM that was started with "
            f"additional_config=sl.vllm_config(layers=[…]); got {type(engine).__name__}."
        )
    return cast("VLLMEngine", engine)  # or what answers as one
