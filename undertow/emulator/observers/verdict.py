"""From two unordered accesses to a finding: which rule, in which words, once per pair of instructions."""

from __future__ import annotations

from typing import Any

from .base import Finding, Ledger
from .clocks import Issued, Order
from .lifetime import aliased
from .names import Names
from .shared_shadow import Conflict

_ALERTS = {
    "warp-sync": "bar.warp.sync between the lanes' accesses and the elected lane's arrival, issue or access",
    "missing-proxy-fence": "fence.proxy.async by the threads that wrote, before they signal",
    "tmem-load-not-waited": "tcgen05.wait::ld before the signal that hands the columns on",
    "tmem-store-not-waited": "tcgen05.wait::st before the signal that hands the columns on",
    "tmem-lifetime": "a barrier of all that use the columns, before tcgen05.dealloc",
    "global-order": "a release after, and an acquire before, of one global word",
}
_BETWEEN_CTAS = "barrier.cluster by both CTAs, or an arrival at an mbarrier of the other one and a wait there"
_WAITS = {
    "tensor": "a wait for the mbarrier of a tcgen05.commit behind the MMA",
    "wgmma": "wgmma.commit_group and a wgmma.wait_group that covers the MMA, then a signal",
    "bulk_load": "a wait for the mbarrier phase that the copy completes",
    "tensor_load": "a wait for the mbarrier phase that the copy completes",
    "bulk_store": "cp.async.bulk.wait_group by the thread that issued it, then a signal",
    "bulk_reduce": "cp.async.bulk.wait_group by the thread that issued it, then a signal",
    "cp_async": "cp.async.wait_group by the thread that issued it, then a signal",
}


