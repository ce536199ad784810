"""Results on disk: a JSON file, and beside it a safetensors file that the JSON names by its content.

The tensors are written first, under a name made of their hash; the JSON file, replaced in one step, then points to
them. A reader sees the old pair or the new one, and notices a damaged file. Graphs are not kept.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from steerlab.core.errors import DataError
from steerlab.core.files import write_atomic
from steerlab.core.hashing import bytes_hash
from steerlab.core.policy import SamplingPolicy
from steerlab.sequences.diagnostics import COLUMNS, DiagnosticsResults, pack_of
from steerlab.sequences.types import BatchedSequences, LogprobResults

T = TypeVar("T")
_FORMAT = 1


def save_sequences(sequences: BatchedSequences, path: str | Path) -> Path:
    """Writes sequences; prompts and examples must be JSON-serialisable."""
    tensors = {"sequences": sequences.sequences, "attention_masks": sequences.attention_masks}
    if sequences.sampler_logqs is not None:
        tensors["sampler_logqs"] = _joined_arrays(sequences.sampler_logqs)
    names = ("prompt_lens", "gen_lens", "responses_text", "finish_reasons", "prompts", "examples")
    return _write(path, "sequences", {name: getattr(sequences, name) for name in names}, tensors)


def load_sequences(path: str | Path) -> BatchedSequences:
    """Reads what `save_sequences` wrote."""
    return _read(path, "sequences", _sequences)


def _sequences(data: dict[str, Any], tensors: dict[str, Tensor]) -> BatchedSequences:
    stored = tensors.pop("sampler_logqs", None)
    log_qs = None if stored is None else _as_arrays(_cut(stored, data["gen_lens"]))
    fields: dict[str, Any] = {**data, **tensors}
    return BatchedSequences(**fields, sampler_logqs=log_qs)


def save_logprobs(results: LogprobResults, path: str | Path) -> Path:
    """Writes scores."""
    lens = [[len(values) for values in row] for row in results.logprobs]
    tensors = {"logprobs": _joined(results.logprobs), "token_logqs": _joined(results.token_logqs)}
    computed = [[len(values) for values in row] for row in results.rb_entropies] == lens
    if computed:
        tensors["rb_entropies"] = _joined_arrays(results.rb_entropies)
    if results.rb_entropies_torch is not None:
        tensors["rb_entropies_torch"] = _joined(results.rb_entropies_torch)
    if results.baseline_feats_torch is not None:
        tensors["baseline_feats_torch"] = _joined(results.baseline_feats_torch)
    rewards = [[None if math.isnan(value) else value for value in row] for row in results.rewards]
    return _write(path, "logprobs", {"lens": lens, "rewards": rewards, "policy": asdict(results.policy)}, tensors)


def load_logprobs(path: str | Path) -> LogprobResults:
    """Reads what `save_logprobs` wrote."""
    return _read(path, "logprobs", _logprobs)


def _logprobs(data: dict[str, Any], tensors: dict[str, Tensor]) -> LogprobResults:
    parts = {name: _cut(values, data["lens"]) for name, values in tensors.items()}
    log_probs, log_qs = parts["logprobs"], parts["token_logqs"]
    empty = [[log_probs[b][g][:0] for g in range(len(row))] for b, row in enumerate(log_probs)]
    return LogprobResults(
        logprobs=log_probs,
        entropies=[[-values.numpy() for values in row] for row in log_probs],
        sequence_logprobs=[[float(values.double().sum()) for values in row] for row in log_probs],
        rb_entropies=_as_arrays(parts.get("rb_entropies", empty)),
        rewards=[[math.nan if value is None else float(value) for value in row] for row in data["rewards"]],
        rb_entropies_torch=parts.get("rb_entropies_torch"),
        baseline_feats_torch=parts.get("baseline_feats_torch"),
        token_logqs=log_qs,
        sequence_logqs=[[float(values.double().sum()) for values in row] for row in log_qs],
        policy=SamplingPolicy(**data["policy"]),
    )


def save_diagnostics(results: DiagnosticsResults, path: str | Path) -> Path:
    """Writes the per-step diagnostics; those of sequences follow from them."""
    lens = [[pack.sequence.num_tokens for pack in row] for row in results.diagnostics]
    tensors = {
        name: _joined_arrays([[getattr(pack.steps, name) for pack in row] for row in results.diagnostics])
        for name in COLUMNS
    }
    return _write(path, "diagnostics", {"lens": lens, "early_steps": results.early_steps}, tensors)


def load_diagnostics(path: str | Path) -> DiagnosticsResults:
    """Reads what `save_diagnostics` wrote."""
    return _read(path, "diagnostics", _diagnostics)


def _diagnostics(data: dict[str, Any], tensors: dict[str, Tensor]) -> DiagnosticsResults:
    parts = {name: _cut(values, data["lens"]) for name, values in tensors.items()}
    early = int(data["early_steps"])
    packs = [
        [pack_of({name: parts[name][b][g] for name in COLUMNS}, early_steps=early) for g in range(len(row))]
        for b, row in enumerate(data["lens"])
    ]
    return DiagnosticsResults(packs, early)


def _write(path: str | Path, kind: str, data: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path = _json_path(path)
    payload = save({name: values.detach().cpu().contiguous() for name, values in tensors.items()})
    tensor_file = path.with_name(f"{path.stem}-{bytes_hash(payload)}.safetensors")
    content = {"format": _FORMAT, "kind": kind, "tensors": tensor_file.name, "data": data}
    try:
        text = json.dumps(content, ensure_ascii=False)
    except TypeError as error:
        raise DataError(
            f"{kind} cannot be saved as JSON: {error}. Make prompts and examples of plain values."
        ) from error
    write_atomic(tensor_file, payload)
    write_atomic(path, text + "\n")
    own = re.compile(re.escape(path.stem) + r"-[0-9a-f]{16}\.safetensors")  # another's file is never one of ours
    for stale in path.parent.glob("*.safetensors"):
        if stale != tensor_file and own.fullmatch(stale.name):
            stale.unlink(missing_ok=True)
    return path


def _read(path: str | Path, kind: str, make: Callable[[dict[str, Any], dict[str, Tensor]], T]) -> T:
    path = _json_path(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if (stored["format"], stored["kind"]) != (_FORMAT, kind):
            raise DataError(
                f"{path} holds {stored['kind']!r} in format {stored['format']!r}, not {kind!r} in {_FORMAT}."
            )
        payload = (path.parent / Path(stored["tensors"]).name).read_bytes()
        if f"-{bytes_hash(payload)}." not in stored["tensors"]:
            raise DataError(
                f"{stored['tensors']} beside {path} is damaged: its content does not have the hash in its name."
            )
        return make(stored["data"], load(payload))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Cannot read {kind} from {path}: {type(error).__name__}: {error}.") from error


def _json_path(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".json" else path.with_name(path.name + ".json")


def _joined(nested: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.cat([values.detach().cpu() for row in nested for values in row])


def _joined_arrays(nested: Sequence[Sequence[np.ndarray]]) -> Tensor:
    return torch.from_numpy(np.concatenate([values for row in nested for values in row]))


def _as_arrays(nested: Sequence[Sequence[Tensor]]) -> list[list[np.ndarray]]:
    return [[values.numpy() for values in row] for row in nested]


def _cut(values: Tensor, lens: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Values cut into `[B][G]` parts of these lengths, copied so that no part keeps the whole alive."""
    flat = [n for row in lens for n in row]
    if sum(flat) != len(values):
        raise ValueError(f"{len(values)} values for {sum(flat)} tokens")
    bounds = list(accumulate(flat, initial=0))
    parts = iter([values[start:stop].clone() for start, stop in pairwise(bounds)])
    return [[next(parts) for _ in row] for row in lens]
