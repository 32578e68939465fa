"""Shadow of tensor memory, per quarter of 32 lanes and per 32-bit column.

tcgen05.ld and tcgen05.st are asynchronous: they take place between their issue and the warp's next tcgen05.wait::ld
or ::st. So a read or write of a warp has two moments. Somebody who conflicts with it must know the second one; if he
knows only the first, it was published too early and the wait is missing (kind "load" or "store"); if he knows
neither, there is no order at all (kind "order").

All 32 lanes of a warp take part, so an arrival covers a TMEM access only if it covers all lanes of the warp.
POLICY: within one warp program order is enough; strict mode also wants the wait between its own ld and st of the same
columns. tcgen05.fence is not asked for: an mbarrier or barrier orders TMEM accesses as it orders others.
"""

from __future__ import annotations

import numpy as np

from .clocks import ORDER, SEVERAL, Issued, Order
from .shared_shadow import Conflict, same_chain

QUARTERS, COLUMNS = 4, 512
NOT_WAITED = (1 << 31) - 1


class TensorShadow:
    """Shadow of the tensor memory of one CTA."""

    def __init__(self, order: Order, report):
        self.order = order
        self.report = report
        slots = -(-order.num_warps // QUARTERS)
        shape = (QUARTERS, COLUMNS)
        self.written = np.zeros(shape, np.int32)
        self.write_done = np.zeros(shape, np.int32)
        self.read = np.zeros((slots, *shape), np.int32)
        self.read_done = np.zeros((slots, *shape), np.int32)
        self.engine_read = np.zeros(shape, np.int32)
        self._pending: dict[tuple[int, str], list[tuple[int, slice]]] = {}
        self._chains: dict[tuple[int, int], int] = {}

    # Accesses by warps

    def load(self, warp: int, number: int, columns: slice) -> None:
        """tcgen05.ld of a warp."""
        self._end_chains(columns)
        quarter, slot = warp % QUARTERS, warp // QUARTERS
        self._after_write(self._warp_view(warp), number, (quarter, columns), False)
        self.read[slot, quarter, columns] = number
        self.read_done[slot, quarter, columns] = NOT_WAITED
        self._pending.setdefault((warp, "read"), []).append((number, columns))

    def store(self, warp: int, number: int, columns: slice) -> None:
        """tcgen05.st of a warp."""
        self._end_chains(columns)
        place = (warp % QUARTERS, columns)
        self._before_write(self._warp_view(warp), number, place)
        self.written[place] = number
        self.write_done[place] = NOT_WAITED
        self._pending.setdefault((warp, "write"), []).append((number, columns))

    def wait(self, warp: int, kind: str) -> None:
        """tcgen05.wait::ld (kind read) or ::st (kind write): the warp's accesses so far are complete."""
        pending = self._pending.pop((warp, kind), [])
        if not pending:
            return
        now, quarter, slot = self.order.tick(), warp % QUARTERS, warp // QUARTERS
        for number, columns in pending:
            if kind == "read":
                numbers, done = self.read[slot, quarter, columns], self.read_done[slot, quarter, columns]
            else:
                numbers, done = self.written[quarter, columns], self.write_done[quarter, columns]
            done[numbers == number] = now

    # Accesses by the tensor pipe

    def engine_load(self, issued: Issued, columns: slice) -> None:
        """An MMA reads columns of all quarters."""
        if self._chains.get((columns.start, columns.stop)) == issued.column:
            return
        self._end_chains(columns)
        place = (slice(None), columns)
        self._after_write(self._engine_view(issued), issued.reads, place, False)
        self.engine_read[place] = issued.reads

    def engine_store(self, issued: Issued, columns: slice) -> None:
        """An MMA writes columns of all quarters."""
        place = (slice(None), columns)
        if self._chains.get((columns.start, columns.stop)) != issued.column:
            self._end_chains(columns)
            self._before_write(self._engine_view(issued), issued.writes, place)
            if not self.order.strict:
                self._chains[columns.start, columns.stop] = issued.column
        self.written[place] = issued.writes
        self.write_done[place] = issued.writes

    def _end_chains(self, columns: slice) -> None:
        """Somebody else touches these columns.

        A chain is an accumulator whose last accesses are all by MMAs of one thread: those are in order (lenient), so
        that the next of them, which reads and writes the same columns, need not be checked.
        """
        for start, stop in [c for c in self._chains if c[0] < columns.stop and columns.start < c[1]]:
            del self._chains[start, stop]

    def allocate(self, columns: slice) -> None:
        """Columns begin a new life."""
        self._end_chains(columns)
        for array in (self.written, self.write_done, self.engine_read, self.read, self.read_done):
            array[..., columns] = 0

    def free(self, warp: int, number: int, columns: slice) -> None:
        """tcgen05.dealloc by a warp: everything in the columns must be over for it."""
        self._before_write(self._warp_view(warp), number, (slice(None), columns))

    # Checks

    def _warp_view(self, warp: int) -> tuple:
        """What an access is judged by: covered numbers per record column, own warp (-1: none), chain of an MMA."""
        return self.order.knows(warp, -1), warp, None

    def _engine_view(self, issued: Issued) -> tuple:
        return self.order.fit(issued.knowledge)[ORDER], -1, issued.chain

    def _covered(self, clock: np.ndarray, column: int) -> int:
        """Below which number the records of a column are known: for a warp those of all its lanes."""
        if column < self.order.num_threads:
            return int(clock[column : column + 32].min())
        return int(clock[column])

    def _after_write(self, view, number: int, place, writes: bool) -> None:
        """Is the last write of each column over for this access?"""
        self._judge(view, number, (self.written[place], self.write_done[place], place[1].start), True, writes)

    def _before_write(self, view, number: int, place) -> None:
        """Are the last write and the reads since then over for this write? It ends the reads' account."""
        self._after_write(view, number, place, True)
        where = (slice(None), *place)
        reads = self.read[where]
        if reads.any():
            self._judge(view, number, (reads, self.read_done[where], place[1].start), False, True)
            self.read[where] = 0
        reads = self.engine_read[place]
        if reads.any():
            self._judge(view, number, (reads, reads, place[1].start), False, True)
            self.engine_read[place] = 0

    def _judge(self, view, number: int, earlier, earlier_writes: bool, later_writes: bool) -> None:
        clock, own, chain = view
        numbers, done, start = earlier
        first = int(numbers.flat[0])
        distinct = [first] if (numbers == first).all() else _distinct(numbers)
        latest = int(done.max())
        for record in distinct:
            if not record or record == number:
                continue
            column = int(self.order.records.column[record])
            if column == 32 * own:
                mine = numbers == record
                if self.order.strict and (done[mine] == NOT_WAITED).any():
                    self._own_wait_missing(number, record, earlier_writes, start + _span(mine)[0])
                continue
            covered = self._covered(clock, column)
            if record < covered and (latest < covered or column >= self.order.num_threads):
                continue
            mine = numbers == record
            if record >= covered:
                if chain and same_chain(self.order, np.array([record]), chain)[0]:
                    continue
                kind = "order"
            elif (done[mine] >= covered).any():
                kind = "store" if earlier_writes else "load"
            else:
                continue
            first_column, extent = _span(mine)
            self.report(
                Conflict(
                    kind, record, SEVERAL, earlier_writes, number, SEVERAL, later_writes, start + first_column, extent
                )
            )

    def _own_wait_missing(self, number: int, record: int, earlier_writes: bool, where: int) -> None:
        kind = "store" if earlier_writes else "load"
        self.report(Conflict(kind, record, SEVERAL, earlier_writes, number, SEVERAL, True, where))


def _distinct(numbers: np.ndarray) -> list[int]:
    """The values of an array; a set of Python numbers is faster than sorting where there are few."""
    return list(set(numbers.reshape(-1).tolist())) if numbers.size <= 128 else np.unique(numbers).tolist()


def _span(mine: np.ndarray) -> tuple[int, int]:
    """First column (last axis) of a selection, and the number of columns from there to its last."""
    touched = np.flatnonzero(mine.reshape(-1, mine.shape[-1]).any(0))
    return int(touched[0]), int(touched[-1] - touched[0]) + 1
