"""The arguments of vLLM's own server, with ours put in."""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerlab.core._numbers import check_integer
from steerlab.core.errors import InputError
from steerlab.engines.vllm._patches.versions import moved
from steerlab.engines.vllm._wire.config import KEY, SteeringConfig
from steerlab.models._resolver import ResolvedModel

SHUTDOWN_TIMEOUT = 10
"""Seconds that requests under way get to end; vLLM's own default breaks them off at once."""


@dataclass(frozen=True)
class ServeOptions:
    """What `steerlab serve` was asked for.

    Attributes:
        model: alias, model directory or hub id.
        layers: layers to wire, as in `VLLMEngine`; None for a server that does not steer.
        vectors: folders whose vector files are offered.
        max_directions: directions that one request may have at one hook point, as in `VLLMEngine`.
        max_runs: separate runs of positions that one edit may act on.
        sites: where in these layers, as in `VLLMEngine`.
        max_conditions: conditions that one request's plan may have.
        capture_tokens: positions that one forward pass may read; 0 switches `capture` and doses of calls off.
        score_mib: working memory for scoring that each device reserves; 0 switches `score` and `measure` off.
        allow_vectors: whether a call may bring vectors that the server does not offer.
        call_mib: that a call, and its answer, may have.
        max_token_rules: sets that look at generated tokens which one request may have.
        host: address to listen on.
        port: port to listen on.
        dtype: of weights and activations, as vLLM names it.
        vllm_arguments: further arguments of vLLM's server, as on its command line.
    """

    model: str
    layers: Any = None
    vectors: tuple[Path, ...] = ()
    max_directions: int = 4
    max_runs: int = 8
    sites: Any = ("resid_post",)
    max_conditions: int = 2
    capture_tokens: int = 2048
    score_mib: int = 512
    allow_vectors: bool = False
    call_mib: int = 256
    max_token_rules: int = 2
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    vllm_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.layers is None and (self.vectors or self.allow_vectors):
            given = "--vectors" if self.vectors else "--allow-vectors"
            raise InputError(f"{given} needs --layers: those to wire, at which requests can steer along vectors.")
        for name, least in (("capture_tokens", 0), ("score_mib", 0), ("call_mib", 1)):
            check_integer(getattr(self, name), f"--{name.replace('_', '-')}", least=least)


def stated_names(arguments: Sequence[str]) -> list[str]:
    """Which options a command line states, by the names that `vllm.LLM` gives them."""
    options = [argument for argument in arguments if argument.startswith("--")]
    return [re.split("[=.]", option)[0].removeprefix("--").replace("-", "_") for option in options]


def vllm_namespace(options: ServeOptions, found: ResolvedModel, config: SteeringConfig | None) -> Namespace:
    """Arguments as vLLM's server takes them.

    Raises:
        InputError: for one that steering does not work with.
        SystemExit: for one that vLLM does not know; it prints why.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser, validate_parsed_serve_args = moved("make_arg_parser"), moved("validate_parsed_serve_args")

    _check_not_ours(options.vllm_arguments)
    parser = make_arg_parser(FlexibleArgumentParser(prog="steerlab serve MODEL --", usage="%(prog)s [vLLM's options]"))
    ours = ["--model", str(found.path), "--host", options.host, "--port", str(options.port)]
    stated = stated_names(options.vllm_arguments)
    for name, value in (("dtype", options.dtype), ("shutdown_timeout", str(SHUTDOWN_TIMEOUT))):
        ours += [] if name in stated else [f"--{name.replace('_', '-')}", value]
    args: Any = parser.parse_args([*ours, *options.vllm_arguments])
    if args.model_tag is not None:
        raise InputError(f"Only options of `vllm serve` go after the `--`; {args.model_tag!r} is none.")
    validate_parsed_serve_args(args)
    _check_one_process(args)
    if config is not None and args.logprobs_mode != "raw_logprobs":
        raise InputError("`steerlab serve` returns log-probabilities under the model; leave --logprobs-mode out.")
    if args.served_model_name is None:
        args.served_model_name = [options.model]
    args.additional_config = {**(args.additional_config or {}), KEY: None if config is None else config.to_json()}
    return args


def _check_not_ours(arguments: Sequence[str]) -> None:
    taken = {"--model": "MODEL", "--host": "--host", "--port": "--port"}
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name in taken:
            raise InputError(f"{name} goes before the `--`, as steerlab's own {taken[name]}.")


def _check_one_process(args: Any) -> None:
    """Plans reach the engine from the one process that all requests go through."""
    several = {
        "--headless": args.headless,
        "--grpc": args.grpc,
        "--api-server-count": (args.api_server_count or 1) != 1,
        "--data-parallel-size": (args.data_parallel_size or 1) != 1,
    }
    used = [name for name, is_used in several.items() if is_used]
    if used:
        raise InputError(f"`steerlab serve` runs one HTTP server for one engine, so it has no {', '.join(used)}.")
    args.api_server_count = None
