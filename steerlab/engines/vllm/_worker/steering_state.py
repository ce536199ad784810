"""A worker's steering: which request sits in which slot, what each pass holds, and what was edited and read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.plan_tables import ABOVE, ASKS, BELOW, COSINE, PROBE, PlanTables, places_of
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.engines.vllm._wire.runs import ALWAYS, Runs, RunsByTokens, clip, positions_in, size
from steerlab.engines.vllm._worker.measuring import Measuring
from steerlab.engines.vllm._worker.request_record import RequestRecord
from steerlab.engines.vllm._worker.tables import ANSWERS, POSITION, Tables, to_device
from steerlab.engines.vllm._worker.token_rules import Following, Known, Rules

STAGED = 1 << 26
"""Bytes of directions that cross to the device in one go; vLLM leaves little of its memory free."""

_NO_ANSWERS = np.zeros((0, 2), dtype=np.float32)
NOWHERE: Mapping[int, int] = {}
_NO_EDITS = np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.float32)


@dataclass(frozen=True)
class Rows:
    """Rows that a plan writes into one of the tables.

    Attributes:
        index: of each row among all of a request in slot 0, in the flattened table.
        values: what is written.
    """

    index: np.ndarray
    values: Any


@dataclass(frozen=True)
class RankPlan:
    """A compiled plan's part on this rank.

    Attributes:
        points: per edit, at which of this rank's hook points it acts.
        places: its place among the edits there.
        which: which of the plan's edits they are.
        groups: which of a request's positions each edit takes.
        edits: rows of the table of edits; those of runs and tallies have the same index.
        terms: rows of the table of terms.
        vectors: rows of the table of directions, on the host where a GPU can fetch them.
        probes: rows of the table of probes.
        limits: of each condition; without how many positions it reads.
        counts: edits per hook point of this rank.
        rules: what decides where positions depend on tokens.
        problem: why it cannot be carried out here, if so.
    """

    points: np.ndarray
    places: np.ndarray
    which: np.ndarray
    groups: np.ndarray
    edits: Rows
    terms: Rows
    vectors: Rows
    probes: Rows
    limits: np.ndarray
    counts: np.ndarray
    rules: Rules
    problem: str = ""


class SteeringState:
    """Slots, plans and records of one worker.

    Args:
        config: what is wired.
        tables: the operator's buffers.
        points: which of the wired hook points this rank holds, in the order of the tables.
        measuring: what is notified of each request and pass; None on a pipeline stage without the LM head.
    """

    def __init__(
        self, config: SteeringConfig, tables: Tables, points: Sequence[int], measuring: Measuring | None = None
    ) -> None:
        self.config, self.tables, self.points, self.measuring = config, tables, list(points), measuring
        n_slots = tables.counts.shape[1]
        self.following = Following(config, tables.tokens, n_slots)
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

    def hold(self, name: str, plan: PlanTables) -> None:
        """Keeps a compiled plan, its edits on other ranks left out."""
        mine, here = self._here(plan.points)
        room, n_vectors = self.config.max_edits, self.config.max_directions
        my_terms, term_points = self._here(plan.term_points)
        my_vectors, vector_points = self._here(plan.vector_points)
        vectors = _pinned(plan.vectors[my_vectors], self.tables.vectors.device)
        self.plans[name] = RankPlan(
            points=here,
            places=plan.places[mine],
            which=mine,
            groups=plan.groups[mine],
            edits=Rows(self._first_row(here, room) + plan.places[mine], plan.edits[mine]),
            terms=Rows(self._first_row(term_points, room) + places_of(term_points), plan.terms[my_terms]),
            vectors=Rows(self._first_row(vector_points, n_vectors) + places_of(vector_points), vectors),
            probes=self._probes(plan),
            limits=plan.conditions[:, [ABOVE, BELOW]],
            counts=np.bincount(here, minlength=len(self.points)).astype(np.int32),
            rules=Rules(plan.rule_limits, plan.rule_sequences),
            problem=self._problem(plan, mine),
        )

    def _probes(self, plan: PlanTables) -> Rows:
        mine, points = self._here(plan.condition_points)
        values = np.stack([plan.conditions[mine, PROBE] + 1, plan.conditions[mine, COSINE]], axis=1)
        return Rows(self._first_row(points, self.config.max_conditions) + mine, values.astype(np.float32))

    def _problem(self, plan: PlanTables, mine: np.ndarray) -> str:
        is_asked = bool(plan.edits[mine, ASKS].any())
        if is_asked and not np.isin(plan.condition_points, self.points).all():
            return "its condition is read on another pipeline stage than it edits; use tensor parallelism alone"
        return ""

    def _here(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which entries are at hook points of this rank, and at which of them."""
        mine = np.flatnonzero(np.isin(points, self.points))
        return mine, np.array([self.points.index(point) for point in points[mine].tolist()], dtype=np.int64)

    def _first_row(self, points: np.ndarray, room: int) -> np.ndarray:
        """Index of the first row of slot 0 at some hook points, in a table with so much room for each."""
        return points * self.tables.counts.shape[1] * room

    def enter(self, slot: int, spec: RequestSpec | None, known: Known = tuple) -> None:
        """A request takes a slot; one that comes back after a preemption goes on with its record.

        Args:
            slot: which.
            spec: what it asks for.
            known: gives its tokens, as far as the host knows them.
        """
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
        elif plan.problem:
            record.problem = plan.problem
        elif len(plan.which):
            self._arriving[slot] = (plan, spec)
            self._is_edited[slot] = True
            if spec.follows:
                self.following.enter(slot, plan.rules, record, known)

    def _catch_up(self, starts: Mapping[int, int] = NOWHERE) -> None:
        """Brings the tables up to date with who has left and entered since the last pass, all requests at once.

        Args:
            starts: by slot, the position at which a request goes on.

        No device synchronisation: what earlier passes still have to do there comes before this.
        """
        if self._departed:
            slots = to_device(np.fromiter(self._departed, dtype=np.int64), self.tables.tallies.device)
            copies = self.tables.tallies.index_select(1, slots).transpose(0, 1).contiguous()
            answers = self.tables.answers.index_select(0, slots)
            for record, copy, answer in zip(self._departed.values(), copies.unbind(), answers.unbind(), strict=True):
                record.tallies.append(copy)
                record.answers = answer
            self._departed.clear()
        if self._arriving:
            entering = [(slot, *what) for slot, what in self._arriving.items()]
            largest = max(plan.vectors.values.nbytes for _, plan, _ in entering)
            at_once = max(1, STAGED // largest)
            for start in range(0, len(entering), at_once):
                part = entering[start : start + at_once]
                self._fill(*zip(*part, strict=True))
                self._ask([(slot, plan, spec) for slot, plan, spec in part if spec.n_reads], starts)
            self._arriving.clear()

    def _fill(self, slots: Sequence[int], plans: Sequence[RankPlan], specs: Sequence[RequestSpec]) -> None:
        """Writes edits, terms, directions and positions of several requests into their slots."""
        tables, device = self.tables, self.tables.vectors.device
        room, width = tables.vectors.shape[2:]
        there = _rows_in(slots, [plan.vectors for plan in plans], room, device)
        vectors = torch.empty((len(there), width), dtype=torch.float32, device=device)
        for part, plan in zip(vectors.split([len(plan.vectors.index) for plan in plans]), plans, strict=True):
            part.copy_(plan.vectors.values, non_blocking=True)
        tables.vectors.view(-1, width).index_copy_(0, there, vectors)
        edits = _rows_in(slots, [plan.edits for plan in plans], self.config.max_edits, device)
        _write(tables.edits, edits, np.concatenate([plan.edits.values for plan in plans]))
        _write(tables.runs, edits, self._run_table(plans, specs))
        tables.tallies.view(-1, 3).index_fill_(0, edits, 0.0)
        terms = _rows_in(slots, [plan.terms for plan in plans], self.config.max_edits, device)
        _write(tables.terms, terms, np.concatenate([plan.terms.values for plan in plans]))
        taken = to_device(np.array(slots, dtype=np.int64), device)
        counts = np.stack([plan.counts for plan in plans], axis=1)
        tables.counts.index_copy_(1, taken, to_device(counts, device))
        origins = np.array([spec.origin or 0 for spec in specs], dtype=np.int32)
        tables.origins.index_copy_(0, taken, to_device(origins, device))

    def _ask(self, entering: Sequence[tuple[int, RankPlan, RequestSpec]], starts: Mapping[int, int]) -> None:
        """Writes the conditions of requests into their slots.

        One that only had to wait goes on with what its conditions have read. One that runs anew from before the first
        position that is read, as after a preemption, reads it all again.
        """
        if not entering:
            return
        tables, device = self.tables, self.tables.answers.device
        slots, plans, specs = zip(*entering, strict=True)
        tables.probes.index_fill_(1, to_device(np.array(slots, dtype=np.int64), device), 0.0)
        probes = _rows_in(slots, [plan.probes for plan in plans], self.config.max_conditions, device)
        _write(tables.probes, probes, np.concatenate([plan.probes.values for plan in plans]))
        room = self.config.max_conditions
        rows = np.concatenate([slot * room + np.arange(spec.n_reads) for slot, _, spec in entering])
        there = to_device(rows, device)
        needed = np.array([size(runs) for spec in specs for runs in spec.reads], dtype=np.float32)
        limits = np.concatenate([plan.limits for plan in plans]).astype(np.float32)
        _write(tables.limits, there, np.concatenate([limits, needed[:, None]], axis=1))
        reads = np.zeros((len(rows), self.config.max_runs, 2), dtype=np.int32)
        for row, runs in enumerate(runs for spec in specs for runs in spec.reads):
            reads[row, : len(runs)] = runs
        _write(tables.reads, there, reads)
        for slot, _, spec in entering:
            known = self._in_slots[slot].answers
            if known is None or starts.get(slot, 0) <= (spec.first_read or 0):
                tables.answers[slot] = 0.0
            else:
                tables.answers[slot] = known

    def _run_table(self, plans: Sequence[RankPlan], specs: Sequence[RequestSpec]) -> np.ndarray:
        """Positions of every edit of some requests, as the tables hold them; [edits, runs, 3]."""
        padded: dict[
            tuple[Runs | RunsByTokens, ...], np.ndarray
        ] = {}  # most requests of a call act at the same positions
        for groups in {spec.groups for spec in specs}:
            padded[groups] = np.zeros((len(groups), self.config.max_runs, 3), dtype=np.int32)
            for group, found in enumerate(groups):
                rows = [(first, last, *(truth or (ALWAYS,))) for first, last, *truth in found]
                padded[groups][group, : len(found)] = np.array(rows, dtype=np.int32).reshape(-1, 3)
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
        self.following.leave(slot)
        if self._arriving.pop(slot, None) is None and self._is_edited[slot]:
            self._departed[slot] = record
        self._is_edited[slot] = self._is_known[slot] = self._reads[slot] = False

    def begin(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ids: Tensor | None = None) -> None:
        """States what the coming pass holds.

        Args:
            slots: of its requests, in order.
            starts: the position of each one's first token.
            lengths: how many tokens it has.
            ids: of all these tokens, on the device; needed if the positions of one depend on tokens.
        """
        if not (self._in_slots or self._dirty):  # nobody is steered, and nothing is left of the last pass
            if self.measuring is not None:
                self.measuring.begin_empty()
            return
        if self.measuring is not None:
            self.measuring.begin(slots, starts, lengths)
        if self._goes_on(slots, starts, lengths):
            self._advance(slots, starts)
            self.following.advance(slots, starts, ids)
            return
        self.collect()
        self._catch_up(dict(zip(slots.tolist(), starts.tolist(), strict=True)) if self._arriving else NOWHERE)
        known = self._is_known[slots]
        if not known.any():
            self.begin_empty()
            return
        self._extend_runs(slots[known], starts[known], lengths[known])
        acting = np.where(self._is_edited[slots], slots, -1)
        total = int(lengths.sum())
        firsts = np.cumsum(lengths) - lengths
        table = np.full((max(total, self._dirty), 4), -1, dtype=np.int32)
        table[:total, ANSWERS] = 0
        table[:total, 0] = np.repeat(acting, lengths)
        table[:total, 1] = np.arange(total) - np.repeat(firsts - starts, lengths)
        if self._reads[slots].any():
            self._plan_reading(table, slots, starts, lengths, firsts)
        to_device(table, self.tables.tokens.device, out=self.tables.tokens[: len(table)])
        self.following.begin(slots, starts, lengths, ids)
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
        if self._is_edited[slots].any():
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
            Per record which edits these are, and per edit the tokens edited, the sum of ‖Δx‖/‖x‖, and the tokens that
            came before its condition was answered; [edits, 3].
        """
        given = list(records)
        stays = [copy for record in given for copy in record.tallies]
        counted = iter(torch.stack(stays).cpu().numpy()) if stays else iter(())  # the only device synchronisation
        return [self._of_edits(record, [next(counted) for _ in record.tallies]) for record in given]

    def answers(self, records: Iterable[RequestRecord]) -> list[np.ndarray]:
        """Sum and count of what each request's conditions read here, [conditions, 2]."""
        given = list(records)
        asked = [record.answers for record in given if record.spec.n_reads and record.answers is not None]
        read = iter(torch.stack(asked).cpu().numpy()) if asked else iter(())
        return [
            next(read)[: record.spec.n_reads] if record.spec.n_reads and record.answers is not None else _NO_ANSWERS
            for record in given
        ]

    def _of_edits(self, record: RequestRecord, stays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        plan = self.plans.get(record.spec.plan or "")
        if plan is None:
            return _NO_EDITS
        whole = np.zeros((len(plan.which), 3), dtype=np.float32)
        for stay in stays:
            whole += stay[plan.points, plan.places]
        return plan.which, whole


def _rows_in(slots: Sequence[int], rows: Sequence[Rows], room: int, device: torch.device) -> Tensor:
    """Where the rows of several plans go whose requests have these slots, in a table with so much room for each."""
    found = [part.index + slot * room for slot, part in zip(slots, rows, strict=True)]
    return to_device(np.concatenate(found), device)


def _write(table: Tensor, rows: Tensor, values: np.ndarray) -> None:
    """Writes rows of a table of slots and places."""
    table.view(-1, *values.shape[1:]).index_copy_(0, rows, to_device(values, table.device))


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """On the host, where a GPU can fetch it without synchronisation."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
