"""What the engine asks of a worker: a command and bytes in, bytes out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from steerlab.engines.vllm._wire.packets import pack, unpack
from steerlab.engines.vllm._wire.plan_tables import PlanTables
from steerlab.engines.vllm._wire.worker_reply import join_rows
from steerlab.engines.vllm._worker.request_record import (
    RequestRecord,
    gathered,
    gathered_distribution,
    gathered_supports,
)
from steerlab.engines.vllm._worker.wiring import ATTRIBUTE, Wired


def answer(worker: Any, command: str, payload: bytes) -> bytes:
    """Carries out one command."""
    wired = worker.__dict__.get(ATTRIBUTE)
    if command == "describe":
        return pack(_describe(worker, wired))
    return _COMMANDS[command](wired, worker, *unpack(payload))


def _describe(worker: Any, wired: Wired | str | None) -> dict[str, Any]:
    if not isinstance(wired, Wired):
        return {"wired": False, "reason": wired or ""}
    return {
        "wired": True,
        "points": wired.state.points,
        "rule": wired.probed.rule,
        "digest": wired.probed.digest,
        "runner": wired.runner,
        "head": None if wired.state.measuring is None else wired.state.measuring.head.route,
        **_ranks(),
    }


def _ranks() -> dict[str, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return {"tp": get_tp_group().rank_in_group, "pp": get_pp_group().rank_in_group}


def _hold(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    for name in header:
        wired.state.hold(name, PlanTables.of_arrays(name, arrays))
    return b""


def _drop(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    for name in header:
        wired.state.plans.pop(name, None)
    return b""


def _settle(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    """Records of requests that have ended; activations from one tensor-parallel rank only, all hold the same."""
    ranks = _ranks()
    records = wired.state.settle(header)
    large = _streams(records) | _distributions(records) | _supports(records) if ranks["tp"] == 0 else {}
    about = {"problems": {row: record.problem for row, record in records.items() if record.problem}}
    return pack(
        {"rows": list(records), **about, "points": wired.state.points, **ranks},
        _by_row(wired, records) | large,
    )


def _forget(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    """Drops the records of a call that was interrupted."""
    wired.state.settle(header)
    return b""


def _by_row(wired: Wired, records: dict[str, RequestRecord]) -> dict[str, np.ndarray]:
    """What happened to every request, as `WorkerReply` reads it."""
    every = list(records.values())
    tallies = wired.state.tallies(every)
    measured = [gathered(record) for record in every]
    return join_rows(
        {
            "ran": [record.ran for record in every],
            "edits": [edits for edits, _ in tallies],
            "tally": [values for _, values in tallies],
            "answers": wired.state.answers(every),
            "read": [[p for positions, _ in record.read for p in positions] for record in every],
            "at": [at for at, _ in measured],
            "measured": [values.ravel() for _, values in measured],
        }
    )


def _streams(records: dict[str, RequestRecord]) -> dict[str, np.ndarray]:
    """Activations that were read, by row: float32 [hook points, positions, d_model]."""
    return {
        f"streams.{row}": torch.cat([part for _, part in record.read], dim=1).to("cpu", torch.float32).numpy()
        for row, record in records.items()
        if record.read
    }


def _distributions(records: dict[str, RequestRecord]) -> dict[str, np.ndarray]:
    """Log-distributions by row: float32 [positions, d_vocab]."""
    found = {row: gathered_distribution(record) for row, record in records.items() if record.measured}
    return {f"distribution.{row}": values for row, values in found.items() if values is not None}


def _supports(records: dict[str, RequestRecord]) -> dict[str, np.ndarray]:
    """The sets that tokens were drawn from, by row, as bytes."""
    found = zip(records, gathered_supports(list(records.values())), strict=True)
    return {f"supports.{row}": np.frombuffer(s.to_bytes(), dtype=np.uint8) for row, s in found if s is not None}


def _memory(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    """Bytes of tensors on this worker's GPU: now, at most since the last such question, and reserved to score."""
    measuring = wired.state.measuring
    reserved = 0 if measuring is None else measuring.buffers.n_bytes
    if worker.device.type != "cuda":
        return pack({"now": 0, "peak": 0, "reserved": reserved})
    now, peak = torch.cuda.memory_allocated(worker.device), torch.cuda.max_memory_allocated(worker.device)
    torch.cuda.reset_peak_memory_stats(worker.device)
    return pack({"now": now, "peak": peak, "reserved": reserved})


_COMMANDS: dict[str, Callable[..., bytes]] = {
    "hold": _hold,
    "drop": _drop,
    "settle": _settle,
    "forget": _forget,
    "memory": _memory,
}
