"""Happens-before inside one CTA, as vector clocks over threads and engines.

Every access is a record with an ascending number. A clock holds, per column, the number below which all records of
that column are known to have happened: record r of column c is covered by a clock iff r < clock[c].

COLUMNS: one per thread (32 w + lane), then one per stream of an engine, in which being told that one operation is
complete means that the earlier ones are: the tensor pipe per issuing thread (told by tcgen05.commit), asynchronous MMAs
per warpgroup (told by wgmma.wait_group), copies per mbarrier (told by its phases), bulk stores per issuing thread, once
for their reads and once for their writes (told by wait_group.read and wait_group).

A clock has two rows. ORDER is happens-before. PROXY is the part of it that went through a fence.proxy.async, so that
an engine sees it: what a thread wrote counts in PROXY only below its latest fence. `generic` marks the columns whose
writes need that: threads, and cp.async, which writes through the generic proxy.

LANES: the threads of a warp share one row of knowledge; it covers accesses of the warp's other lanes only up to its
last bar.warp.sync or barrier. A lane that learns something alone (an elected lane that waits) has knowledge of its own
until then. An elected lane's arrival therefore covers what it did itself and what the warp did before it was joined.
POLICY: shfl, vote, match, redux, elect and the .sync.aligned forms of tcgen05 bring lanes together but order no memory
accesses; the ISA promises that of bar.warp.sync and of barriers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

ORDER, PROXY = 0, 1
SEVERAL = 32
"""In place of a lane number: more than one lane of the warp."""
FIRST_ID = 1
_ENGINE_COLUMNS = 64
MAX_ID = (1 << 25) - 1
"""Record numbers share an int32 with a lane number; a CTA with more accesses than this cannot be watched."""


class Knowledge:
    """A clock that something carries: an mbarrier phase, an operation in flight, a lane on its own.

    clock: int32 (2, columns), columns beyond its end count as knowing nothing. foreign: CTA number -> such a clock over
    the columns of another CTA.
    """

    __slots__ = ("clock", "foreign")

    def __init__(self, clock: np.ndarray, foreign: dict[int, np.ndarray] | None = None):
        self.clock = clock
        self.foreign = foreign

    def copy(self) -> Knowledge:
        """An independent copy."""
        return Knowledge(
            self.clock.copy(), None if not self.foreign else {k: v.copy() for k, v in self.foreign.items()}
        )

    def join(self, other: Knowledge) -> None:
        """Learn what another clock knows."""
        self.clock = joined(self.clock, other.clock)
        if other.foreign:
            self.foreign = merge_foreign(self.foreign, other.foreign)


def joined(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Elementwise maximum, in place where the target is long enough."""
    width = source.shape[1]
    if target.shape[1] < width:
        target = _widened(target, width)
    part = target[:, :width]
    np.maximum(part, source, out=part)
    return target


