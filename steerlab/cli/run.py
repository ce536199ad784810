"""`steerlab run`: an experiment that a YAML file describes."""

from pathlib import Path
from typing import Annotated

import typer


def run(file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The experiment.")]) -> None:
    """Run the experiment that a YAML file describes."""
    from steerlab.cli.runner import run_experiment
    from steerlab.cli.yaml_file import read_spec

    run_experiment(read_spec(file), source=file)
