"""`steerlab convert`: a vector file in another tool's format, or back."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerlab._cli.console import say
from steerlab._cli.loading import check_writable
from steerlab.core.errors import InputError

if TYPE_CHECKING:
    from steerlab.steering.vectors import VectorSet


class Format(StrEnum):
    """Formats of vector files."""

    STEERLAB = "steerlab"
    GGUF = "gguf"
    TORCH = "torch"


_SUFFIXES = {
    ".safetensors": Format.STEERLAB,
    ".gguf": Format.GGUF,
    ".pt": Format.TORCH,
    ".pth": Format.TORCH,
    ".bin": Format.TORCH,
}


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Vector file to read.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Vector file to write.", show_default=False)],
    read: Annotated[
        Format | None, typer.Option("--from", help="Format of SOURCE; its suffix tells, if left out.")
    ] = None,
    write: Annotated[Format | None, typer.Option("--to", help="Format of OUT; its suffix tells, if left out.")] = None,
    site: Annotated[str, typer.Option(help="What the layer numbers of a .pt dictionary mean.")] = "resid_post",
    layer: Annotated[
        int | None, typer.Option(help="The layer of a .pt file that holds one bare tensor.", show_default=False)
    ] = None,
    model_hint: Annotated[
        str | None,
        typer.Option(metavar="ARCH", help="For GGUF: the model's architecture, e.g. llama.", show_default=False),
    ] = None,
) -> None:
    """Convert a vector file: steerlab's .safetensors, GGUF control vectors, .pt dictionaries."""
    check_writable(out)
    wanted = write or _format_of(out)
    if wanted is Format.GGUF and model_hint is None:
        raise InputError("A GGUF control vector names the model's architecture; pass it, e.g. --model-hint llama.")
    vectors = _read(source, read or _format_of(source), site, layer)
    _write(out, wanted, vectors, model_hint or "")
    say(f"vectors      {len(vectors)}, {vectors.by_layer[0].hook_point.name} to layer {vectors.by_layer[-1].layer}")
    if wanted is not Format.STEERLAB:
        say("cards        left out: the format has no place for them")
    say(f"written to   {out}")


def _format_of(path: Path) -> Format:
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise InputError(f"The suffix of {path} tells no format ({', '.join(_SUFFIXES)}); name it with --from or --to.")
    return found


def _read(path: Path, kind: Format, site: str, layer: int | None) -> "VectorSet":
    from steerlab.steering.vectors import VectorSet

    if layer is not None and kind is not Format.TORCH:
        raise InputError("--layer is for a .pt file that holds one bare tensor; other files state their layers.")
    if kind is Format.GGUF:
        return VectorSet.from_gguf(path)
    return VectorSet.from_torch(path, site=site, layer=layer) if kind is Format.TORCH else VectorSet.load(path)


def _write(path: Path, kind: Format, vectors: "VectorSet", model_hint: str) -> None:
    if kind is Format.GGUF:
        vectors.to_gguf(path, model_hint=model_hint)
    elif kind is Format.TORCH:
        vectors.to_torch(path)
    else:
        vectors.save(path)
