"""What inspect_ai's entry point imports: the name `steerlab/…`, and nothing heavy until such a model is asked for."""

from inspect_ai.model import ModelAPI, modelapi  # pyright: ignore[reportMissingImports]


@modelapi(name="steerlab")
def steerlab() -> type[ModelAPI]:
    """The class of the models whose names begin with `steerlab/`."""
    from steerlab.scoring.inspect_ai._provider import SteerlabAPI

    return SteerlabAPI
