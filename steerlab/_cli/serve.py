"""`steerlab serve`: vLLM's OpenAI-compatible server, with steering by request."""

from pathlib import Path
from typing import Annotated, Any

import typer

from steerlab._cli.modules import import_modules
from steerlab.core.errors import InputError


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Alias, model directory or hub id.", show_default=False)
    ],
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM_OPTIONS", help="Options of `vllm serve`, after `--`.", show_default=False),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="N,N,…|all", help="Layers that requests can steer; none without it.", show_default=False),
    ] = None,
    vectors: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="Folder whose vector files requests can name; repeatable.", show_default=False
        ),
    ] = None,
    max_directions: Annotated[
        int, typer.Option(help="Directions that one request may have at a hook point; edits: twice as many.")
    ] = 4,
    max_runs: Annotated[int, typer.Option(help="Separate runs of positions that one edit may act on.")] = 8,
    sites: Annotated[
        str,
        typer.Option(
            metavar="SITE,SITE,…", help="Where in these layers: of attn_out, resid_mid, mlp_out and resid_post."
        ),
    ] = "resid_post",
    max_conditions: Annotated[int, typer.Option(help="Conditions that one request's plan may have.")] = 2,
    capture_tokens: Annotated[
        int, typer.Option(help="Positions that one forward pass may read; 0 switches `capture` off.")
    ] = 2048,
    score_mib: Annotated[
        int, typer.Option(help="Memory for scoring on each device, in MiB; 0 switches `score` and `measure` off.")
    ] = 512,
    allow_vectors: Annotated[
        bool, typer.Option("--allow-vectors", help="Let calls bring vectors that are in none of the folders.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Module to import first, which registers operators of your own; repeatable.",
            show_default=False,
        ),
    ] = None,
    call_mib: Annotated[int, typer.Option(help="What a call, and its answer, may have, in MiB.")] = 256,
    max_token_rules: Annotated[
        int, typer.Option(help="Sets that look at generated tokens which one request may have; at most 4.")
    ] = 2,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of weights and activations. `auto`, as in VLLMEngine: the weights' own, but half precision for "
            "float32 weights. `float32`: as the other commands."
        ),
    ] = "auto",
) -> None:
    """Serve a model over HTTP as OpenAI does, with steering by request (vLLM)."""
    import_modules(modules or ())
    from steerlab.engines.vllm._server.arguments import ServeOptions
    from steerlab.engines.vllm._server.serve import serve as run

    run(
        ServeOptions(
            model=model,
            layers=None if layers is None else parse_layers(layers),
            vectors=tuple(vectors or ()),
            max_directions=max_directions,
            max_runs=max_runs,
            sites=tuple(sites.split(",")),
            max_conditions=max_conditions,
            capture_tokens=capture_tokens,
            score_mib=score_mib,
            allow_vectors=allow_vectors,
            call_mib=call_mib,
            max_token_rules=max_token_rules,
            host=host,
            port=port,
            dtype=dtype,
            vllm_arguments=tuple(vllm_arguments or ()),
        )
    )


def parse_layers(text: str) -> Any:
    """Layers as they are typed: `all`, or numbers with commas; negative ones count from the end.

    Raises:
        InputError: for anything else.

    Examples:
        >>> parse_layers("10,14")
        [10, 14]
    """
    if text == "all":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--layers takes `all` or numbers such as 10,14, got {text!r}.") from error
