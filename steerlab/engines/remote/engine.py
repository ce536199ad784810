"""RemoteEngine: the Engine protocol over HTTP, on a model that `steerlab serve` runs elsewhere."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Literal, TypeVar

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint, check_site, resolve_layer, resolve_layers
from steerlab.core._numbers import check_flag, check_integer, check_number
from steerlab.core._seeds import SeedLike, check_seed
from steerlab.core._stopping import stop_strings
from steerlab.core._text import Boundary, PromptLike, as_prompts, as_targets, is_single_prompt, listed
from steerlab.core.engine import DEFAULT_POLICY, EngineTraits, ModelInfo, engine_pieces
from steerlab.core.errors import InputError, SteerlabError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Inherited, Receipt, Receipts, warn_if_idle
from steerlab.core.results import Activations, Generations, Measured, Scores, check_pool
from steerlab.display import Piece, Shown
from steerlab.engines._http.frames import Frame
from steerlab.engines._http.plans import plans_message
from steerlab.engines._http.results import activations_in, generations_in, measured_in, scores_in
from steerlab.engines._wired_points import reached_at
from steerlab.engines.remote._connection import RemoteConnection
from steerlab.engines.remote._tokenizer import remote_tokenizer
from steerlab.measures.quantities import Quantity, check_named
from steerlab.steering._plan_assignment import PlanArgument
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import WhereLike, as_where
from steerlab.steering.positions.where import all as all_positions

_Result = TypeVar("_Result", Generations, Scores, Measured, Activations)


class RemoteEngine(Shown):
    """An engine that computes nothing here: a model that `steerlab serve` runs, used as if it were in this process.

    Results are those of a `VLLMEngine` on the server's machine, receipts included. A call that is cut off, because the
    connection breaks or the server is started anew, is sent again; it has an id, and its result is taken once. An
    interrupt closes the connection, and that ends the call's rows on the server.

    Attributes:
        url: the server's address.
        receipts: what the last call's plans edited, one per row of its result.
        inherited: per row, the edited positions that came from the server's prefix cache.
        errors: what was wrong with each prompt of the last `generate` that did not run to its end.
        described: what the server says of itself: sites, limits, whether it takes vectors that it does not offer.

    Args:
        url: the server's address, such as "http://127.0.0.1:8000"; a path `/v1` at its end is left out.
        api_key: what the server was started with (`-- --api-key`), if it asks for one.
        patience: seconds for which a call that has no answer is sent again; longer than a restart of the server takes.

    Raises:
        EngineError: if nothing answers there.
        InputError: if what answers is no `steerlab serve` with layers, or asks for another key.

    Examples:
        >>> engine = RemoteEngine("http://gpu-machine:8000", api_key="open-sesame")  # doctest: +SKIP
    """

    @explains_arguments
    def __init__(self, url: str, *, api_key: str | None = None, patience: float = 600.0) -> None:
        self.receipts: Sequence[Receipt] = Receipts()
        self.inherited: list[Inherited] = []
        self.errors: dict[int, SteerlabError] = {}
        self._median_norms: dict[HookPoint, float] = {}
        patience = check_number(patience, "patience", least=0)
        self._connection: RemoteConnection | None = RemoteConnection(url, api_key, patience)
        self.url = self._connection.url
        try:
            self.described: dict[str, Any] = self._connection.read("describe")
            self._connection.most_bytes = int(self.described["max_bytes"])
            self._info = ModelInfo(**self.described["model"])
            traits = self.described["traits"]
            self._traits = EngineTraits(**{**traits, "layers": tuple(traits["layers"])})
        except (KeyError, TypeError) as error:
            self.close()
            raise InputError(f"What answers at {self.url} is no `steerlab serve` of this version: {error}.") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RemoteEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finding(self) -> str:
        return f"{self.info.name!r} at {self.url}, layers={list(self.traits.layers)}, {self.info.dtype}"

    def _pieces(self) -> Sequence[Piece]:
        return engine_pieces(self.info, self.traits, self.receipts)

    @property
    def info(self) -> ModelInfo:
        """The model that the server runs."""
        return self._info

    @property
    def traits(self) -> EngineTraits:
        """How this engine differs from others: as the server's own engine does."""
        return self._traits

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer; its files come from the server, once, and are kept in the cache."""
        running = self._running
        return remote_tokenizer(self.described["tokenizer"], lambda: running.read("tokenizer"))

    def check_wired(self, plan: Plan) -> None:
        """Checks that the server can edit every hook point of a plan.

        Raises:
            PlanError: otherwise; says which layers and sites to start it with.
        """
        of = f"the server at {self.url}"
        for point in plan.hook_points:
            reached_at(point, self.traits.layers, self.described["sites"], of=of, stated="options")

    def close(self) -> None:
        """Closes the connection; the server runs on. The engine cannot be used afterwards."""
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
        """Samples n continuations of each prompt, each under its prompt's plan; arguments as in `VLLMEngine.generate`.

        Raises:
            SteerlabError: as `VLLMEngine.generate`.
            EngineError: if the server has not answered for too long.
        """
        given = as_prompts(prompts)
        n = check_integer(n, "n", least=1)
        content = {
            "prompts": given,
            "policy": asdict(SamplingPolicy.check(policy)),
            "max_new_tokens": check_integer(max_new_tokens, "max_new_tokens", least=0),
            "n": n,
            "seed": check_seed(seed, len(given)),
            "stop": list(stop_strings(stop)),
            "chat": check_flag(chat, "chat"),
            "log_probs": check_flag(log_probs, "log_probs"),
            "on_error": on_error,
            "cache_salt": cache_salt,
            "with_support": check_flag(with_support, "with_support"),
        }
        result = generations_in(self._call("generate", content, plan, n * len(given)))
        self.errors = dict(result.errors)
        return self._noted(result)

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
        """The exact log-probability of every target after its prompt, in nats; arguments as in `VLLMEngine.score`.

        Raises:
            SteerlabError: as `VLLMEngine.score`.
            EngineError: if the server has not answered for too long.
        """
        content = {
            **_paired(prompts, targets),
            "boundary": boundary,
            "variants": [variants] if isinstance(variants, str) else list(variants),
            "score_eos": check_flag(score_eos, "score_eos"),
            "chat": check_flag(chat, "chat"),
        }
        n_rows = sum(map(len, content["targets"])) * max(1, len(content["variants"]))
        return self._noted(scores_in(self._call("score", content, plan, n_rows)))

    @explains_arguments
    def measure(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Any],
        measures: Any,
        *,
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        chat: bool = False,
    ) -> Measured:
        """Quantities of every target token's prediction; arguments as in `VLLMEngine.measure`.

        Raises:
            SteerlabError: as `VLLMEngine.measure`.
            InputError: for a function, which cannot be sent.
            EngineError: if the server has not answered for too long.
        """
        content = {
            **_paired(prompts, targets),
            "measures": _serialised(measures),
            "boundary": boundary,
            "chat": check_flag(chat, "chat"),
        }
        n_rows = sum(map(len, content["targets"]))
        return self._noted(measured_in(self._call("measure", content, plan, n_rows)))

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
        """Activations of prompts at the server's layers, float32 on the CPU; arguments as in `VLLMEngine.capture`.

        Raises:
            SteerlabError: as `VLLMEngine.capture`.
            EngineError: if the server has not answered for too long.
        """
        given = as_prompts(prompts)
        content = {
            "prompts": given,
            "layers": resolve_layers(layers, self.info.n_layers),
            "site": check_site(site),
            "where": as_where(where, all_positions()).to_json(),
            "pool": check_pool(pool),
            "chat": check_flag(chat, "chat"),
        }
        return self._noted(activations_in(self._call("capture", content, plan, len(given))))

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """Median norm of the stream at a wired hook point, over the shipped reference text."""
        point = HookPoint(resolve_layer(layer, self.info.n_layers), check_site(site))
        if point not in self._median_norms:
            content = {"layer": point.layer, "site": point.site, "weights_hash": self.info.weights_hash}
            answer = self._running.call("median_norm", Frame(content), 1)
            self._median_norms[point] = float(answer.content["median_norm"])
        return self._median_norms[point]

    def _call(self, what: str, content: dict[str, Any], plan: PlanArgument, n_rows: int) -> Frame:
        running = self._running
        plans, arrays = plans_message(plan, self.info.d_model)
        for one in {} if plan is None else dict.fromkeys([plan] if isinstance(plan, Plan) else plan):
            if one is not None:
                one.check(self.info)  # its warnings are for who calls
        return running.call(what, Frame({**content, **plans, "weights_hash": self.info.weights_hash}, arrays), n_rows)

    def _noted(self, result: _Result) -> _Result:
        """The result itself; its receipts and inherited positions are those of the last call from now on."""
        self.receipts, self.inherited = Receipts(result.receipts), list(result.inherited)
        warn_if_idle(self.receipts)
        return result

    @property
    def _running(self) -> RemoteConnection:
        if self._connection is None:
            raise InputError("This engine is closed; make a new one.")
        return self._connection


def _paired(prompts: Any, targets: Any) -> dict[str, Any]:
    """Prompts and their targets as lists."""
    prompts = listed(prompts)
    given = as_prompts(prompts)
    return {"prompts": given, "targets": as_targets(targets, len(given), is_single_prompt(prompts))}


def _serialised(measures: Any) -> dict[str, Any]:
    """Measures by name, as they travel.

    Raises:
        InputError: for a function, which cannot.
    """
    check_named(measures)
    for name, measure in measures.items():
        if not isinstance(measure, Quantity):
            raise InputError(
                f"{name!r} is {measure!r:.80}, which cannot be sent to a server. It measures the quantities of "
                "`steerlab.measures.quantities`; the TransformerLens engine takes any function of (logits, tokens)."
            )
    return {name: measure.to_json() for name, measure in measures.items()}
