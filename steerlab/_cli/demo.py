"""`steerlab demo`: a complete experiment on the shipped sentiment data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerlab._cli.options import DEFAULT_MODEL, ModelOption

if TYPE_CHECKING:
    from steerlab._cli.spec import ExperimentSpec

NAME = "sentiment"


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the run directory.")] = Path("runs"),
    model: ModelOption = DEFAULT_MODEL,
    layer: Annotated[int, typer.Option(help="Layer to steer.")] = 14,
    seed: Annotated[int, typer.Option(help="Of controls and sampling.")] = 0,
    fast: Annotated[
        bool, typer.Option("--fast", help="Random directions as the only null, one layer, shorter samples.")
    ] = False,
) -> None:
    """Run a whole experiment on the shipped sentiment data.

    Extracts a vector, measures its effect on unseen prompts against nulls, and what it costs, and writes a report.
    """
    from steerlab._cli.runner import run_experiment

    run_experiment(demo_spec(out, model=model, layer=layer, seed=seed, fast=fast))


def demo_spec(out: Path, *, model: str, layer: int, seed: int, fast: bool) -> "ExperimentSpec":
    """The experiment, with the paths of the shipped data."""
    from steerlab._cli.spec import ControlsSpec, ExperimentSpec, GenerationsSpec, PairsSpec, TargetsSpec, VectorSpec
    from steerlab.core.shipped import shipped_vectors

    data = shipped_vectors() / NAME
    return ExperimentSpec(
        name=NAME,
        model=model,
        seed=seed,
        root=out,
        pairs=PairsSpec(path=data / "pairs.jsonl", group="group", split="train"),
        vector=VectorSpec(layer=layer),
        targets=TargetsSpec(path=data / "targets.jsonl", split="test"),
        doses=[-0.2, -0.1, 0.0, 0.1, 0.2],
        controls=ControlsSpec(random=20) if fast else ControlsSpec(random=20, shuffled=20, wrong_layer=True),
        entropy=True,
        generations=GenerationsSpec(prompts=data / "prompts.txt", max_new_tokens=16 if fast else 40),
    )