class Verdict:
    """Judges conflicts and files findings. `orders` holds the Order of every CTA seen, by number."""

    def __init__(self, names: Names, ledger: Ledger, granule_shift: int):
        self.names = names
        self.ledger = ledger
        self.shift = granule_shift
        self.orders: dict[int, Order] = {}

    # Shared and tensor memory

    def shared(self, order: Order, conflict: Conflict) -> None:
        """Two accesses of a shared granule."""
        rule = "missing-proxy-fence" if conflict.kind == "proxy" else self._order_rule(order, conflict)
        if self._known(rule, order, conflict):
            return
        buffer = self.names.shared(conflict.place << self.shift)
        self._file(rule, order, conflict, (buffer, buffer), "")

    def tensor(self, order: Order, conflict: Conflict) -> None:
        """Two accesses of a TMEM column."""
        frees = self._opcode(order, conflict.later).startswith("tcgen05.dealloc")
        rules = {"load": "tmem-load-not-waited", "store": "tmem-store-not-waited"}
        rule = rules.get(conflict.kind) or ("tmem-lifetime" if frees else self._order_rule(order, conflict))
        earlier, later = (self._region(order, conflict, side) for side in ("earlier", "later"))
        alias = ""
        if earlier and later and earlier != later and not frees:
            alias = aliased((earlier, conflict.earlier_writes), (later, conflict.later_writes))
            rule = "alias-lifetime" if rule == "race" else rule
        if self._known(rule, order, conflict):
            return
        first, last = conflict.place, conflict.place + conflict.extent - 1
        columns = f"TMEM columns {first}..{last}" if last > first else f"TMEM column {first}"
        buffers = tuple(f"{columns} ({region or self.names.labels.tmem(first)})" for region in (earlier, later))
        self._file(rule, order, conflict, buffers, alias)

    def _region(self, order: Order, conflict: Conflict, side: str) -> str | None:
        number, writes = getattr(conflict, side), getattr(conflict, f"{side}_writes")
        operation = order.records.operations.get(number)
        warp = operation.thread // 32 if operation else int(order.records.column[number]) // 32
        engine, details = (operation.engine, operation.details) if operation else ("", None)
        return self.names.region(self.names.role(warp), engine, writes, conflict.place, details)

    def _order_rule(self, order: Order, conflict: Conflict) -> str:
        """race, or warp-sync if the edge exists for some lane of the earlier warp, or both are lanes of one warp.

        What was accessed after an operation had been issued races with the operation, whoever issued it.
        """
        column = int(order.records.column[conflict.earlier])
        if column >= order.num_threads:
            return "race"
        later = order.records.operations.get(conflict.later)
        warp = later.thread // 32 if later else int(order.records.column[conflict.later]) // 32
        if later and (conflict.earlier >= later.issued or later.engine == "wgmma"):
            return "race"
        if warp == column // 32:
            return "warp-sync"
        clock = order.fit(later.knowledge)[0] if later else order.knows(warp, conflict.later_lane)
        return "warp-sync" if clock[column : column + 32].max() > conflict.earlier else "race"

    def _known(self, rule: str, order: Order, conflict: Conflict) -> bool:
        return self.ledger.has(*self._key(rule, order, conflict))

    @staticmethod
    def _key(rule: str, order: Order, conflict: Conflict) -> tuple:
        instruction = order.records.instruction
        return rule, *sorted((int(instruction[conflict.earlier]), int(instruction[conflict.later])))

    def _opcode(self, order: Order, number: int) -> str:
        return self.names.program.code[int(order.records.instruction[number])].instruction.mnemonic

    def _file(self, rule: str, order: Order, conflict: Conflict, buffers: tuple, alias: str) -> None:
        earlier = self.names.access(
            order, conflict.earlier, conflict.earlier_lane, _verb(conflict.earlier_writes), buffers[0]
        )
        frees = self._opcode(order, conflict.later).startswith("tcgen05.dealloc")
        verb = "frees" if frees else _verb(conflict.later_writes)
        later = self.names.access(order, conflict.later, conflict.later_lane, verb, buffers[1])
        operation: Issued | None = order.records.operations.get(conflict.earlier)
        missing = _ALERTS.get(rule) or (_WAITS[operation.engine] if operation else "")
        if alias:
            barrier = self.names.barrier_of(earlier.role, later.role)
            missing = missing or f"the alias guard of {alias}: {barrier} between the two"
        missing = missing or "an arrival after the first and a wait before the second, or a barrier of both"
        head = f"{alias}: " if alias else ""
        self.ledger.add(
            self._key(rule, order, conflict),
            Finding(
                rule, f"{head}{_sentence(earlier, later)}", str(later), str(earlier), _hint(rule), missing,
                (earlier, later),
            ),
        )  # fmt: skip

    # Global memory

    def global_memory(self, earlier: tuple, later: tuple, kinds: tuple, place: int | str, clock, remark: str) -> None:
        """Two accesses of a granule by CTAs; earlier and later are (CTA, record, lane).

        place: a global address, or the name of what is accessed in the shared memory of a cluster.
        remark: "same value" if both write what is there already, "early end" if only the end of the first is unknown,
        "proxy" if only the fence is missing.
        """
        first, second = self.orders[earlier[0]], self.orders[later[0]]
        rule = "missing-proxy-fence" if remark == "proxy" else "race" if isinstance(place, str) else "global-order"
        column = int(first.records.column[earlier[1]])
        if earlier[0] == later[0] and column < first.num_threads and not remark:
            same_warp = column // 32 == int(second.records.column[later[1]]) // 32
            if same_warp or (clock is not None and clock[column : column + 32].max() > earlier[1]):
                rule = "warp-sync"
        places = (int(first.records.instruction[earlier[1]]), int(second.records.instruction[later[1]]))
        key = (rule, *sorted(places))
        if self.ledger.has(*key):
            return
        buffer = place if isinstance(place, str) else self.names.global_memory(place)
        accesses = tuple(
            self.names.access(order, number, lane, _verb(writes), buffer)
            for order, (_, number, lane), writes in zip((first, second), (earlier, later), kinds, strict=True)
        )
        operation = first.records.operations.get(earlier[1])
        missing = _WAITS[operation.engine] if operation else _ALERTS.get(rule, _BETWEEN_CTAS)
        message = _sentence(*accesses)
        if remark == "early end":
            message = f"the signal between them does not cover the end of the first: {message}"
        elif remark == "same value":
            message = f"both write the same value: {message}"
        severity = "advice" if remark == "same value" else "error"
        self.ledger.add(
            key,
            Finding(rule, message, str(accesses[1]), str(accesses[0]), _hint(rule), missing, accesses, 1, severity),
        )

    def exit_while_read(self, order: Order, number: int, thread: int, committed: bool) -> None:
        """A CTA ends although a bulk store may still read its shared memory.

        POLICY: advice where the store was never committed to a group, so that nobody meant to wait. The ISA does not
        say whether the hardware holds the memory back; flash-attn-4 ends like that.
        """
        instruction = int(order.records.instruction[number])
        if self.ledger.has("global-order", instruction, -1):
            return
        access = self.names.access(order, number, 0, "reads", "its shared-memory source")
        message = f"the CTA ends while a copy may still read its shared memory: {access}"
        missing = f"cp.async.bulk.wait_group (or .read) by thread {thread} before it exits"
        hint = "shared memory of a finished CTA is given to the next one"
        self.ledger.add(
            ("global-order", instruction, -1),
            Finding(
                "global-order",
                message,
                str(access),
                "",
                hint,
                missing,
                (access,),
                1,
                "error" if committed else "advice",
            ),
        )

    def mbarrier_init(self, order: Order, event: Any, number: int, kind: str) -> None:
        """An mbarrier is used although its init is not ordered before, or not visible to the engine."""
        rule = "missing-proxy-fence" if kind == "proxy" else "race"
        key = (rule, int(order.records.instruction[number]), event.decoded.index)
        if self.ledger.has(*key):
            return
        buffer = self.names.shared(event.address)
        init = self.names.access(order, number, 0, "initialises mbarrier", buffer)
        user = self.names.program.where(event.decoded.index)
        what = f"{event.op} on mbarrier {buffer} by warp {event.lanes.warps[0]} at {user}"
        missing = "fence.mbarrier_init or fence.proxy.async by the thread that initialised" if kind == "proxy" else (
            "a barrier between mbarrier.init and the first use"
        )  # fmt: skip
        message = f"{what} is not ordered after its init" if kind == "order" else f"{what}: its init is not fenced"
        self.ledger.add(key, Finding(rule, message, user, str(init), _hint(rule), missing, (init,)))

    def mbarrier_reuse(self, order: Order, event: Any, column: int) -> None:
        """An mbarrier ends, or begins anew, while somebody may still use it."""
        key = ("mbarrier-reinitialised", event.decoded.index)
        if self.ledger.has(*key):
            return
        if column < order.num_threads:
            user = f"warp {column // 32} ({self.names.role(column // 32)})"
        else:
            user = " of ".join(map(str, order.column_names[column - order.num_threads][:1]))
        where = self.names.program.where(event.decoded.index)
        message = (
            f"{event.op} of mbarrier {self.names.shared(event.address)}: its last use by {user} is not known to be over"
        )
        missing = "a barrier of all users before mbarrier.inval, and another before the next use"
        self.ledger.add(key, Finding("mbarrier-reinitialised", message, where, "", "", missing))


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"


def _sentence(earlier, later) -> str:
    def short(access) -> str:
        who = f"warp {access.warp}" + (f" ({access.role})" if access.role != f"warp {access.warp}" else "")
        return f"{access.engine} of {who}" if access.engine else who

    return (
        f"{short(later)} {later.verb} {later.buffer} that {short(earlier)} {earlier.verb}, and nothing orders the two"
        if later.buffer == earlier.buffer
        else f"{short(later)} {later.verb} {later.buffer}, {short(earlier)} {earlier.verb} {earlier.buffer}, and"
        " nothing orders the two"
    )


def _hint(rule: str) -> str:
    return {
        "warp-sync": "lanes of a warp are threads; an elected lane speaks for the others only after a join",
        "missing-proxy-fence": "engines see ordinary stores only after a proxy fence of the thread that stored",
        "tmem-load-not-waited": "tcgen05.ld is in flight until tcgen05.wait::ld, even if no lane uses its registers",
        "tmem-store-not-waited": "tcgen05.st is in flight until tcgen05.wait::st",
        "alias-lifetime": "two regions share these columns; the reader's warps must all have read before anyone writes",
        "global-order": "wait_group.read only says that the source was read; wait_group that the result is written",
    }.get(rule, "")
