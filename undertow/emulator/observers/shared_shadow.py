"""Shadow of shared memory: per granule of 4 bytes who wrote last and who has read since.

Per granule: the last write (record number and lane), the last read of each warp (record number and lane, SEVERAL if
lanes of the warp shared it), the last read of the tensor pipe, of each warpgroup's MMAs and of bulk stores. A write
that is ordered after all of these need not keep the older ones: who is ordered after the write is ordered after them.
The granule is smaller than 4 bytes only in kernels whose own loads or stores are.

POLICY: lanes of one warp that write a word in the same instruction are not reported: one of them wins. Two engines of
one kind that read the same granule unordered: only the later read is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .clocks import ORDER, PROXY, SEVERAL, Issued, Order


@dataclass(frozen=True)
class Conflict:
    """Two accesses that are not ordered as they must be.

    kind: "order" (no edge), "proxy" (an edge, but no proxy fence). earlier: record and lane of the access that came
    first; later: likewise; earlier_writes, later_writes: which of them write. place: granule or column; extent: how
    many from there on.
    """

    kind: str
    earlier: int
    earlier_lane: int
    earlier_writes: bool
    later: int
    later_lane: int
    later_writes: bool
    place: int
    extent: int = 1


@dataclass(frozen=True)
class Touch:
    """What the lanes of an event touch, one entry per granule: thread, position of its warp in `warps`, granule.

    first: record number of the first warp; those of the others follow. several: the entry stands for all lanes of a
    warp, which share the granule. strong: an atomic, or an access with an order, which does not race with its like.
    """

    warps: list[int]
    first: int
    threads: np.ndarray
    ordinal: np.ndarray
    granules: np.ndarray
    several: bool = False
    strong: bool = False

    @property
    def codes(self) -> np.ndarray:
        """Record number and lane in one number."""
        lane = SEVERAL if self.several else self.threads & 31
        return (self.first + self.ordinal) << 6 | lane


class SharedShadow:
    """Shadow of the shared memory of one CTA."""

    def __init__(self, order: Order, num_granules: int, report):
        self.order = order
        self.report = report
        self.writer = np.zeros(num_granules, np.int32)
        self.readers = np.zeros((num_granules, order.num_warps), np.int32)
        self._flat = self.readers.reshape(-1)
        self.engine_reads = {"tensor": np.zeros(num_granules, np.int32), "bulk": np.zeros(num_granules, np.int32)}
        self._strong: np.ndarray | None = None

    # Accesses by warps

    def read(self, touch: Touch) -> None:
        """Loads of some warps."""
        self._against_writer(touch, False)
        self._note_read(touch)
        if touch.strong:
            self._mark_strong(touch.granules, True)

    def write(self, touch: Touch) -> None:
        """Stores (or atomics) of some warps."""
        self._against_writer(touch, True)
        self._against_readers(touch)
        self._against_engines(touch)
        codes = touch.codes.astype(np.int32)
        self.writer[touch.granules] = codes
        if touch.strong or self._strong is not None:
            self._mark_strong(touch.granules, touch.strong)
        if not touch.strong and len(touch.warps) > 1:
            self._collisions(touch, codes)

    def _against_writer(self, touch: Touch, writes: bool) -> None:
        codes, order = self.writer[touch.granules], self.order
        rows = order.rows[touch.warps[0] : touch.warps[-1] + 1, ORDER]
        first = int(codes[0])
        columns_of = order.records.column
        if (codes == first).all():
            if not first:
                return
            column = int(columns_of[first >> 6]) + (first & 63)
            late = rows[:, column] <= first >> 6
            if not late.any():
                return
            bad = late[touch.ordinal]
            columns = np.full(len(codes), column)
        else:
            numbers = codes >> 6
            columns = columns_of[numbers] + (codes & 63)
            bad = numbers >= rows[touch.ordinal, columns]
        if not touch.several:
            bad &= columns != touch.threads
        bad &= codes != 0
        if touch.strong and self._strong is not None:
            bad &= ~self._strong[touch.granules]
        if bad.any():
            self._report_writer(touch, np.flatnonzero(bad), codes, columns, writes)

    def _report_writer(self, touch: Touch, bad, codes, columns, writes: bool) -> None:
        """Look again with the knowledge of single lanes, then report each pair of instructions once."""
        seen = set()
        for i in bad.tolist():
            warp, lane = touch.warps[touch.ordinal[i]], SEVERAL if touch.several else int(touch.threads[i]) & 31
            number = int(codes[i]) >> 6
            if self.order.knows(warp, lane)[columns[i]] > number:
                continue
            key = (number, int(touch.ordinal[i]))
            if key not in seen:
                seen.add(key)
                later = touch.first + int(touch.ordinal[i])
                lane_of_writer = int(codes[i]) & 63
                self.report(
                    Conflict("order", number, lane_of_writer, True, later, lane, writes, int(touch.granules[i]))
                )

    def _note_read(self, touch: Touch) -> None:
        """Keep the read; lanes that share a granule since their last join count as several."""
        warps = np.asarray(touch.warps)[touch.ordinal]
        place = touch.granules * self.order.num_warps + warps
        codes = touch.codes.astype(np.int32)
        if not touch.several:
            old = self._flat[place]
            shared = (old >> 6 >= self.order.synced[warps]) & ((old ^ codes) & 63 != 0)
            if shared.any():
                codes[shared] |= SEVERAL
                codes[shared] &= ~31
        self._flat[place] = codes
        if not touch.several:
            lost = self._flat[place] != codes
            if lost.any():
                self._flat[place[lost]] = codes[lost] & ~63 | SEVERAL

    def _against_readers(self, touch: Touch) -> None:
        readers = self.readers.take(touch.granules, axis=0)
        limits = self.order.covers_lanes(touch.warps) << 6
        bad = readers >= limits[touch.ordinal]
        if not bad.any():
            return
        which, reader = np.nonzero(bad)
        self._report_readers(touch, which, reader, readers[which, reader])

    def _report_readers(self, touch: Touch, which, reader, codes) -> None:
        """Look again lane by lane: a thread may overwrite what it alone has read."""
        lanes = codes & 63
        own = reader * 32 + lanes == touch.threads[which]
        columns = np.minimum(reader * 32 + lanes, reader * 32 + 31)
        rows = self.order.rows[touch.warps[0] : touch.warps[-1] + 1, ORDER]
        known = rows[touch.ordinal[which], columns] > codes >> 6
        seen = set()
        for i in np.flatnonzero(~own & ~(known & (lanes < SEVERAL))).tolist():
            warp = touch.warps[touch.ordinal[which[i]]]
            lane = SEVERAL if touch.several else int(touch.threads[which[i]]) & 31
            clock, base = self.order.knows(warp, lane), 32 * int(reader[i])
            part = clock[base : base + 32] if lanes[i] == SEVERAL else clock[base + lanes[i] : base + lanes[i] + 1]
            number = int(codes[i]) >> 6
            if part.min() > number:
                continue
            key = (number, int(touch.ordinal[which[i]]))
            if key not in seen:
                seen.add(key)
                later = touch.first + int(touch.ordinal[which[i]])
                place = int(touch.granules[which[i]])
                self.report(Conflict("order", number, int(lanes[i]), False, later, lane, True, place))

    def _against_engines(self, touch: Touch) -> None:
        order = self.order
        for reads in self.engine_reads.values():
            numbers = reads[touch.granules]
            if not numbers.any():
                continue
            columns = order.records.column[numbers]
            rows = order.rows[touch.warps[0] : touch.warps[-1] + 1, ORDER]
            bad = np.flatnonzero((numbers >= rows[touch.ordinal, columns]) & (numbers > 0))
            for i in first_of_each(numbers[bad], bad):
                warp, lane = touch.warps[touch.ordinal[i]], int(touch.threads[i]) & 31
                if order.knows(warp, lane)[columns[i]] <= numbers[i]:
                    later = touch.first + int(touch.ordinal[i])
                    self.report(Conflict("order", int(numbers[i]), 0, False, later, lane, True, int(touch.granules[i])))

    def _collisions(self, touch: Touch, codes: np.ndarray) -> None:
        """Different warps of one gang that wrote the same granule in the same instruction."""
        kept = self.writer[touch.granules]
        for i in np.flatnonzero(kept >> 6 != codes >> 6).tolist()[:1]:
            earlier, later = int(codes[i]), int(kept[i])
            self.report(
                Conflict(
                    "order", earlier >> 6, earlier & 63, True, later >> 6, later & 63, True, int(touch.granules[i])
                )
            )

    def _mark_strong(self, granules, strong: bool) -> None:
        if self._strong is None:
            self._strong = np.zeros(len(self.writer), bool)
        self._strong[granules] = strong

    # Accesses by engines

    def engine_read(self, issued: Issued, granules, stream: str) -> None:
        """An engine reads granules (an array or a slice); stream: tensor, bulk or one per warpgroup."""
        self._engine_against_writer(issued, granules, issued.reads, False)
        if stream not in self.engine_reads:
            self.engine_reads[stream] = np.zeros(len(self.writer), np.int32)
        self.engine_reads[stream][granules] = issued.reads

    def engine_write(self, issued: Issued, granules, generic: bool = False) -> None:
        """An engine writes granules; `generic`: through the generic proxy, as cp.async does."""
        self._engine_against_writer(issued, granules, issued.writes, True, generic)
        self._engine_against_readers(issued, granules, generic)
        clock = self.order.fit(issued.knowledge)[ORDER]
        for reads in self.engine_reads.values():
            numbers = reads[granules]
            if numbers.any():
                bad = np.flatnonzero((numbers >= clock[self.order.records.column[numbers]]) & (numbers > 0))
                for i in first_of_each(numbers[bad], bad):
                    place = _place(granules, i)
                    self.report(Conflict("order", int(numbers[i]), 0, False, issued.writes, 0, True, place))
        self.writer[granules] = issued.writes << 6
        if self._strong is not None:
            self._strong[granules] = False

    def _engine_against_writer(self, issued: Issued, granules, later: int, writes: bool, generic=False) -> None:
        codes = self.writer[granules]
        clock = self.order.fit(issued.knowledge)
        first, last = int(codes[0]), int(codes[-1])
        if first == last and (codes == first).all():
            codes = codes[:1]
            if not first:
                return
        numbers = codes >> 6
        columns = self.order.records.column[numbers] + (codes & 63)
        unordered = (numbers >= clock[ORDER, columns]) & (codes != 0)
        if self.order.strict and issued.chain:
            unordered &= ~same_chain(self.order, numbers, issued.chain)
        unfenced = self.order.generic[columns] & (numbers >= clock[PROXY, columns]) & (codes != 0)
        if generic or not unfenced.any():
            unfenced = unordered
        bad = np.flatnonzero(unordered | unfenced)
        for i in first_of_each(numbers[bad], bad):
            kind = "order" if unordered[i] else "proxy"
            place = _place(granules, i)
            self.report(Conflict(kind, int(numbers[i]), int(codes[i]) & 63, True, later, 0, writes, place))

    def _engine_against_readers(self, issued: Issued, granules, generic: bool) -> None:
        readers = self.readers[granules]
        clock = self.order.fit(issued.knowledge)
        lanes_of = clock[:, : self.order.num_threads].reshape(2, self.order.num_warps, 32)
        limits = lanes_of.min(2) << 6
        bad = readers >= limits[ORDER]
        strict_proxy = self.order.strict and not generic
        if strict_proxy:
            bad |= readers >= limits[PROXY]
        if not bad.any():
            return
        which, reader = np.nonzero(bad)
        seen = set()
        for i, warp in zip(which.tolist(), reader.tolist(), strict=True):
            code = int(readers[i, warp])
            lanes = slice(0, 32) if code & 63 == SEVERAL else slice(code & 63, (code & 63) + 1)
            number = code >> 6
            kind = ""
            if lanes_of[ORDER, warp, lanes].min() <= number:
                kind = "order"
            elif strict_proxy and lanes_of[PROXY, warp, lanes].min() <= number:
                kind = "proxy"
            if kind and (number, kind) not in seen:
                seen.add((number, kind))
                place = _place(granules, i)
                self.report(Conflict(kind, number, code & 63, False, issued.writes, 0, True, place))


def same_chain(order: Order, numbers: np.ndarray, chain) -> np.ndarray:
    """Which records are MMAs that the ISA orders with those of a chain (strict mode)."""
    operations = order.records.operations
    return np.array([n in operations and operations[n].chain == chain for n in numbers.tolist()], bool)


def _place(granules, i: int) -> int:
    return granules.start + i if isinstance(granules, slice) else int(granules[i])


def first_of_each(keys: np.ndarray, positions: np.ndarray) -> list[int]:
    """The first position of each distinct key; the arrays are parallel."""
    if not len(keys):
        return []
    if (keys == keys[0]).all():
        return [int(positions[0])]
    seen: dict[int, int] = {}
    for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
        seen.setdefault(key, position)
    return list(seen.values())
