"""Races: pairs of accesses to the same bytes, at least one a write, that nothing orders.

Shared memory, tensor memory and global memory under one happens-before (`clocks`, `synchronisation`). Which rule a
missing edge is reported under:

missing-proxy-fence    ordered, but without fence.proxy.async between a generic write and an engine's access; also an
                       mbarrier whose init was not fenced before an engine signals it
tmem-load-not-waited   a tcgen05.ld is published before its wait::ld
tmem-store-not-waited  a tcgen05.st is published before its wait::st
tmem-lifetime          tcgen05.dealloc while somebody's accesses to the columns are not known to be over
global-order           global memory: see `global_shadow`
warp-sync              the edge is there for one lane of the warp, but nothing joined the other lanes to it; or both
                       accesses are by lanes of one warp
alias-lifetime         as race, where the plan knows two regions that share the columns: "P over S"
race                   everything else

STRICT differs in these rules (lenient is the default): the order of MMAs with different accumulators
(`Synchronisation._order_tensor`), which thread's proxy fence counts (`Order.fence_proxy`), engine writes after generic
reads (a proxy fence is then wanted, too; by the ISA's letter a write-after-read across proxies needs one, in practice
the arrival of the readers suffices, and every published kernel relies on it), a warp's own ld and st without wait.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .. import events as ev
from .base import Finding, Ledger
from .clocks import ORDER, Issued, Order
from .cluster_order import CLUSTER_BARRIER, ClusterBarrier, ClusterShadow, knows_init, signal
from .global_shadow import GlobalShadow
from .named_barrier import NamedBarrierRounds
from .names import Names
from .shared_shadow import Conflict, SharedShadow, Touch
from .synchronisation import Synchronisation
from .tensor_shadow import TensorShadow
from .verdict import Verdict

_NARROW = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}


class Watch:
    """What is known about one CTA."""

    def __init__(self, cta: Any, strict: bool, granule_shift: int, verdict: Verdict):
        self.cta = cta
        self.order = Order(cta.number, len(cta.warps), strict)
        self.order.position = cta.position
        self.sync = Synchronisation(cta, self.order)
        size = (cta.shared.end >> granule_shift) + 1
        self.shared = SharedShadow(self.order, size, lambda conflict: verdict.shared(self.order, conflict))
        self.tensor = TensorShadow(self.order, lambda conflict: verdict.tensor(self.order, conflict))
        self.initialised: dict[int, tuple[int, int, bool]] = {}
        self.told: dict[int, set[int]] = {}
        self.uses: dict[int, dict[int, int]] = {}
        self.rounds = NamedBarrierRounds(self.order, verdict.names, verdict.ledger)


class Race:
    """The happens-before observer; see the module docstring. labels, plan: names for findings."""

    subscriptions: ClassVar[tuple[type, ...]] = (
        ev.CtaStarted, ev.CtaFinished, ev.MemoryAccess, ev.TmemAccess, ev.TmemAllocation, ev.TmemWait,
        ev.MbarrierOperation, ev.BarrierOperation, ev.WarpSynchronised, ev.FenceExecuted, ev.AsyncIssued,
        ev.AsyncCompleted, ev.BulkGroup, ev.WarpgroupStep,
    )  # fmt: skip

    def __init__(self, strict: bool = False, plan: Any = None, labels: Any = None):
        self.strict, self._plan, self._labels = strict, plan, labels
        self.ledger = Ledger()
        self._handlers = {
            ev.MemoryAccess: self._memory,
            ev.TmemAccess: self._tmem,
            ev.TmemAllocation: self._allocation,
            ev.TmemWait: self._tmem_wait,
            ev.MbarrierOperation: self._mbarrier,
            ev.BarrierOperation: self._named_barrier,
            ev.WarpSynchronised: lambda e: self._of(e.lanes).sync.warp_sync(e),
            ev.FenceExecuted: self._fence,
            ev.AsyncIssued: lambda e: self._of(e.lanes).sync.issue(e),
            ev.AsyncCompleted: lambda e: self._of(e.operation.lanes).sync.completed(e),
            ev.BulkGroup: lambda e: self._of(e.lanes).sync.group(e),
            ev.WarpgroupStep: lambda e: self._of(e.lanes).sync.warpgroups.step(e),
            ev.CtaStarted: self._started,
            ev.CtaFinished: self._finished,
        }

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch."""
        self.names = Names(program, launch, self._labels, self._plan)
        self.verdict = Verdict(self.names, self.ledger, _granule_shift(program))
        self._shift = _granule_shift(program)
        self._watches: dict[int, Watch] = {}
        self._global = GlobalShadow(self.verdict, self._shift, self.strict)
        self._between = ClusterShadow(self.verdict, self._shift, self.strict)
        self._cluster_barrier = ClusterBarrier()
        self._lane_cache: dict = {}
        self._granule_cache: dict = {}

    def observe(self, event: Any) -> None:
        """Take one event."""
        self._handlers[type(event)](event)

    def finish(self) -> list[Finding]:
        """All races found; a warp-sync between the instructions of a race is the same missing barrier."""
        races = {key[1:] for key in self.ledger.findings if key[0] in ("race", "alias-lifetime", "global-order")}
        return [f for key, f in self.ledger.findings.items() if key[0] != "warp-sync" or key[1:] not in races]

    def racing_instructions(self) -> set[int]:
        """Instructions that take part in some race."""
        return {index for key in self.ledger.findings for index in key[1:] if isinstance(index, int)}

    def _of(self, lanes: Any) -> Watch:
        return self._watches[id(lanes.cta)]

    def _started(self, event) -> None:
        self.names.memory = event.cta.machine.global_memory
        watch = self._watches[id(event.cta)] = Watch(event.cta, self.strict, self._shift, self.verdict)
        self.verdict.orders[watch.order.number] = watch.order

    def _finished(self, event) -> None:
        watch = self._watches[id(event.cta)]
        for thread, reads, committed in watch.sync.unfinished_stores():
            self.verdict.exit_while_read(watch.order, reads, thread, committed)
        watch.rounds.end(watch.cta)
        self._between.forget(event.cta)
        watch.order.retire()
        del self._watches[id(event.cta)]

    # Memory

    def _memory(self, event) -> None:
        watch = self._of(event.lanes)
        if event.space == "shared":
            if event.operation is not None:
                self._engine_shared(watch, event)
                return
            touch = self._touch(watch, event)
            if event.home is None:
                watch.shared.read(touch) if event.kind == "read" else watch.shared.write(touch)
            if len(watch.cta.cluster.ctas) > 1:
                self._between.of(event.home or watch.cta).warps(watch, event, touch)
            if touch.strong:
                self._global.synchronise(watch, event)
        elif event.space == "global":
            if event.operation is not None:
                issued = watch.sync.record_copy(event.operation)
                if issued is not None:
                    self._global.engine(watch, event, issued)
            else:
                self._global.warps(watch, event, self._touch(watch, event))

    def _engine_shared(self, watch: Watch, event) -> None:
        issued = watch.sync.record_copy(event.operation)
        if issued is None:
            return
        if len(watch.cta.cluster.ctas) > 1:
            self._between.of(event.home or watch.cta).engine(watch, event, issued)
        if event.home is not None:
            return
        granules = self._engine_granules(event)
        if event.kind == "read":
            watch.shared.engine_read(issued, granules, _stream(issued))
        else:
            watch.shared.engine_write(issued, granules, event.proxy == "generic")

    def _engine_granules(self, event):
        count = max(event.size >> self._shift, 1)
        if len(event.addresses) == 1:
            start = int(event.addresses[0]) >> self._shift
            return slice(start, start + count)
        key = (id(event.addresses), count)
        cached = self._granule_cache.get(key)
        if cached is None or cached[0] is not event.addresses:
            starts = event.addresses.astype(np.int64) >> self._shift
            cached = (event.addresses, (starts[:, None] + np.arange(count)).reshape(-1))
            self._granule_cache[key] = cached
        return cached[1]

    def _touch(self, watch: Watch, event) -> Touch:
        """One entry per granule of an access by warps."""
        lanes, which = event.lanes, event.which
        first = watch.order.record_warps(event.decoded.index, lanes.warps)
        count = max(event.size >> self._shift, 1)
        granules = event.addresses.astype(np.int64) >> self._shift
        strong = event.kind == "atomic" or event.order not in ("weak", "")
        threads, ordinal = self._threads_of(lanes, 1)
        whole = len(which) == lanes.n
        several = False
        if event.kind == "read" and whole and lanes.full:
            rows = granules.reshape(-1, 32)
            if (rows == rows[:, :1]).all():
                granules, several = rows[:, 0], True
                threads, ordinal = threads[::32], ordinal[::32]
        if not whole:
            threads, ordinal = threads[which], ordinal[which]
        if count > 1:
            granules = (granules[:, None] + np.arange(count)).reshape(-1)
            if whole and not several:
                threads, ordinal = self._threads_of(lanes, count)
            else:
                threads, ordinal = np.repeat(threads, count), np.repeat(ordinal, count)
        return Touch(lanes.warps, first, threads, ordinal, granules, several, strong)

    def _threads_of(self, lanes, count: int) -> tuple[np.ndarray, np.ndarray]:
        key = (lanes, count)
        found = self._lane_cache.get(key)
        if found is None:
            threads = lanes.index.astype(np.int64)
            ordinal = (threads >> 5) - lanes.warps[0]
            found = self._lane_cache[key] = (np.repeat(threads, count), np.repeat(ordinal, count))
        return found

    def _tmem(self, event) -> None:
        watch = self._of(event.lanes)
        columns = slice(event.column, event.column + event.num_columns)
        if event.operation is None:
            number = watch.order.record_warps(event.decoded.index, [event.warp])
            (watch.tensor.load if event.kind == "read" else watch.tensor.store)(event.warp, number, columns)
            return
        issued = watch.sync.operations[event.operation]
        (watch.tensor.engine_load if event.kind == "read" else watch.tensor.engine_store)(issued, columns)

    def _allocation(self, event) -> None:
        watch = self._of(event.lanes)
        columns = slice(event.column, event.column + event.num_columns)
        if event.op == "alloc":
            watch.tensor.allocate(columns)
        elif event.op == "dealloc":
            number = watch.order.record_warps(event.decoded.index, event.lanes.warps[:1])
            watch.tensor.free(event.lanes.warps[0], number, columns)

    def _tmem_wait(self, event) -> None:
        watch = self._of(event.lanes)
        for warp in event.lanes.warps:
            if event.kind in ("read", "write"):
                watch.tensor.wait(warp, event.kind)
            elif event.kind == "after":
                watch.sync.catch_up(warp, None)

    def _named_barrier(self, event) -> None:
        watch = self._of(event.lanes)
        if event.barrier == CLUSTER_BARRIER:
            self._cluster_barrier.step(watch, event)
            return
        if event.op != "leave":
            watch.rounds.arrive(event)
        watch.sync.named_barrier(event)

    # mbarriers as memory: their init must be seen, and their uses be over before the word has another life

    def _mbarrier(self, event) -> None:
        watch = self._of(event.lanes)
        if event.home is not None:
            self._remote_mbarrier(watch, event)
            return
        if event.op in ("init", "inval"):
            self._check_reuse(watch, event)
        else:
            self._note_use(watch, event)
        if event.op == "init":
            first = watch.order.record_warps(event.decoded.index, event.lanes.warps[:1])
            thread = int(event.lanes.index[0 if event.which is None else event.which[0]])
            watch.initialised[event.address] = (first, thread, False)
            watch.told.pop(event.address, None)
        elif event.address in watch.initialised:
            self._check_init(watch, event)
        watch.sync.mbarrier(event)

    def _remote_mbarrier(self, watch: Watch, event) -> None:
        """A signal at an mbarrier of another CTA of the cluster."""
        home = self._watches[id(event.home)]
        if event.address in home.initialised:
            number, thread, _ = home.initialised[event.address]
            if not knows_init(watch, event, home.order, thread, number):
                self.verdict.mbarrier_init(home.order, event, number, "order")
        barrier = home.sync.mbarriers.get(event.address)
        if barrier is not None and event.op != "expect_tx":
            signal(watch, event, home.order, barrier)

    def _check_init(self, watch: Watch, event) -> None:
        """An mbarrier may be used by whoever its init happens before; by an engine once it is fenced as well."""
        number, thread, fenced = watch.initialised[event.address]
        if event.operation is not None:
            issued: Issued | None = watch.sync.operations.get(event.operation)
            if issued is None:
                return
            clock = watch.order.fit(issued.knowledge)[ORDER]
            if clock[thread] <= number:
                self.verdict.mbarrier_init(watch.order, event, number, "order")
            elif not fenced:
                self.verdict.mbarrier_init(watch.order, event, number, "proxy")
            return
        told = watch.told.setdefault(event.address, set())
        if told.issuperset(event.lanes.warps):
            return
        threads = event.lanes.index if event.which is None else event.lanes.index[event.which]
        for user in threads.tolist():
            if user >> 5 in told or user == thread:
                continue
            if watch.order.knows(user >> 5, user & 31)[thread] <= number:
                self.verdict.mbarrier_init(watch.order, event, number, "order")
                return
            if watch.order.rows[user >> 5, ORDER, thread] > number:
                told.add(user >> 5)

    def _note_use(self, watch: Watch, event) -> None:
        """Remember the last use of an mbarrier by each thread and engine."""
        uses = watch.uses.setdefault(event.address, {})
        if event.operation is not None:
            issued = watch.sync.record_copy(event.operation)
            if issued is not None:
                uses[issued.column] = issued.writes - (issued.engine == "tensor")
            return
        moment = watch.order.tick()
        threads = event.lanes.index if event.which is None else event.lanes.index[event.which]
        uses.update(dict.fromkeys(threads.tolist() if len(threads) < 32 else threads[::32].tolist(), moment))

    def _check_reuse(self, watch: Watch, event) -> None:
        """mbarrier.inval, or a new init, must come after every use of the word."""
        thread = int(event.lanes.index[0 if event.which is None else event.which[0]])
        clock = watch.order.knows(thread >> 5, thread & 31)
        for column, moment in watch.uses.pop(event.address, {}).items():
            if column != thread and (column >= len(clock) or clock[column] <= moment):
                self.verdict.mbarrier_reuse(watch.order, event, column)
                break
        watch.uses[event.address] = {thread: watch.order.tick()}

    def _fence(self, event) -> None:
        watch = self._of(event.lanes)
        name, proxy = event.decoded.row.name, event.decoded.mods.get("proxy") or ""
        if name.startswith("fence.mbarrier_init") or (proxy.startswith("async") and proxy != "async.global"):
            threads = set((event.lanes.index if event.mask is None else event.lanes.index[event.mask]).tolist())
            for address, (number, thread, _) in watch.initialised.items():
                if thread in threads:
                    watch.initialised[address] = (number, thread, True)
        watch.sync.fence(event)


def _stream(issued: Issued) -> str:
    """Readers of which only the latest is kept: the tensor pipe, each warpgroup, bulk stores."""
    if issued.engine == "wgmma":
        return f"warpgroup {issued.thread // 128}"
    return "tensor" if issued.engine == "tensor" else "bulk"


def _granule_shift(program: Any) -> int:
    """log2 of the granule: 4 bytes, or less if the kernel itself loads or stores less."""
    smallest = 4
    for decoded in program.code:
        if decoded.instruction.opcode in ("ld", "st", "atom", "red") and decoded.mods.get("space") != "param":
            smallest = min(smallest, _NARROW.get(decoded.mods.get("type") or "", 4))
    return smallest.bit_length() - 1


__all__ = ["Conflict", "Race"]
