"""A worker's steering: which request sits in which slot, what each pass holds, and what was edited and read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steerlab.engines.vllm.wire.config import SteeringConfig
from steerlab.engines.vllm.wire.request_spec import RequestSpec
from steerlab.engines.vllm.wire.runs import Runs, clip, positions_in
from steerlab.engines.vllm.worker.measuring import Measuring
from steerlab.engines.vllm.worker.request_record import RequestRecord
from steerlab.engines.vllm.worker.tables import POSITION, Tables, to_device

STAGED = 1 << 26
"""Bytes of directions that cross to the device in one go; vLLM leaves little of its memory free."""

_NO_EDITS = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.float32)


@dataclass(frozen=True)
class RankPlan:
    """A compiled plan's part on this rank.

    Attributes:
        rows: index of each edit's direction among all of a slot-0 request, in the flattened tables.
        layers: per edit, which of this rank's layers it follows.
        places: per edit, its place among the directions there.
        edits: which of the plan's edits they are.
        groups: which of a request's positions each edit takes.
        units: unit directions, on the host where a GPU can fetch them.
        params: their parameters.
        counts: directions per layer of this rank.
    """

    rows: np.ndarray
    layers: np.ndarray
    places: np.ndarray
    edits: np.ndarray
    groups: np.ndarray
    units: Tensor
    params: np.ndarray
    counts: np.ndarray


class SteeringState:
    """Slots, plans and records of one worker.

    Args:
        config: what is wired.
        tables: the operator's buffers.
        layers: the wired layers of this rank, in the order of the tables.
        measuring: what is notified of each request and pass; None on a pipeline stage without the LM head.
    """

    def __init__(
        self, config: SteeringConfig, tables: Tables, layers: Sequence[int], measuring: Measuring | None = None
    ) -> None:
        self.config, self.tables, self.layers, self.measuring = config, tables, list(layers), measuring
        n_slots = tables.counts.shape[1]
        self.plans: dict[str, RankPlan] = {}
        self.records: dict[str, RequestRecord] = {}
        self._in_slots: dict[int, RequestRecord] = {}
        self._arriving: dict[int, tuple[RankPlan, RequestSpec]] = {}  # not in the tables yet
        self._departed: dict[int, RequestRecord] = {}  # tallies still in the tables
        self._is_edited = np.zeros(n_slots, dtype=bool)
        self._is_known = np.zeros(n_slots, dtype=bool)
        self._reads = np.zeros(n_slots, dtype=bool)
        self._begun = np.zeros(n_slots, dtype=np.int64)
        self._ended = np.zeros(n_slots, dtype=np.int64)
        self._dirty = 0  # tokens of the last pass that were not all −1
        self._last: tuple[np.ndarray, np.ndarray] | None = None  # slots and positions that the tables hold a token of
        self._pending: list[tuple[RequestRecord, list[int], int]] = []

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
        mine = np.array([e for e, layer in enumerate(layers) if layer in self.layers], dtype=np.int64)
        here = np.array([self.layers.index(layers[e]) for e in mine], dtype=np.int64)
        where = np.asarray(places, dtype=np.int64)[mine]
        _, n_slots, room, _ = self.tables.units.shape
        self.plans[name] = RankPlan(
            rows=here * n_slots * room + where,
            layers=here,
            places=where,
            edits=mine,
            groups=np.asarray(groups, dtype=np.int64)[mine],
            units=_pinned(units[mine], self.tables.units.device),
            params=params[mine],
            counts=np.bincount(here, minlength=len(self.layers)).astype(np.int32),
        )

    def enter(self, slot: int, spec: RequestSpec | None) -> None:
        """A request takes a slot; one that comes back after a preemption goes on with its record."""
        self.leave(slot)
        if spec is None:
            return
        self._last = None
        record = self.records.setdefault(spec.row, RequestRecord(spec))
        self._in_slots[slot] = record
        if self.measuring is not None:
            self.measuring.enter(slot, record)
        self._is_known[slot], self._reads[slot] = True, bool(spec.read)
        self._begun[slot] = self._ended[slot] = -1
        if spec.plan is None:
            return
        plan = self.plans.get(spec.plan)
        if plan is None:
            record.problem = f"its plan {spec.plan} is not held by this worker"
        elif len(plan.rows):
            self._arriving[slot] = (plan, spec)
            self._is_edited[slot] = True

    def _catch_up(self) -> None:
        """Brings the tables up to date with who has left and entered since the last pass, all requests at once.

        No device synchronisation: what earlier passes still have to do there comes before this.
        """
        if self._departed:
            slots = to_device(np.fromiter(self._departed, dtype=np.int64), self.tables.tallies.device)
            copies = self.tables.tallies.index_select(1, slots).transpose(0, 1).contiguous()
            for record, copy in zip(self._departed.values(), copies.unbind(), strict=True):
                record.tallies.append(copy)
            self._departed.clear()
        if self._arriving:
            entering = [(slot, *what) for slot, what in self._arriving.items()]
            largest = max(plan.units.nbytes for _, plan, _ in entering)
            at_once = max(1, STAGED // largest)
            for start in range(0, len(entering), at_once):
                self._fill(*zip(*entering[start : start + at_once], strict=True))
            self._arriving.clear()

    def _fill(self, slots: Sequence[int], plans: Sequence[RankPlan], specs: Sequence[RequestSpec]) -> None:
        """Writes directions, parameters and positions of several requests into their slots."""
        tables, device = self.tables, self.tables.units.device
        room, width = tables.units.shape[2:]
        rows = np.concatenate([plan.rows + slot * room for slot, plan in zip(slots, plans, strict=True)])
        there = to_device(rows, device)
        units = torch.empty((len(rows), width), dtype=torch.float32, device=device)
        for part, plan in zip(units.split([len(plan.rows) for plan in plans]), plans, strict=True):
            part.copy_(plan.units, non_blocking=True)
        tables.units.view(-1, width).index_copy_(0, there, units)
        params = np.concatenate([plan.params for plan in plans])
        tables.params.view(-1, 5).index_copy_(0, there, to_device(params, device))
        runs = self._run_table(plans, specs)
        tables.runs.view(-1, self.config.max_runs, 2).index_copy_(0, there, to_device(runs, device))
        tables.tallies.view(-1, 2).index_fill_(0, there, 0.0)
        counts = np.stack([plan.counts for plan in plans], axis=1)
        tables.counts.index_copy_(1, to_device(np.array(slots, dtype=np.int64), device), to_device(counts, device))

    def _run_table(self, plans: Sequence[RankPlan], specs: Sequence[RequestSpec]) -> np.ndarray:
        """Positions of every edit of some requests, as the tables hold them; [edits, runs, 2]."""
        padded: dict[tuple[Runs, ...], np.ndarray] = {}  # most requests of a call act at the same positions
        for groups in {spec.groups for spec in specs}:
            padded[groups] = np.zeros((len(groups), self.config.max_runs, 2), dtype=np.int32)
            for group, found in enumerate(groups):
                padded[groups][group, : len(found)] = np.array(found, dtype=np.int32).reshape(-1, 2)
        return np.concatenate([padded[spec.groups][plan.groups] for plan, spec in zip(plans, specs, strict=True)])

    def leave(self, slot: int) -> None:
        """A request leaves its slot: finished, or preempted."""
        record = self._in_slots.pop(slot, None)
        if record is None:
            return
        self._last = None
        if self.measuring is not None:
            self.measuring.leave(slot)
        self._close_run(slot, record)
        if self._arriving.pop(slot, None) is None and self._is_edited[slot]:
            self._departed[slot] = record
        self._is_edited[slot] = self._is_known[slot] = self._reads[slot] = False

    def begin(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """States what the coming pass holds: per request its slot, the first position and the number of tokens."""
        if self.measuring is not None:
            self.measuring.begin(slots, starts, lengths)
        if self._goes_on(slots, starts, lengths):
            self._advance(slots, starts)
            return
        self.collect()
        self._catch_up()
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
        self._last = (slots.copy(), starts.copy()) if (lengths == 1).all() and not self._pending else None

    def _goes_on(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> bool:
        """Whether every request of the last pass, and no other, goes on by one token: most passes of a generation."""
        if self._last is None or len(slots) != len(self._last[0]):
            return False
        last_slots, last_starts = self._last
        return bool((lengths == 1).all() and (slots == last_slots).all() and (starts == last_starts + 1).all())

    def _advance(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """The tables of the last pass, every token one further: a step on the host may take as long as the device's."""
        self.tables.tokens[: len(slots), POSITION].add_(1)
        self._ended[slots] = starts + 1
        self._last = (slots.copy(), starts.copy())

    def begin_empty(self) -> None:
        """States that nothing in the coming pass is edited, read or measured."""
        if self.measuring is not None:
            self.measuring.begin_empty()
        self._last = None
        self.collect()
        self._catch_up()
        if self._dirty:
            self.tables.tokens[: self._dirty].fill_(-1)
            self._dirty = 0

    def _extend_runs(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        jumped = starts != self._ended[slots]
        for slot, start in zip(slots[jumped].tolist(), starts[jumped].tolist(), strict=True):
            self._close_run(slot, self._in_slots[slot])
            self._begun[slot] = start
        self._ended[slots] = starts + lengths

    def _close_run(self, slot: int, record: RequestRecord) -> None:
        if self._begun[slot] >= 0:
            record.ran.append((int(self._begun[slot]), int(self._ended[slot])))
        self._begun[slot] = self._ended[slot] = -1

    def _plan_reading(
        self, table: np.ndarray, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, firsts: np.ndarray
    ) -> None:
        """Gives every wanted token of the pass a row of `readings`."""
        taken = 0
        for slot, start, length, first in zip(slots, starts, lengths, firsts, strict=True):
            if not self._reads[slot]:
                continue
            record = self._in_slots[slot]
            wanted = positions_in(clip(record.spec.read, int(start), int(start + length)))
            if taken + len(wanted) > self.config.capture_tokens:
                record.problem = f"one pass would read more than capture_tokens={self.config.capture_tokens} positions"
                continue
            places = np.array(wanted, dtype=np.int64) - start + first
            table[places, 2] = np.arange(taken, taken + len(wanted))
            self._pending.append((record, wanted, taken))
            taken += len(wanted)

    def collect(self) -> None:
        """Takes what the last pass read out of the buffer, before the next one overwrites it."""
        for record, positions, start in self._pending:
            record.read.append((positions, self.tables.readings[:, start : start + len(positions)].clone()))
        self._pending.clear()

    def settle(self, rows: Sequence[str]) -> dict[str, RequestRecord]:
        """Closes the records of some requests and hands them over; of rows that never came here there are none."""
        self.collect()
        wanted = set(rows)
        for slot in [slot for slot, record in self._in_slots.items() if record.spec.row in wanted]:
            self.leave(slot)
        self._catch_up()
        return {row: self.records.pop(row) for row in rows if row in self.records}

    def tallies(self, records: Iterable[RequestRecord]) -> list[tuple[np.ndarray, np.ndarray]]:
        """What each request's edits did on this rank.

        Returns:
            Per record which edits these are, and per edit the tokens edited and the sum of ‖Δx‖/‖x‖; [edits, 2].
        """
        given = list(records)
        stays = [copy for record in given for copy in record.tallies]
        counted = iter(torch.stack(stays).cpu().numpy()) if stays else iter(())  # the only device synchronisation
        return [self._of_edits(record, [next(counted) for _ in record.tallies]) for record in given]

    def _of_edits(self, record: RequestRecord, stays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        plan = self.plans.get(record.spec.plan or "")
        if plan is None:
            return _NO_EDITS
        whole = np.zeros((len(plan.edits), 2), dtype=np.float32)
        for stay in stays:
            whole += stay[plan.layers, plan.places]
        return plan.edits, whole


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """On the host, where a GPU can fetch it without synchronisation."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
