"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from steerlab.steering.positions.where import Where

DEFAULT_MODEL = "smollm2-135m"


class Dtype(StrEnum):
    """Number formats of weights and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class Position(StrEnum):
    """Names of the positions a plan can edit."""

    DEFAULT = "default"
    ALL = "all"
    PROMPT = "prompt"
    GENERATED = "generated"
    LAST_PROMPT = "last_prompt"

    def where(self) -> "Where":
        """The positions themselves."""
        from steerlab.steering.positions import where

        return getattr(where, self.value)()


ModelOption = Annotated[str, typer.Option("--model", metavar="MODEL", help="Alias, model directory or hub id.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of weights and activations.")]
VectorOption = Annotated[
    Path | None,
    typer.Option("--vector", metavar="FILE", help="Steer with the vector in this file.", show_default=False),
]
LayerOption = Annotated[
    int | None, typer.Option("--layer", help="Which of the file's vectors, if it holds several.", show_default=False)
]
DoseOption = Annotated[
    float | None, typer.Option("--dose", help="Strength, in median norms of the stream there.", show_default=False)
]
CoefOption = Annotated[
    float | None, typer.Option("--coef", help="Strength as a raw coefficient instead.", show_default=False)
]
WhereOption = Annotated[
    Position,
    typer.Option("--where", help="Positions to edit; default means the last prompt token and all generated ones."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
