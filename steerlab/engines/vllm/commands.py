"""What the engine asks of a worker: a command and bytes in, bytes out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from steerlab.engines.vllm.packets import pack, unpack
from steerlab.engines.vllm.wiring import ATTRIBUTE, Wired


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
        "layers": wired.state.layers,
        "rule": wired.probed.rule,
        "digest": wired.probed.digest,
        "runner": wired.runner,
        **_ranks(),
    }


def _ranks() -> dict[str, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return {"tp": get_tp_group().rank_in_group, "pp": get_pp_group().rank_in_group}


def _hold(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    for name, plan in header.items():
        wired.state.hold(
            name, plan["layers"], plan["places"], plan["groups"], arrays[f"{name}.units"], arrays[f"{name}.params"]
        )
    return b""


def _drop(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    for name in header:
        wired.state.plans.pop(name, None)
    return b""


def _settle(wired: Wired, worker: Any, header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    """Accounts of requests that have ended; activations from one tensor-parallel rank only, all hold the same."""
    ranks = _ranks()
    described, read = {}, {}
    for row in header:
        account = wired.state.settle(row)
        if account is None:
            continue
        described[row] = {
            "problem": account.problem,
            "ran": account.ran,
            "tally": sorted(wired.state.tally(account).items()),
            "read": [position for positions, _ in account.read for position in positions],
        }
        if account.read and ranks["tp"] == 0:
            streams = torch.cat([stream for _, stream in account.read], dim=1)
            read[row] = streams.to(device="cpu", dtype=torch.float32).numpy()
    return pack({"accounts": described, "layers": wired.state.layers, **ranks}, read)


_COMMANDS: dict[str, Callable[..., bytes]] = {"hold": _hold, "drop": _drop, "settle": _settle}
