"""Starts vLLM's OpenAI-compatible server with steering in it, and runs it until it is told to stop."""

import asyncio
import signal
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from steerlab.core._hook_points import resolve_layers
from steerlab.engines.vllm._client.info import read_config, read_tokenizer
from steerlab.engines.vllm._client.log_file import Log, log_of
from steerlab.engines.vllm._client.processes import be_patient
from steerlab.engines.vllm._client.served_model import ServedModel
from steerlab.engines.vllm._patches.versions import moved, require_vllm
from steerlab.engines.vllm._plugin import register
from steerlab.engines.vllm._server.answers import InfoEndpoints
from steerlab.engines.vllm._server.arguments import ServeOptions, stated_names, vllm_namespace
from steerlab.engines.vllm._server.call_book import CallBook
from steerlab.engines.vllm._server.call_endpoints import CallEndpoints
from steerlab.engines.vllm._server.calls import Desk
from steerlab.engines.vllm._server.field_errors import refuse
from steerlab.engines.vllm._server.gateway import Gateway
from steerlab.engines.vllm._server.middleware import SteeringMiddleware
from steerlab.engines.vllm._server.plans import PlanMaker
from steerlab.engines.vllm._server.registry import VectorRegistry
from steerlab.engines.vllm._server.rows import RowRunner
from steerlab.engines.vllm._server.startup import check_server
from steerlab.engines.vllm._server.tokenizer_files import tokenizer_files
from steerlab.engines.vllm._server.workers import AsyncEngine
from steerlab.engines.vllm._wire.config import SteeringConfig, sites_in_order
from steerlab.engines.vllm._wire.shutdown import GRACE
from steerlab.engines.vllm.engine import VLLMEngine
from steerlab.models import resolve


def serve(options: ServeOptions) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        options: what to serve, and how.

    Raises:
        BackendMissingError: without vLLM, or with a version that is not supported.
        ModelNotFoundError: if there is no such model.
        InputError, HookPointError, VectorFileError: for what cannot be served as asked.
        EngineError: if vLLM does not start, or dies; the message names its log.
    """
    require_vllm()
    registry = VectorRegistry.read(options.vectors)
    found = resolve(options.model)
    hf_config = read_config(found.path)
    config = None
    if options.layers is not None:
        wired = resolve_layers(options.layers, int(hf_config.get_text_config().num_hidden_layers))
        config = SteeringConfig(
            tuple(wired),
            options.max_directions,
            options.max_runs,
            options.capture_tokens,
            options.score_mib << 20,
            sites_in_order(options.sites),
            options.max_conditions,
            options.max_token_rules,
        )
    log = log_of(stated_names(options.vllm_arguments))
    be_patient()
    with log.collecting():
        register()
        import uvloop
        from vllm.logger import configure_logging_from_args

        cli_env_setup = moved("cli_env_setup")

    args = vllm_namespace(options, found, config)

    def serving(engine: Any) -> Serving:
        if config is None:
            return Serving(Gateway(engine, None), None, {})
        tokenizer = None if args.skip_tokenizer_init else read_tokenizer(found.path)
        model = ServedModel.of(found, hf_config, tokenizer, config, engine.model_config)
        gateway = Gateway(engine, PlanMaker(registry, config, model.info, tokenizer), tokenizer)
        return Serving(gateway, model, tokenizer_files(found.path), options.allow_vectors, options.call_mib << 20)

    with log.starting():
        cli_env_setup()
        configure_logging_from_args(args)
        uvloop.run(_run(args, serving, log))
    log.keep()


@dataclass(frozen=True)
class Running:
    """The server's vLLM, as an engine sees it.

    Attributes:
        workers: what each worker says of itself.
    """

    workers: Sequence[Mapping[str, Any]]

    def close(self) -> None:
        """The server closes it."""


@dataclass(frozen=True)
class Serving:
    """What a server adds to vLLM's.

    Attributes:
        gateway: what steered requests go through.
        model: what calls work on; None in a server without layers.
        tokenizer: its files.
        allows_vectors: whether a call may bring vectors of its own.
        limit: bytes of a call and of its answer.
    """

    gateway: Gateway
    model: ServedModel | None
    tokenizer: dict[str, Any]
    allows_vectors: bool = False
    limit: int = 0

    def desk(self, workers: Sequence[Mapping[str, Any]]) -> Desk | None:
        """What calls work with, in the running loop."""
        maker = self.gateway.maker
        if self.model is None or maker is None:
            return None
        model, running = self.model, Running(workers)
        return Desk(
            model,
            maker,
            lambda call: VLLMEngine.served(model, running, call.run),
            RowRunner(self.gateway),
            asyncio.get_running_loop(),
            self.allows_vectors,
            self.limit,
        )


async def _run(args: Namespace, make_serving: Callable[[Any], Serving], log: Log) -> None:
    """As vLLM's `run_server`, with the gateway between engine and application."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.system_utils import decorate_logs

    decorate_logs("APIServer", skip_if_decorated=True)
    signal.signal(signal.SIGTERM, _interrupt)  # until the HTTP server has handlers of its own
    address, sock = setup_server(args, reuse_port=False)
    try:
        async with build_async_engine_client(args) as engine:
            engine.shutdown = _patient(engine.shutdown)
            serving = make_serving(engine)
            workers: Sequence[Mapping[str, Any]] = []
            if serving.gateway.maker is not None:
                workers = await check_server(serving.gateway, cast(AsyncEngine, engine))
                _announce(serving.gateway.maker, log, allows_vectors=serving.allows_vectors)
            dtype = str(engine.model_config.dtype).removeprefix("torch.")
            served = f"{', '.join(args.served_model_name)} in {dtype} is served on {address}"
            calls = CallBook()
            layers = _layers(serving, workers, calls, _key_check(args))
            try:
                ended = await _serve_http(args, engine, layers, sock, lambda: log.say(served))
            finally:
                calls.close()
        await ended
    finally:
        sock.close()


