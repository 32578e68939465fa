"""The protocol of mbarriers, apart from the data they guard.

mbarrier-bytes           bytes that were expected and bytes that came differ: a phase that never ends, bytes that are
                         left over at the end of the CTA, or a copy that lands in a later phase than it was issued in
mbarrier-missed-phase    the same wait instruction of a warp returned on the phase it had already seen, while the
                         barrier goes on to later phases: it did not wait for anything new
mbarrier-doubled-phase   two phases end without a wait in between, by different warps' arrivals, or by those of a warp
                         that has itself waited for nothing since its first
mbarrier-unobserved-phase  a phase ends, and the next one too, before anybody has waited for it
mbarrier-leftover        at the end of the CTA a phase has begun and not ended

POLICY: waiting again for a barrier that completes once per CTA is an idiom, not a miss. The last phase of a barrier
may go unseen (the tail of a pipeline). A wait that failed (test_wait, or a try_wait that expired) saw nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .. import events as ev
from ..errors import Deadlock, EmulatorError
from .base import Finding, Ledger
from .names import Names


@dataclass
class _Barrier:
    """What has happened at one mbarrier since its init."""

    init: int
    phase: int = 0
    arrivals: dict[int, dict[str, int]] = field(default_factory=dict)
    enders: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    last_of: dict[tuple[int, int], int] = field(default_factory=dict)
    repeats: dict[tuple[int, int], int] = field(default_factory=dict)
    touched: bool = False
    last: int = -1


class MbarrierProtocol:
    """Follows every mbarrier of every CTA."""

    subscriptions: ClassVar[tuple[type, ...]] = (
        ev.CtaStarted,
        ev.CtaFinished,
        ev.MbarrierOperation,
        ev.AsyncIssued,
        ev.AsyncCompleted,
    )

    def __init__(self, plan: Any = None, labels: Any = None):
        self._plan, self._labels = plan, labels
        self.ledger = Ledger()

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch."""
        self._program = program
        self._names = Names(program, launch, self._labels, self._plan)
        self._ctas: dict[int, tuple[Any, dict[int, _Barrier]]] = {}
        self._issued: dict[tuple[Any, int], int] = {}
        self._waits: Counter = Counter()

    def observe(self, event: Any) -> None:
        """Take one event."""
        if isinstance(event, ev.CtaStarted):
            self._ctas[id(event.cta)] = (event.cta, {})
        elif isinstance(event, ev.CtaFinished):
            self._end(*self._ctas.pop(id(event.cta)), finished=True)
        elif isinstance(event, ev.AsyncIssued):
            self._issue(event)
        elif isinstance(event, ev.AsyncCompleted):
            for key in [key for key in self._issued if key[0] is event.operation]:
                del self._issued[key]
        else:
            self._operate(event)

    def stopped(self, error: EmulatorError) -> None:
        """After another error than a deadlock, what is under way is no evidence."""
        if not isinstance(error, Deadlock):
            self._ctas = {}

    def finish(self) -> list[Finding]:
        """All findings; CTAs that did not end are judged as they stand."""
        for cta, barriers in self._ctas.values():
            self._end(cta, barriers, finished=False)
        self._ctas = {}
        return self.ledger.list()

    def _issue(self, event) -> None:
        operation = event.operation
        word = operation.details.get("mbarrier")
        if word is not None and operation.engine != "tensor":
            for home in operation.details.get("homes", (operation.lanes.cta,)):
                cell = home.shared.cells.get(word)
                if cell is not None:
                    self._issued[operation, id(home)] = cell.phase

    def _operate(self, event) -> None:
        barriers = self._ctas[id(event.home or event.lanes.cta)][1]
        if event.op == "init":
            barriers[event.address] = _Barrier(event.decoded.index)
            return
        barrier = barriers.get(event.address)
        if barrier is None:
            return
        if event.op == "inval":
            self._judge_repeats(event.address, barrier)
            del barriers[event.address]
        elif event.op == "wait":
            if event.completed:
                self._wait(event, barrier)
        else:
            self._signal(event, barrier)

    def _wait(self, event, barrier: _Barrier) -> None:
        phase = event.phase
        barrier.seen.add(phase)
        for warp in event.lanes.warps:
            self._waits[id(event.lanes.cta), warp] += 1
        if phase < 0:
            return
        for warp in event.lanes.warps:
            key = (event.decoded.index, warp)
            if barrier.last_of.get(key) == phase:
                barrier.repeats.setdefault(key, phase)
            barrier.last_of[key] = phase

    def _signal(self, event, barrier: _Barrier) -> None:
        barrier.touched, barrier.last = True, event.decoded.index
        if event.op == "complete_tx" and self._issued.get(self._key(event), event.phase) < event.phase:
            self._late_bytes(event)
        if event.op in ("arrive", "arrive_drop"):
            warps = {event.operation.warp} if event.operation else set(event.lanes.warps)
            cta = id(event.lanes.cta)
            whose = "" if event.home is None else f" of CTA {event.lanes.cta.position}"
            arrivals = {f"{warp}{whose}": self._waits[cta, warp] for warp in warps}
            barrier.arrivals.setdefault(event.phase, {}).update(arrivals)
        if event.completed:
            barrier.touched = False
            barrier.phase = event.phase + 1
            barrier.enders[event.phase] = event.decoded.index
            if event.phase and event.phase - 1 not in barrier.seen:
                self._unseen(event, barrier)
            barrier.arrivals.pop(event.phase - 1, None)
            barrier.seen.discard(event.phase - 2)

    @staticmethod
    def _key(event) -> tuple[Any, int]:
        return event.operation, id(event.home or event.lanes.cta)

    def _unseen(self, event, barrier: _Barrier) -> None:
        """Two phases ended with no wait for the first."""
        before, now = (barrier.arrivals.get(event.phase - k, {}) for k in (1, 0))
        both = before.keys() & now.keys()
        doubled = bool(before and now) and all(before[warp] == now[warp] for warp in both)
        rule = "mbarrier-doubled-phase" if doubled else "mbarrier-unobserved-phase"
        index = event.decoded.index
        earlier = barrier.enders[event.phase - 1]
        if self.ledger.has(rule, earlier, index):
            return
        name = self._names.shared(event.address)
        if doubled:
            message = (
                f"phases {event.phase - 1} (by warps {_listed(before)}) and {event.phase} (by warps {_listed(now)}) of"
                f" mbarrier {name} both ended before anybody waited: two completions where the waiters expect one"
            )
            hint = "the arrival count of mbarrier.init should cover both groups"
        else:
            message = (
                f"phase {event.phase} of mbarrier {name} ended before anybody had waited for phase {event.phase - 1}"
            )
            hint = "a parity wait cannot tell a phase from the one two later"
        self.ledger.add(
            (rule, earlier, index),
            Finding(rule, message, self._program.where(index), self._program.where(earlier), hint),
        )

    def _late_bytes(self, event) -> None:
        key = ("mbarrier-bytes", event.decoded.index, event.address)
        if self.ledger.has(*key):
            return
        issued = self._issued[self._key(event)]
        message = (
            f"{event.count} bytes of a copy issued in phase {issued} of mbarrier"
            f" {self._names.shared(event.address)} landed in phase {event.phase}: its own phase ended without them"
        )
        hint = "expect_tx must announce the bytes of all copies of the phase"
        self.ledger.add(key, Finding("mbarrier-bytes", message, self._program.where(event.decoded.index), hint=hint))

    def _end(self, cta: Any, barriers: dict[int, _Barrier], finished: bool) -> None:
        for address, barrier in barriers.items():
            self._judge_repeats(address, barrier)
            cell = cta.shared.cells.get(address)
            if cell is None:
                continue
            if cell.tx and not cta.engines.pending:
                self._bytes_left(address, barrier, cell)
            elif finished and cell.pending != cell.count:
                self._arrivals_left(address, barrier, cell)

    def _bytes_left(self, address: int, barrier: _Barrier, cell: Any) -> None:
        key = ("mbarrier-bytes", address)
        if self.ledger.has(*key):
            return
        what = (
            f"{cell.tx} expected bytes never came" if cell.tx > 0 else f"{-cell.tx} bytes more came than were expected"
        )
        message = f"phase {cell.phase} of mbarrier {self._names.shared(address)}: {what}; it cannot end"
        hint = "expect_tx must be the sum of the bytes of all copies of the phase"
        self.ledger.add(key, Finding("mbarrier-bytes", message, self._program.where(barrier.last), hint=hint))

    def _arrivals_left(self, address: int, barrier: _Barrier, cell: Any) -> None:
        key = ("mbarrier-leftover", address)
        if self.ledger.has(*key):
            return
        arrived = cell.count - cell.pending
        message = (
            f"the CTA ends in the middle of phase {cell.phase} of mbarrier {self._names.shared(address)}:"
            f" {arrived} of {cell.count} arrivals"
        )
        self.ledger.add(key, Finding("mbarrier-leftover", message, self._program.where(barrier.last)))

    def _judge_repeats(self, address: int, barrier: _Barrier) -> None:
        for (index, warp), phase in barrier.repeats.items():
            if barrier.phase <= phase + 1 or self.ledger.has("mbarrier-missed-phase", index):
                continue
            message = (
                f"warp {warp} ({self._names.role(warp)}) waited for phase {phase} of mbarrier"
                f" {self._names.shared(address)} again: the wait returned at once and ordered nothing new"
            )
            hint = "the parity must follow the phases that this barrier completes, not those of a ring of barriers"
            self.ledger.add(
                ("mbarrier-missed-phase", index),
                Finding("mbarrier-missed-phase", message, self._program.where(index), hint=hint),
            )


def _listed(warps: Iterable[str]) -> str:
    return ", ".join(sorted(warps, key=lambda who: (len(who), who)))
