"""The modules that the methods of vectors call, loaded at the first call.

Files, formats and diagnostics are made of vectors and so import them; vectors, which lie below, import none of these.
`steerlab.steering` connects the two.
"""

from types import ModuleType

from steerlab.steering import vectors


def _files() -> ModuleType:
    from steerlab.steering import files

    return files


def _diagnostics() -> ModuleType:
    from steerlab.steering.extraction import diagnostics

    return diagnostics


def _gguf() -> ModuleType:
    from steerlab.steering.formats import gguf

    return gguf


def _torch_files() -> ModuleType:
    from steerlab.steering.formats import torch_files

    return torch_files


def _steering_vectors() -> ModuleType:
    from steerlab.steering.formats import steering_vectors

    return steering_vectors


def _top_tokens() -> ModuleType:
    from steerlab.steering import top_tokens

    return top_tokens


def _cosines() -> ModuleType:
    from steerlab.steering import cosines

    return cosines


vectors.connect(
    top_tokens=_top_tokens,
    cosines=_cosines,
    files=_files,
    diagnostics=_diagnostics,
    gguf=_gguf,
    torch_files=_torch_files,
    steering_vectors=_steering_vectors,
)
