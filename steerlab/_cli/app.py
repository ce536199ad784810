"""The application: its commands, and how it fails."""

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from steerlab._cli import convert, demo, divergence, doctor, extract, generate, perplexity, run, score, serve
from steerlab._cli.console import complain, own_warnings_only
from steerlab.core.errors import SteerlabError

BAD_INPUT, INTERRUPTED = 2, 130


class Commands(TyperGroup):
    """The commands; what steerlab raises on purpose becomes one sentence on stderr and exit code 2."""

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            with own_warnings_only():
                return super().invoke(ctx)
        except SteerlabError as error:
            if os.environ.get("STEERLAB_DEBUG", "0") not in ("", "0"):
                raise
            complain("error", str(error))
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as error:
            complain("interrupted", "nothing more is written.")
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    cls=Commands,
    help="Steer language models through their residual stream, and measure exactly what changed.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from steerlab import __version__

        typer.echo(f"steerlab {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("extract")(extract.extract)
app.command("generate")(generate.generate)
app.command("score")(score.score)
app.command("perplexity")(perplexity.perplexity)
app.command("divergence")(divergence.divergence)
app.command("run")(run.run)
app.command("convert")(convert.convert)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Runs the command line on the process's arguments, and exits."""
    app(prog_name="steerlab")