def merge_foreign(target: dict[int, np.ndarray] | None, source: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Join what is known of other CTAs."""
    target = target or {}
    for number, clock in source.items():
        target[number] = joined(target[number], clock) if number in target else clock.copy()
    return target


def _widened(clock: np.ndarray, width: int) -> np.ndarray:
    wide = np.full((*clock.shape[:-1], width), FIRST_ID, clock.dtype)
    wide[..., : clock.shape[-1]] = clock
    return wide


@dataclass(eq=False)
class Issued:
    """An operation in flight: what its issuer knew, and its records.

    reads, writes: record numbers of its reads and writes (equal unless a stream tells them apart), 0 until they exist.
    issued: record number at issue, for telling whether somebody knows that it was issued. chain: see `Order.issue`.
    """

    knowledge: Knowledge
    engine: str
    thread: int
    issued: int
    reads: int = 0
    writes: int = 0
    column: int = -1
    chain: Any = None
    details: Any = None


@dataclass
class Records:
    """The accesses of a CTA: instruction, column (a warp's lane 0) and how often the warp had executed it by then."""

    instruction: np.ndarray = field(default_factory=lambda: np.zeros(4096, np.int32))
    column: np.ndarray = field(default_factory=lambda: np.zeros(4096, np.int32))
    turn: np.ndarray = field(default_factory=lambda: np.zeros(4096, np.int32))
    operations: dict[int, Issued] = field(default_factory=dict)

    def reserve(self, end: int) -> None:
        """Make room for records below `end`."""
        size = len(self.column)
        if end > size:
            assert end <= MAX_ID, f"a CTA with more than {MAX_ID} accesses cannot be watched"
            for name in ("instruction", "column", "turn"):
                wide = np.zeros(max(2 * size, end), np.int32)
                wide[:size] = getattr(self, name)
                setattr(self, name, wide)


class Order:
    """Clocks of one CTA."""

    def __init__(self, number: int, num_warps: int, strict: bool):
        self.number = number
        self.strict = strict
        self.num_warps, self.num_threads = num_warps, 32 * num_warps
        self.position = (0, 0, 0)
        self.next = FIRST_ID
        self.records = Records()
        self.rows = np.full((num_warps, 2, self.num_threads + _ENGINE_COLUMNS), FIRST_ID, np.int32)
        self.alone: list[dict[int, Knowledge]] = [{} for _ in range(num_warps)]
        self.foreign: list[dict[int, np.ndarray] | None] = [None] * num_warps
        self.fenced = np.full((num_warps, 32), FIRST_ID, np.int32)
        self.synced = np.full(num_warps, FIRST_ID, np.int32)
        self.columns: dict[tuple, int] = {}
        self.generic = np.zeros(self.num_threads + _ENGINE_COLUMNS, bool)
        self.generic[: self.num_threads] = True
        self.column_names: list[tuple] = []
        self._turns: dict[tuple[int, int], int] = {}
        self._one_to = np.arange(num_warps, dtype=np.int32)

    # Records.

    def record_warps(self, instruction: int, warps: list[int]) -> int:
        """Number one access of each warp; returns the first number."""
        first, count = self.next, len(warps)
        self.next = end = first + count
        if end > len(self.records.column):
            self.records.reserve(end)
        turns = self._turns
        records = self.records
        records.instruction[first:end] = instruction
        for place, warp in enumerate(warps, first):
            records.column[place] = 32 * warp
            turn = turns[instruction, warp] = turns.get((instruction, warp), 0) + 1
            records.turn[place] = turn
        return first

    def record_engine(self, instruction: int, column: int, issued: Issued) -> int:
        """Number an engine's access."""
        number = self.next
        self.next = number + 1
        self.records.reserve(number + 1)
        self.records.instruction[number] = instruction
        self.records.column[number] = column
        key = (instruction, -1 - issued.thread)
        self._turns[key] = self._turns.get(key, 0) + 1
        self.records.turn[number] = self._turns[key]
        self.records.operations[number] = issued
        return number

    def column(self, *key) -> int:
        """The column of an engine's stream."""
        place = self.columns.get(key)
        if place is None:
            place = self.columns[key] = self.num_threads + len(self.columns)
            self.column_names.append(key)
            if place >= self.rows.shape[2]:
                self.rows = _widened(self.rows, place + len(self.columns))
                self.generic = np.concatenate([self.generic, np.zeros(self.rows.shape[2] - len(self.generic), bool)])
            self.generic[place] = key[0] == "cp_async"
        return place

    # What threads know.

    def knows(self, warp: int, lane: int, what: int = ORDER) -> np.ndarray:
        """One row of the clock of a lane; of the warp in common for SEVERAL."""
        if not self.alone[warp] or lane not in self.alone[warp]:
            return self.rows[warp, what]
        return self._alone(warp, lane).clock[what]

    def fit(self, known: Knowledge) -> np.ndarray:
        """The clock of `known`, long enough for every column there is."""
        if known.clock.shape[1] < self.rows.shape[2]:
            known.clock = _widened(known.clock, self.rows.shape[2])
        return known.clock

    def knowledge_of(self, warp: int, lane: int) -> Knowledge:
        """A copy of what a lane knows, its own accesses so far included."""
        own = self.alone[warp].get(lane)
        known = own.copy() if own else Knowledge(self.rows[warp].copy(), _copied(self.foreign[warp]))
        column = 32 * warp + lane
        known.clock[ORDER, column] = self.next
        known.clock[PROXY, column] = max(known.clock[PROXY, column], self.fenced[warp, lane])
        return known

    def knowledge_of_warp(self, warp: int) -> np.ndarray:
        """A copy of the clock of what every lane of a warp knows; of its own lanes' accesses, all so far."""
        clock, own = self.rows[warp].copy(), slice(32 * warp, 32 * warp + 32)
        clock[ORDER, own] = self.next
        np.maximum(clock[PROXY, own], self.fenced[warp], out=clock[PROXY, own])
        return clock

    def covers_lanes(self, warps: list[int]) -> np.ndarray:
        """Per given warp and per warp of the CTA: below which number the accesses of all its lanes are known."""
        rows = self.rows[warps[0] : warps[-1] + 1, ORDER, : self.num_threads]
        return rows.reshape(len(warps), self.num_warps, 32).min(2)

    # Edges.

    def release(self, warp: int, lanes: np.ndarray | None, into: Knowledge) -> None:
        """Publish what lanes of a warp (None: all 32) know and have done."""
        into.clock = joined(into.clock, self.rows[warp])
        clock, alone, base = into.clock, self.alone[warp], 32 * warp
        if self.foreign[warp]:
            into.foreign = merge_foreign(into.foreign, self.foreign[warp] or {})
        if lanes is None:
            clock[ORDER, base : base + 32] = self.next
            part = clock[PROXY, base : base + 32]
            np.maximum(part, self.fenced[warp], out=part)
            for known in alone.values():
                into.join(known)
            return
        for lane in lanes.tolist():
            clock[ORDER, base + lane] = self.next
            clock[PROXY, base + lane] = max(clock[PROXY, base + lane], self.fenced[warp, lane])
            if lane in alone:
                into.join(alone[lane])
                clock = into.clock

    def acquire(self, warp: int, lanes: np.ndarray | None, known: Knowledge) -> None:
        """Let lanes of a warp (None: all that live) learn."""
        if lanes is None:
            self._join_row(warp, known)
            for own in self.alone[warp].values():
                own.join(known)
            return
        for lane in lanes.tolist():
            self._alone(warp, lane).join(known)

    def synchronise(self, warp: int, lanes: np.ndarray | None) -> None:
        """bar.warp.sync among lanes (None: all that live)."""
        base, alone = 32 * warp, self.alone[warp]
        if lanes is None:
            for known in alone.values():
                self._join_row(warp, known)
            alone.clear()
            row = self.rows[warp]
            row[ORDER, base : base + 32] = self.next
            part = row[PROXY, base : base + 32]
            np.maximum(part, self.fenced[warp], out=part)
            self.synced[warp] = self.next
            return
        together = Knowledge(self.rows[warp].copy(), _copied(self.foreign[warp]))
        for lane in lanes.tolist():
            if lane in alone:
                together.join(alone[lane])
        together.clock[ORDER, base + lanes] = self.next
        together.clock[PROXY, base + lanes] = np.maximum(together.clock[PROXY, base + lanes], self.fenced[warp, lanes])
        for lane in lanes.tolist():
            alone[lane] = together.copy()

    def leave_barrier(self, warp: int, known: Knowledge) -> None:
        """All lanes of a warp come out of a barrier at which all of them arrived."""
        self._join_row(warp, known)
        self.alone[warp].clear()
        self.synced[warp] = self.rows[warp, ORDER, 32 * warp]

    def fence_proxy(self, warp: int, lanes: np.ndarray | None) -> None:
        """fence.proxy.async: what these lanes know becomes visible to engines.

        The ISA wants the fence somewhere on the path from the write to the engine's access, so a fence by the thread
        that issues the operation, after it has synchronised with the writers, counts too. Strict: only the writer's.
        """
        if lanes is None:
            self.fenced[warp] = self.next
            if not self.strict:
                row = self.rows[warp]
                np.maximum(row[PROXY], row[ORDER], out=row[PROXY])
                for known in self.alone[warp].values():
                    np.maximum(known.clock[PROXY], known.clock[ORDER], out=known.clock[PROXY])
            return
        for lane in lanes.tolist():
            self.fenced[warp, lane] = self.next
            if not self.strict:
                clock = self._alone(warp, lane).clock
                np.maximum(clock[PROXY], clock[ORDER], out=clock[PROXY])

    def learn_stream(self, thread: int, column: int, number: int) -> None:
        """A thread is told that an engine's stream is complete up to and with a record."""
        warp, lane = divmod(thread, 32)
        clock = self._alone(warp, lane).clock
        clock[ORDER, column] = max(clock[ORDER, column], number + 1)

    def warp_learns_stream(self, warp: int, column: int, number: int) -> None:
        """All lanes of a warp are told that an engine's stream is complete up to and with a record."""
        clocks = [self.rows[warp], *(self._alone(warp, lane).clock for lane in self.alone[warp])]
        for clock in clocks:
            clock[ORDER, column] = max(clock[ORDER, column], number + 1)

    def tick(self) -> int:
        """A moment: what is released before it does not cover it."""
        self.next += 1
        return self.next - 1

    def _join_row(self, warp: int, known: Knowledge) -> None:
        width = known.clock.shape[1]
        if width > self.rows.shape[2]:
            self.rows = _widened(self.rows, width)
        row = self.rows[warp, :, :width]
        np.maximum(row, known.clock, out=row)
        if known.foreign:
            self.foreign[warp] = merge_foreign(self.foreign[warp], known.foreign)

    def _alone(self, warp: int, lane: int) -> Knowledge:
        alone = self.alone[warp]
        if lane not in alone:
            alone[lane] = Knowledge(self.rows[warp].copy(), _copied(self.foreign[warp]))
        own = alone[lane]
        if own.clock.shape[1] < self.rows.shape[2]:
            own.clock = _widened(own.clock, self.rows.shape[2])
        return own

    def retire(self) -> None:
        """The CTA is over: keep its records, which findings name, and let go of its clocks."""
        self.rows = self.rows[:, :, :0].copy()
        self.alone, self.foreign = [], []
        self._turns = {}
        for name in ("instruction", "column", "turn"):
            setattr(self.records, name, getattr(self.records, name)[: self.next].copy())

    def nothing(self) -> Knowledge:
        """A clock that knows nothing."""
        return Knowledge(np.full((2, self.rows.shape[2]), FIRST_ID, np.int32))


def _copied(foreign: dict[int, np.ndarray] | None) -> dict[int, np.ndarray] | None:
    return {k: v.copy() for k, v in foreign.items()} if foreign else None
