"""Fetches a model from the Hugging Face hub, or says in one sentence why that failed."""

from pathlib import Path

from steerlab.core.errors import ModelNotFoundError
from steerlab.models._hashing import weight_files

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_SUBFOLDERS = ["*/*"]


def download(hub_id: str, revision: str | None, hint: str = "") -> Path:
    """Downloads a model's configuration, tokenizer and weights into the hub's own cache.

    Args:
        hub_id: The `owner/name` of a model.
        revision: A branch, tag or commit; None is the default branch.
        hint: Another way to get this model, to be named if the download fails.

    Returns:
        The snapshot's directory, named after its commit.

    Raises:
        ModelNotFoundError: There is no such model or revision, it needs access, or the hub cannot be reached.
    """
    path = _snapshot(hub_id, revision, _FILES, hint)
    if not weight_files(path):
        path = _snapshot(hub_id, revision, [*_FILES, "*.bin"], hint)
    if not (path / "config.json").is_file() or not weight_files(path):
        raise ModelNotFoundError(
            f"The hub's {hub_id!r} has no config.json with *.safetensors or *.bin weights beside it."
        )
    return path


def _snapshot(hub_id: str, revision: str | None, files: list[str], hint: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=files, ignore_patterns=_SUBFOLDERS))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        httpx.HTTPError,
        OSError,
    ) as error:
        also = f"; {hint}" if hint else ""
        raise ModelNotFoundError(f"{_reason(error, hub_id, revision)}{also}.") from error


def _reason(error: Exception, hub_id: str, revision: str | None) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return f"{hub_id!r} is neither an alias, nor a directory, nor a possible hub id"
    if isinstance(error, GatedRepoError):
        return f"The model {hub_id!r} is gated: ask for access on its hub page, then log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"The model {hub_id!r} has no revision {revision!r}; leave revision out or name an existing one"
    if isinstance(error, RepositoryNotFoundError):
        return f"The hub has no model {hub_id!r}, or it is private: check the name, or log in with `hf auth login`"
    at = f" at revision {revision!r}" if revision else ""
    return (
        f"The model {hub_id!r}{at} is not on this computer and the hub could not be reached "
        "(check the network and HF_HUB_OFFLINE, or give a local model directory)"
    )
