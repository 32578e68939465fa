"""Shadow of global memory: per granule the last write and two reads since, by any CTA; and the words that synchronise.

Threads of different CTAs know of each other only through global words: a release (st, red or atom with .release or
.acq_rel, or relaxed after a fence) publishes, an acquire of the same word (ld or atom with .acquire or .acq_rel, or
relaxed before a fence) learns. Read-modify-writes add to what a word carries, a store replaces it.

Two atomics never race, and neither do two accesses with an order (.relaxed and stronger, .volatile). Bulk reductions
are atomics: CTAs may add to the same words in any order. But where somebody knows that a reduction was issued, a lock
was meant to put his own after it; if he does not know that it is complete, the lock was released too early.
Two writes of the same value are advice: by the ISA a race, but no order of them gives another result.
Two writes of the same value are advice: by the ISA a race, but no order of them gives another result.
POLICY: CTAs of a launch count as concurrent even where the emulator runs them one after another. Of the reads since
the last write only two are kept per granule. Accesses narrower than the granule count as the whole granule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .clocks import ORDER, PROXY, SEVERAL, Issued, Knowledge, merge_foreign
from .shared_shadow import Touch, first_of_each
from .synchronisation import participants

_WEAK, _STRONG, _ATOMIC = 0, 1, 2
_LOW = (1 << 32) - 1


@dataclass
class RegionShadow:
    """Shadow of one buffer. Codes are (CTA number + 1) << 32 | record number << 6 | lane; 0: never.

    memory: the buffer itself by granules; values: what the last write left there.
    """

    base: int
    memory: np.ndarray
    values: np.ndarray
    writer: np.ndarray
    writer_class: np.ndarray
    readers: tuple[np.ndarray, np.ndarray]
    reader_class: np.ndarray


@dataclass(frozen=True)
class _Agent:
    """Who accesses: threads, one per entry, or an engine (threads is None) with its clock.

    foreign: what is known of other CTAs, per warp or by the engine.
    """

    cta: int
    threads: np.ndarray | None
    clocks: np.ndarray | None
    foreign: Any
    several: bool = False


class GlobalShadow:
    """Shadow of global memory during one launch."""

    def __init__(self, verdict: Any, granule_shift: int, strict: bool):
        self.verdict = verdict
        self.shift = granule_shift
        self.strict = strict
        self._regions: dict[int, RegionShadow] = {}
        self._words: dict[tuple, dict[int, np.ndarray]] = {}

    # Entry points

    def warps(self, watch: Any, event: Any, touch: Touch) -> None:
        """Loads, stores and atomics of warps."""
        region, granules = self._locate(watch.cta, event.addresses, touch.granules)
        order = watch.order
        agent = _Agent(order.number, touch.threads, None, order.foreign, touch.several)
        codes = (order.number + 1 << 32) | touch.codes
        kind = _ATOMIC if event.kind == "atomic" else _STRONG if touch.strong else _WEAK
        self._access(watch, agent, (region, granules, codes, kind), event.kind != "read")
        if touch.strong:
            self.synchronise(watch, event)

    def engine(self, watch: Any, event: Any, issued: Issued) -> None:
        """Accesses of an engine; a bulk reduction is an atomic."""
        starts = event.addresses.astype(np.int64) >> self.shift
        count = max(event.size >> self.shift, 1)
        if len(starts) == 1:
            granules: Any = slice(int(starts[0]), int(starts[0]) + count)
        else:
            granules = (starts[:, None] + np.arange(count)).reshape(-1)
        region, granules = self._locate(watch.cta, event.addresses, granules)
        clock = watch.order.fit(issued.knowledge)
        agent = _Agent(watch.order.number, None, clock, issued.knowledge.foreign)
        writes = event.kind != "read"
        number = issued.writes if writes else issued.reads
        code = (watch.order.number + 1 << 32) | number << 6
        self._access(watch, agent, (region, granules, code, _ATOMIC if event.kind == "atomic" else _WEAK), writes)

    def _locate(self, cta: Any, addresses, granules) -> tuple[RegionShadow, Any]:
        region = cta.machine.global_memory.region(int(addresses[0]), 1)
        shadow = self._regions.get(region.base)
        if shadow is None:
            size = (region.num_bytes >> self.shift) + 2
            memory = region.view(1 << self.shift, 1)[:, 0]
            shadow = self._regions[region.base] = RegionShadow(
                region.base >> self.shift, memory, memory.copy(), np.zeros(size, np.int64), np.zeros(size, np.uint8),
                (np.zeros(size, np.int64), np.zeros(size, np.int64)), np.zeros(size, np.uint8),
            )  # fmt: skip
        if isinstance(granules, slice):
            return shadow, slice(granules.start - shadow.base, granules.stop - shadow.base)
        return shadow, granules - shadow.base

    # Checks

    def _access(self, watch: Any, agent: _Agent, what: tuple, writes: bool) -> None:
        region, granules, codes, kind = what
        earlier = region.writer[granules]
        if earlier.any():
            self._against(watch, agent, (earlier, region.writer_class[granules]), what, (True, writes))
        if not writes:
            self._note_read(region, granules, codes, kind)
            return
        for reader in region.readers:
            earlier = reader[granules]
            if earlier.any():
                self._against(watch, agent, (earlier, region.reader_class[granules]), what, (False, True))
                reader[granules] = 0
        region.writer[granules] = codes
        region.writer_class[granules] = kind
        region.values[granules] = region.memory[granules]

    @staticmethod
    def _note_read(region: RegionShadow, granules, codes, kind: int) -> None:
        """Keep the read; move one of another CTA aside rather than lose it."""
        last = region.readers[0][granules]
        other = (last >> 32 != codes >> 32) & (last != 0)
        if other.any():
            region.readers[1][granules] = np.where(other, last, region.readers[1][granules])
        region.readers[0][granules] = codes
        region.reader_class[granules] = kind

    def _against(self, watch: Any, agent: _Agent, earlier: tuple, what: tuple, kinds: tuple[bool, bool]) -> None:
        codes, classes = earlier
        region, granules, own, kind = what
        numbers, lanes, ctas = (codes & _LOW) >> 6, codes & 63, (codes >> 32) - 1
        ordered = self._covered(watch, agent, codes, ORDER)
        bad = (codes != 0) & ~ordered
        if agent.threads is None and kinds[0] and ordered.any():
            self._fences(watch, agent, earlier, what, kinds)
        if agent.threads is not None and not agent.several:
            columns = watch.order.records.column[numbers * (ctas == agent.cta)]
            bad &= ~((ctas == agent.cta) & (columns + lanes == agent.threads))
        places = np.flatnonzero(bad)
        if not len(places):
            return
        plain_writes = all(kinds) and not kind and not classes[places].any()
        same = plain_writes and bool((region.values[granules] == region.memory[granules])[places].all())
        for i in first_of_each(codes[places] & ~63, places):
            early_end = False
            if kind and classes[i]:
                early_end = self._issue_known(watch, agent, i, codes)
                if not early_end:
                    continue
            place = granules.start + i if isinstance(granules, slice) else int(granules[i])
            code = int(own) if np.ndim(own) == 0 else int(own[i])
            self.verdict.global_memory(
                (int(ctas[i]), int(numbers[i]), int(lanes[i])), (agent.cta, (code & _LOW) >> 6, code & 63),
                kinds, (region.base + place) << self.shift, self._clock(watch, agent, i, int(ctas[i])),
                "same value" if same else "early end" if early_end else "",
            )  # fmt: skip

    def _fences(self, watch: Any, agent: _Agent, earlier: tuple, what: tuple, kinds: tuple[bool, bool]) -> None:
        """An engine's access after generic writes that are ordered before it: is there a proxy fence on the way?"""
        codes, _ = earlier
        region, granules, own, _ = what
        unfenced = np.flatnonzero(
            self._covered(watch, agent, codes, ORDER) & ~self._covered(watch, agent, codes, PROXY)
        )
        for i in first_of_each(codes[unfenced] & ~63, unfenced):
            cta, number, lane = (int(codes[i]) >> 32) - 1, (int(codes[i]) & _LOW) >> 6, int(codes[i]) & 63
            order = self.verdict.orders[cta]
            if order.records.column[number] < order.num_threads:
                place = granules.start + i if isinstance(granules, slice) else int(granules[i])
                self.verdict.global_memory(
                    (cta, number, lane), (agent.cta, (int(own) & _LOW) >> 6, 0), kinds,
                    (region.base + place) << self.shift, None, "proxy",
                )  # fmt: skip

    def _covered(self, watch: Any, agent: _Agent, codes: np.ndarray, row: int) -> np.ndarray:
        """Which earlier accesses are known to the one who accesses now, by a row of his clock."""
        out = np.zeros(len(codes), bool)
        for cta in np.unique(codes >> 32).tolist():
            if not cta:
                continue
            mine = np.flatnonzero(codes >> 32 == cta)
            numbers, lanes = (codes[mine] & _LOW) >> 6, codes[mine] & 63
            columns = self.verdict.orders[cta - 1].records.column[numbers] + np.where(lanes == SEVERAL, 0, lanes)
            for place, number, column, lane in self._distinct(mine, numbers, columns, lanes, agent):
                clock = self._clock(watch, agent, int(place[0]), cta - 1, row)
                if clock is None or column >= len(clock):
                    continue
                known = clock[column : column + 32].min() if lane == SEVERAL else clock[column]
                out[place] = known > number
        return out

    @staticmethod
    def _distinct(mine, numbers, columns, lanes, agent: _Agent):
        """Groups of entries with the same earlier access and the same accessing thread."""
        who = np.zeros(len(mine), np.int64) if agent.threads is None else agent.threads[mine]
        keys = (numbers * 64 + lanes) * 1024 + who
        if (keys == keys[0]).all():
            yield mine, int(numbers[0]), int(columns[0]), int(lanes[0])
            return
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        for group, start in enumerate(first.tolist()):
            yield mine[inverse == group], int(numbers[start]), int(columns[start]), int(lanes[start])

    def _clock(self, watch: Any, agent: _Agent, i: int, cta: int, row: int = ORDER) -> np.ndarray | None:
        """What the i-th entry's thread or the engine knows of a CTA."""
        if agent.threads is None:
            if cta == agent.cta:
                assert agent.clocks is not None, "an engine without a clock"
                return agent.clocks[row]
            known = (agent.foreign or {}).get(cta)
            return None if known is None else known[row]
        warp, lane = int(agent.threads[i]) >> 5, SEVERAL if agent.several else int(agent.threads[i]) & 31
        if cta == agent.cta:
            return watch.order.knows(warp, lane, row)
        own = watch.order.alone[warp].get(lane)
        foreign = (own.foreign if own else agent.foreign[warp]) or {}
        return foreign[cta][row] if cta in foreign else None

    def _issue_known(self, watch: Any, agent: _Agent, i: int, codes: np.ndarray) -> bool:
        """Whether the earlier access is an engine's whose issue, but not whose end, is known to the later one."""
        cta, number = (int(codes[i]) >> 32) - 1, (int(codes[i]) & _LOW) >> 6
        issued = self.verdict.orders[cta].records.operations.get(number)
        if issued is None or (agent.threads is None and cta == agent.cta):
            return False
        clock = self._clock(watch, agent, i, cta)
        return clock is not None and bool(clock[issued.thread] > issued.issued)

    # Words that synchronise

    def synchronise(self, watch: Any, event: Any) -> None:
        """Release and acquire through words of global or shared memory."""
        home = event.home.number if event.home else watch.order.number
        space = event.space if event.space == "global" else f"shared {home}"
        order = event.order if event.order in ("release", "acquire", "acq_rel") else "relaxed"
        for address in dict.fromkeys(event.addresses.tolist()):
            which = np.asarray(event.which)[event.addresses == address]
            word = (space, address)
            for warp, lanes in participants(event.lanes, which):
                if event.kind != "write" and order != "release" and word in self._words:
                    known = self._known(watch, self._words[word])
                    watch.sync.learn(warp, lanes, known, order == "relaxed")
                if event.kind != "read" and order != "acquire":
                    self._publish(watch, (warp, lanes), word, event.kind == "write", order == "relaxed")

    @staticmethod
    def _known(watch: Any, carried: dict[int, np.ndarray]) -> Knowledge:
        others = {cta: clock.copy() for cta, clock in carried.items() if cta != watch.order.number}
        own = carried.get(watch.order.number)
        return Knowledge(watch.order.nothing().clock if own is None else own.copy(), others or None)

    def _publish(self, watch: Any, who: tuple, word: tuple, replaces: bool, relaxed: bool) -> None:
        known = watch.order.nothing()
        watch.sync.publish(*who, known, relaxed)
        carried = {watch.order.number: known.clock, **(known.foreign or {})}
        before = None if replaces else self._words.get(word)
        self._words[word] = merge_foreign(before, carried)
