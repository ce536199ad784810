"""`steerlab run`: an experiment, a published protocol, or a sweep of experiments, that a YAML file describes."""

from pathlib import Path
from typing import Annotated

import typer

WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="With --ray: how many workers, each with an engine.", show_default=False)
]
GpusOption = Annotated[
    float | None,
    typer.Option("--gpus-per-worker", help="With --ray: GPUs of each worker's engine, or a share.", show_default=False),
]
CpusOption = Annotated[
    float | None, typer.Option("--cpus-per-worker", help="With --ray: CPUs each worker reserves.", show_default=False)
]


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="An experiment, a protocol or a sweep.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew; otherwise what is finished is kept, not measured again.")
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Run the cells of a sweep on Ray.")] = False,
    workers: WorkersOption = None,
    gpus_per_worker: GpusOption = None,
    cpus_per_worker: CpusOption = None,
) -> None:
    """Run the experiment, the published protocol or the sweep that a YAML file describes.

    Run it again after it was interrupted, and it goes on where it stopped.
    """
    from steerlab._cli.yaml_file import experiment_of, read_mapping

    data = read_mapping(file)
    asked = {"workers": workers, "gpus_per_worker": gpus_per_worker, "cpus_per_worker": cpus_per_worker}
    given = {name: value for name, value in asked.items() if value is not None}
    _check_options(ray, given)
    from steerlab._cli.protocol_spec import is_protocol
    from steerlab._cli.sweep_spec import is_sweep, sweep_of

    if is_protocol(data):
        _only_for_sweeps(file, ray)
        from steerlab._cli.protocol_runner import protocol_of, run_protocol

        run_protocol(protocol_of(data, file), source=file, overwrite=overwrite)
        return
    if not is_sweep(data):
        _only_for_sweeps(file, ray)
        from steerlab._cli.runner import run_experiment

        run_experiment(experiment_of(data, file), source=file, overwrite=overwrite)
        return
    from steerlab._cli.sweep_runner import run_sweep_file
    from steerlab.experiment.scaling import RayWorkers

    placed = RayWorkers(**given) if ray else None
    run_sweep_file(sweep_of(data, file), source=file, ray=placed, overwrite=overwrite)


def _check_options(ray: bool, given: dict[str, float]) -> None:
    from steerlab.core.errors import InputError

    if given and not ray:
        raise InputError(f"--{next(iter(given)).replace('_', '-')} needs --ray, which runs a sweep on several workers.")


def _only_for_sweeps(file: Path, ray: bool) -> None:
    from steerlab.core.errors import InputError

    if ray:
        raise InputError(f"{file} is one experiment; --ray runs the cells of a sweep, a file with base and grid.")
