"""Edges of happens-before inside a CTA: what each synchronisation event publishes and teaches.

mbarrier: an arrival publishes what the arriving lanes know and have done; bytes that land publish the copy and what
its issuer knew; a commit publishes the MMAs of its thread. A successful wait learns what was published up to the
phase it waited for, and nothing of the phase in progress: waiting again for a phase that is long complete teaches
nothing new. Phases add up, because arrivals are read-modify-writes of one object.
POLICY: expect_tx alone publishes nothing (the ISA calls it relaxed). A relaxed wait teaches at the next fence of the
warp: fence.acquire, .acq_rel, .sc, or tcgen05.fence::after_thread_sync. A relaxed arrival publishes what the warp knew
at its last fence.release, .acq_rel or .sc. Scopes are not compared.

Named barriers: every arrival publishes, everybody that leaves has learnt all of it. bar.warp.sync joins lanes.
Bulk groups: wait_group teaches the waiting thread that its older groups are complete; the .read form only that they
have read their source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..state import FULL_MASK
from .clocks import ORDER, Issued, Knowledge, Order
from .warpgroup_order import WarpgroupOrder

KEPT_PHASES = 16
"""Completed phases of a barrier whose clocks are kept; a wait for an older one learns the oldest kept."""
COPIES = ("bulk_load", "tensor_load")
_STORES = ("bulk_store", "bulk_reduce")


def participants(lanes, which: np.ndarray | None) -> list[tuple[int, np.ndarray | None]]:
    """(warp, lane numbers) of the active lanes; None stands for all 32."""
    if which is None:
        return [
            (warp, None if mask == FULL_MASK else np.flatnonzero([mask >> i & 1 for i in range(32)]))
            for warp, mask in zip(lanes.warps, lanes.masks, strict=True)
        ]
    threads = lanes.index[which]
    found = []
    for warp in lanes.warps:
        mine = threads[threads >> 5 == warp] & 31
        if len(mine):
            found.append((warp, None if len(mine) == 32 else mine))
    return found


def all_alive(cta, warp: int, lanes: np.ndarray | None) -> np.ndarray | None:
    """None if these are all lanes of the warp that have not exited."""
    if lanes is None:
        return None
    mask = sum(1 << lane for lane in lanes.tolist())
    return None if not cta.warps[warp].live_mask & ~mask else lanes


@dataclass
class MbarrierClock:
    """Of one mbarrier: everything published so far, and what had been at the end of each phase."""

    published: Knowledge
    phases: dict[int, Knowledge] = field(default_factory=dict)

    def end_phase(self, phase: int) -> None:
        """Keep what was published up to the end of a phase."""
        self.phases[phase] = self.published.copy()
        self.phases.pop(phase - KEPT_PHASES, None)

    def at(self, phase: int) -> Knowledge | None:
        """What waiting for a phase teaches; None before the first one."""
        if phase < 0 or not self.phases:
            return None
        return self.phases.get(phase) or self.phases[min(self.phases)]


class Synchronisation:
    """Turns events of one CTA into edges of its `Order`."""

    def __init__(self, cta, order: Order):
        self.cta = cta
        self.order = order
        self.mbarriers: dict[int, MbarrierClock] = {}
        self.named: dict[tuple[int, int], Knowledge] = {}
        self.operations: dict = {}
        self.observed: list[Knowledge | None] = [None] * order.num_warps
        self.at_fence: list[Knowledge | None] = [None] * order.num_warps
        self.groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._open: dict[tuple[str, int], tuple[int, int]] = {}
        self.warpgroups = WarpgroupOrder(order)
        self._no_knowledge = order.nothing()

    # mbarriers

    def mbarrier(self, event) -> None:
        """One mbarrier operation."""
        if event.op == "init":
            self.mbarriers[event.address] = MbarrierClock(self.order.nothing())
            return
        barrier = self.mbarriers.get(event.address)
        if barrier is None or event.op in ("inval", "expect_tx"):
            return
        if event.op == "wait":
            if event.completed:
                self._wait(event, barrier.at(event.phase))
            return
        if event.operation is not None:
            self._engine_signal(event, barrier.published)
        else:
            for warp, lanes in participants(event.lanes, event.which):
                self.publish(warp, lanes, barrier.published, event.order == "relaxed")
        if event.completed:
            barrier.end_phase(event.phase)

    def publish(self, warp: int, lanes: np.ndarray | None, into: Knowledge, relaxed: bool = False) -> None:
        """A release by lanes of a warp; a relaxed one publishes what the last fence covers."""
        if not relaxed:
            self.order.release(warp, lanes, into)
            return
        covered = self.at_fence[warp]
        if covered:
            into.join(covered)

    def _engine_signal(self, event, into: Knowledge) -> None:
        issued = self.operations.get(event.operation)
        if issued is None:
            return
        into.join(issued.knowledge)
        clock = self.order.fit(into)
        if issued.engine in COPIES:
            clock[ORDER, issued.column] = self.order.next
        else:
            clock[ORDER, issued.column] = max(clock[ORDER, issued.column], issued.writes)

    def _wait(self, event, known: Knowledge | None) -> None:
        if known is None:
            return
        for warp, lanes in participants(event.lanes, event.which):
            self.learn(warp, lanes, known, event.order == "relaxed")

    def learn(self, warp: int, lanes: np.ndarray | None, known: Knowledge, relaxed: bool = False) -> None:
        """An acquire by lanes of a warp; a relaxed one counts from the warp's next fence on."""
        if not relaxed:
            self.order.acquire(warp, all_alive(self.cta, warp, lanes), known)
            return
        pending = self.observed[warp]
        if pending is None:
            self.observed[warp] = known.copy()
        else:
            pending.join(known)

    # Barriers of warps and of the CTA.

    def named_barrier(self, event) -> None:
        """arrive, sync or leave of one warp."""
        key = (event.barrier, event.generation)
        if event.op == "leave":
            known = self.named.get(key)
            if known is not None:
                self.order.leave_barrier(event.warp, known)
            return
        if key not in self.named:
            self.named.pop((event.barrier, event.generation - 2), None)
            self.named[key] = self.order.nothing()
        self.order.release(event.warp, None, self.named[key])

    def warp_sync(self, event) -> None:
        """bar.warp.sync; other collectives order no memory accesses."""
        if event.decoded.row.name.startswith("bar.warp.sync"):
            for warp, lanes in participants(event.lanes, None):
                self.order.synchronise(warp, all_alive(self.cta, warp, lanes))

    # Fences

    def fence(self, event) -> None:
        """A fence of either kind."""
        which = None if event.mask is None else np.flatnonzero(event.mask)
        proxy = event.decoded.mods.get("proxy") or ""
        for warp, lanes in participants(event.lanes, which):
            if proxy.startswith("async") and proxy != "async.global":
                self.order.fence_proxy(warp, lanes)
            elif not proxy and not event.decoded.row.name.startswith(("fence.mbarrier_init", "fence.proxy")):
                self._memory_fence(warp, lanes, event.decoded.mods.get("order") or "sc")

    def _memory_fence(self, warp: int, lanes: np.ndarray | None, order: str) -> None:
        if order != "release":
            self.catch_up(warp, lanes)
        if order != "acquire":
            covered = self.order.nothing()
            self.order.release(warp, lanes, covered)
            self.at_fence[warp] = covered

    def catch_up(self, warp: int, lanes: np.ndarray | None) -> None:
        """What relaxed waits observed now counts."""
        pending = self.observed[warp]
        if pending is not None:
            self.order.acquire(warp, all_alive(self.cta, warp, lanes), pending)
            self.observed[warp] = None

    # Engines

    def issue(self, event) -> None:
        """An operation enters a queue: it knows what its issuing thread knows."""
        operation, order = event.operation, self.order
        engine, thread = operation.engine, operation.thread
        if engine == "wgmma":
            self.operations[operation] = self.warpgroups.issue(operation)
            return
        warp, lane = divmod(thread, 32)
        issued = Issued(order.knowledge_of(warp, lane), engine, thread, order.next)
        issued.details = operation.details
        instruction = operation.decoded.index
        if engine == "tensor":
            issued.column = order.column("tensor", thread)
            issued.reads = issued.writes = order.record_engine(instruction, issued.column, issued)
            self._order_tensor(operation, issued)
        elif engine in _STORES:
            read, issued.column = order.column("bulk reads", thread), order.column("bulk writes", thread)
            issued.reads = order.record_engine(instruction, read, issued)
            issued.writes = order.record_engine(instruction, issued.column, issued)
        elif engine in COPIES:
            issued.column = order.column("copies", operation.details["mbarrier"])
        else:
            issued.column = order.column(engine, thread)
            issued.reads = issued.writes = order.record_engine(instruction, issued.column, issued)
        self.operations[operation] = issued
        if engine in _STORES or engine == "cp_async":
            self._open["bulk" if engine in _STORES else engine, thread] = (issued.reads, issued.writes)

    def _order_tensor(self, operation, issued: Issued) -> None:
        """The order of the tensor pipe among operations of one thread.

        Lenient (default): they execute in issue order, whatever they accumulate into. This is how kernels of this kind
        use the hardware (a plan's MMA order relies on it across accumulators). Strict: as the ISA promises, only MMAs
        with the same accumulator and shape follow each other; all else has to be waited for.
        """
        clock = self.order.fit(issued.knowledge)
        if not self.order.strict:
            clock[ORDER, issued.column] = issued.writes
        elif "accumulator" in operation.details:
            details = operation.details
            issued.chain = (issued.thread, details["accumulator"], repr(details["shape"]))

    def record_copy(self, operation) -> Issued | None:
        """The operation behind an engine's access, with its records."""
        issued = self.operations.get(operation)
        if issued is not None and not issued.writes:
            number = self.order.record_engine(operation.decoded.index, issued.column, issued)
            issued.reads = issued.writes = number
        return issued

    def completed(self, event) -> None:
        """Forget an operation, and what its issuer knew."""
        issued = self.operations.pop(event.operation, None)
        if issued is not None:
            issued.knowledge = self._no_knowledge

    def group(self, event) -> None:
        """commit_group or wait_group of one thread."""
        groups = self.groups.setdefault((event.kind, event.thread), [])
        if event.op == "commit":
            groups.append(self._open.get((event.kind, event.thread), (0, 0)))
            return
        complete = len(groups) - event.operations[0]
        if complete <= 0 or not groups[complete - 1][0]:
            return
        reads, writes = groups[complete - 1]
        records = self.order.records
        self.order.learn_stream(event.thread, int(records.column[reads]), reads)
        if not event.read_only:
            self.order.learn_stream(event.thread, int(records.column[writes]), writes)

    def unfinished_stores(self) -> Iterator[tuple[int, int, bool]]:
        """(thread, record, whether its group was committed) of bulk stores that may still read shared memory."""
        for (kind, thread), (reads, _) in self._open.items():
            column = self.order.records.column[reads]
            if kind == "bulk" and self.order.knows(thread >> 5, thread & 31)[column] <= reads:
                groups = self.groups.get((kind, thread))
                yield thread, reads, bool(groups) and groups[-1][0] == reads