async def _serve_http(args: Any, engine: Any, layers: Sequence[Any], sock: Any, announce: Callable[[], None]) -> Any:
    """As vLLM's `build_and_serve`; our layers come after its authentication."""
    from vllm import envs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    _put_layers(app, layers)
    await init_app_state(engine, app.state, args, tasks)
    log_config = get_uvicorn_log_config(args)
    logging_arguments: dict[str, Any] = {} if log_config is None else {"log_config": log_config}
    announce()
    return await serve_http(
        app,
        sock=sock,
        enable_ssl_refresh=args.enable_ssl_refresh,
        host=args.host,
        port=args.port,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        h11_max_header_count=args.h11_max_header_count,
        **logging_arguments,
    )


def _patient(shutdown: Callable[..., None]) -> Callable[..., None]:
    """The engine's `shutdown`, which counts its time from the start: what requests take, its processes would lack."""

    def patient(timeout: float | None = None) -> None:
        shutdown(timeout=GRACE + (timeout or 0.0))

    return patient


def _layers(serving: Serving, workers: Sequence[Mapping[str, Any]], calls: CallBook, allows: Any) -> list[Any]:
    """What a request passes through after vLLM's own layers, the outermost first."""
    from starlette.middleware import Middleware

    tokenizer, gateway = serving.tokenizer, serving.gateway
    return [
        Middleware(CallEndpoints, desk=serving.desk(workers), book=calls, allows=allows, tokenizer=tokenizer),
        Middleware(InfoEndpoints, gateway=gateway, allows=allows),
        Middleware(SteeringMiddleware, gateway=gateway),
    ]


def _put_layers(app: Any, layers: Sequence[Any]) -> None:
    """Puts our layers innermost; vLLM has built the stack already, so it is built anew."""
    from fastapi.exceptions import RequestValidationError

    app.user_middleware.extend(layers)
    app.add_exception_handler(RequestValidationError, refuse)
    app.middleware_stack = app.build_middleware_stack()


def _key_check(args: Any) -> Any:
    """Whether a request may read what is under /steerlab/; vLLM's own layer guards its own paths only."""
    from starlette.datastructures import Headers
    from vllm import envs
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    if not keys:
        return lambda scope: True
    guard = AuthenticationMiddleware(_nothing, keys)
    return lambda scope: guard.verify_token(Headers(scope=scope))


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """What the guard would call; it is only asked."""


def _announce(maker: PlanMaker, log: Log, *, allows_vectors: bool) -> None:
    offered = maker.registry.listing(maker.config, maker.info)
    for entry in offered:
        if entry["unusable_because"]:
            log.say(f"warning: vector {entry['name']} cannot be used here: {entry['unusable_because']}")
    usable = sum(entry["unusable_because"] is None for entry in offered)
    layers = ", ".join(str(layer) for layer in maker.config.layers)
    own = ", and calls along vectors of their own" if allows_vectors else ""
    log.say(f"requests can steer at layers {layers} along {usable} of {len(offered)} vectors{own}")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt("terminated")
