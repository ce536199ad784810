"""A worker's steering: which request sits in which slot, what each pass holds, and what was edited and read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from steerlab.engines.vllm.config import SteeringConfig
from steerlab.engines.vllm.specs import RequestSpec, clip, positions_in
from steerlab.engines.vllm.tables import Tables


@dataclass(frozen=True)
class HeldPlan:
    """A compiled plan's part on this rank.

    Attributes:
        rows: index of each edit's direction among all of a slot-0 request, in the flattened tables.
        places: per edit (layer index on this rank, direction), for reading the tallies.
        edits: which of the plan's edits they are.
        groups: which of a request's positions each edit takes.
        units: unit directions, on the host.
        params: their parameters, on the host.
        counts: directions per layer of this rank, on the device.
    """

    rows: Tensor
    places: tuple[tuple[int, int], ...]
    edits: tuple[int, ...]
    groups: tuple[int, ...]
    units: Tensor
    params: Tensor
    counts: Tensor


@dataclass
class Account:
    """What happened to one request on this rank.

    Attributes:
        spec: what it asked for.
        problem: why its edits could not be made, if so.
        ran: runs of positions that went through the model, in order; a position may occur twice.
        tallies: copies of the slot's tallies, one per stay in a slot; [layers, directions, 2].
        read: positions that were read, in order, and their streams [layers, positions, d_model].
    """

    spec: RequestSpec
    problem: str = ""
    ran: list[tuple[int, int]] = field(default_factory=list)
    tallies: list[Tensor] = field(default_factory=list)
    read: list[tuple[list[int], Tensor]] = field(default_factory=list)


class SteeringState:
    """Slots, plans and accounts of one worker.

    Args:
        config: what is wired.
        tables: the operator's buffers.
        layers: the wired layers of this rank, in the order of the tables.
    """

    def __init__(self, config: SteeringConfig, tables: Tables, layers: Sequence[int]) -> None:
        self.config, self.tables, self.layers = config, tables, list(layers)
        n_slots = tables.counts.shape[1]
        self.plans: dict[str, HeldPlan] = {}
        self.accounts: dict[str, Account] = {}
        self._sitting: dict[int, Account] = {}
        self._is_edited = np.zeros(n_slots, dtype=bool)
        self._is_known = np.zeros(n_slots, dtype=bool)
        self._reads = np.zeros(n_slots, dtype=bool)
        self._begun = np.zeros(n_slots, dtype=np.int64)
        self._ended = np.zeros(n_slots, dtype=np.int64)
        self._dirty = 0  # tokens of the last pass that were not all −1
        self._pending: list[tuple[Account, list[int], int]] = []

    def hold(
        self,
        name: str,
        layers: Sequence[int],
        places: Sequence[int],
        groups: Sequence[int],
        units: np.ndarray,
        params: np.ndarray,
    ) -> None:
        """Keeps a compiled plan, its edits on other ranks left out."""
        mine = [e for e, layer in enumerate(layers) if layer in self.layers]
        where = tuple((self.layers.index(layers[e]), places[e]) for e in mine)
        _, n_slots, room, _ = self.tables.units.shape
        counts = [sum(layer == index for layer, _ in where) for index in range(len(self.layers))]
        device = self.tables.units.device
        self.plans[name] = HeldPlan(
            rows=torch.tensor([layer * n_slots * room + k for layer, k in where], dtype=torch.long, device=device),
            places=where,
            edits=tuple(mine),
            groups=tuple(groups[e] for e in mine),
            units=_pinned(units[mine], device),
            params=_pinned(params[mine], device),
            counts=torch.tensor(counts, dtype=torch.int32, device=device),
        )

    def enter(self, slot: int, spec: RequestSpec | None) -> None:
        """A request takes a slot; one that comes back after a preemption goes on with its account."""
        self.leave(slot)
        if spec is None:
            return
        account = self.accounts.setdefault(spec.row, Account(spec))
        self._sitting[slot] = account
        self._is_known[slot], self._reads[slot] = True, bool(spec.read)
        self._begun[slot] = self._ended[slot] = -1
        if spec.plan is not None:
            plan = self.plans.get(spec.plan)
            if plan is None:
                account.problem = f"its plan {spec.plan} is not held by this worker"
            else:
                self._seat(slot, plan, spec)

    def _seat(self, slot: int, plan: HeldPlan, spec: RequestSpec) -> None:
        """Writes a plan's directions, parameters and positions into a slot, without waiting for the device."""
        if not plan.places:
            return
        tables, room = self.tables, self.tables.units.shape[2]
        rows = plan.rows + slot * room
        units, params = (part.to(rows.device, non_blocking=True) for part in (plan.units, plan.params))
        tables.units.view(-1, tables.units.shape[-1]).index_copy_(0, rows, units)
        tables.params.view(-1, 5).index_copy_(0, rows, params)
        runs = np.zeros((len(plan.groups), self.config.max_runs, 2), dtype=np.int32)
        for edit, group in enumerate(plan.groups):
            found = spec.groups[group]
            runs[edit, : len(found)] = np.array(found, dtype=np.int32).reshape(-1, 2)
        tables.runs.view(-1, self.config.max_runs, 2).index_copy_(0, rows, to_device(runs, tables.runs.device))
        tables.tallies.view(-1, 2).index_fill_(0, rows, 0.0)
        tables.counts[:, slot] = plan.counts
        self._is_edited[slot] = True

    def leave(self, slot: int) -> None:
        """A request leaves its slot: finished, or preempted."""
        account = self._sitting.pop(slot, None)
        if account is None:
            return
        self._close_run(slot, account)
        if self._is_edited[slot]:
            account.tallies.append(self.tables.tallies[:, slot].clone())
        self._is_edited[slot] = self._is_known[slot] = self._reads[slot] = False

    def begin(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """States what the coming pass holds: per request its slot, the first position and the number of tokens."""
        self.collect()
        known = self._is_known[slots]
        if not known.any():
            self.begin_empty()
            return
        self._extend_runs(slots[known], starts[known], lengths[known])
        acting = np.where(self._is_edited[slots], slots, -1)
        total = int(lengths.sum())
        firsts = np.cumsum(lengths) - lengths
        table = np.full((max(total, self._dirty), 3), -1, dtype=np.int32)
        table[:total, 0] = np.repeat(acting, lengths)
        table[:total, 1] = np.arange(total) - np.repeat(firsts - starts, lengths)
        if self._reads[slots].any():
            self._plan_reading(table, slots, starts, lengths, firsts)
        to_device(table, self.tables.tokens.device, out=self.tables.tokens[: len(table)])
        self._dirty = total

    def begin_empty(self) -> None:
        """States that nothing in the coming pass is edited or read."""
        self.collect()
        if self._dirty:
            self.tables.tokens[: self._dirty].fill_(-1)
            self._dirty = 0

    def _extend_runs(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        jumped = starts != self._ended[slots]
        for slot, start in zip(slots[jumped].tolist(), starts[jumped].tolist(), strict=True):
            self._close_run(slot, self._sitting[slot])
            self._begun[slot] = start
        self._ended[slots] = starts + lengths

    def _close_run(self, slot: int, account: Account) -> None:
        if self._begun[slot] >= 0:
            account.ran.append((int(self._begun[slot]), int(self._ended[slot])))
        self._begun[slot] = self._ended[slot] = -1

    def _plan_reading(
        self, table: np.ndarray, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, firsts: np.ndarray
    ) -> None:
        """Gives every wanted token of the pass a row of `readings`."""
        taken = 0
        for slot, start, length, first in zip(slots, starts, lengths, firsts, strict=True):
            if not self._reads[slot]:
                continue
            account = self._sitting[slot]
            wanted = positions_in(clip(account.spec.read, int(start), int(start + length)))
            if taken + len(wanted) > self.config.capture_tokens:
                account.problem = f"one pass would read more than capture_tokens={self.config.capture_tokens} positions"
                continue
            places = np.array(wanted, dtype=np.int64) - start + first
            table[places, 2] = np.arange(taken, taken + len(wanted))
            self._pending.append((account, wanted, taken))
            taken += len(wanted)

    def collect(self) -> None:
        """Takes what the last pass read out of the buffer, before the next one overwrites it."""
        for account, positions, start in self._pending:
            account.read.append((positions, self.tables.readings[:, start : start + len(positions)].clone()))
        self._pending.clear()

    def settle(self, row: str) -> Account | None:
        """Closes a request's account and hands it over."""
        self.collect()
        for slot in [slot for slot, account in self._sitting.items() if account.spec.row == row]:
            self.leave(slot)
        return self.accounts.pop(row, None)

    def tally(self, account: Account) -> dict[int, tuple[float, float]]:
        """Per edit of this rank: tokens edited, and the sum of ‖Δx‖/‖x‖."""
        plan = self.plans.get(account.spec.plan or "")
        if plan is None or not account.tallies:
            return {} if plan is None else dict.fromkeys(plan.edits, (0.0, 0.0))
        total = torch.stack(account.tallies).sum(dim=0).tolist()
        return {e: tuple(total[layer][k]) for e, (layer, k) in zip(plan.edits, plan.places, strict=True)}


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """On the host, where a GPU can fetch it without anybody waiting."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: np.ndarray, device: torch.device, out: Tensor | None = None) -> Tensor:
    """Copies to the device without waiting for it."""
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(array, device=device, out=out)
