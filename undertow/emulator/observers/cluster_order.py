"""Happens-before between the CTAs of a cluster: whose knowledge in whose terms, and accesses to each other's memory.

A clock has columns of one CTA; what is known of others goes along as `foreign`. What a thread publishes at an mbarrier
of another CTA, or at the cluster's barrier, is turned round: the receiver's columns become the clock, the sender's
foreign. So an edge may go through third parties, asynchronous copies to several CTAs among them.

Accesses between CTAs have a shadow of their own beside the exact one of each CTA (`shared_shadow`): it is that of
global memory, with the shared memory of each CTA as a buffer, and its policies hold here, too. Two accesses of one CTA
to its own memory are left to the exact one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import ORDER, SEVERAL, Knowledge, Order, merge_foreign
from .global_shadow import GlobalShadow, RegionShadow
from .synchronisation import COPIES, MbarrierClock, participants

CLUSTER_BARRIER = 16


def in_terms_of(known: Knowledge, sender: int, receiver: Order) -> Knowledge:
    """The same knowledge with the columns of another CTA as its clock."""
    return received({sender: known.clock, **(known.foreign or {})}, receiver)


def received(carried: dict[int, np.ndarray], receiver: Order) -> Knowledge:
    """What is carried of several CTAs, for one of them."""
    others = {number: clock.copy() for number, clock in carried.items() if number != receiver.number}
    own = carried.get(receiver.number)
    return Knowledge(receiver.nothing().clock if own is None else own.copy(), others or None)


def knows_init(watch: Any, event: Any, home: Order, thread: int, number: int) -> bool:
    """Whether all that use an mbarrier of another CTA know that it was initialised there, by record `number`."""
    if event.operation is not None:
        issued = watch.sync.operations.get(event.operation)
        clocks = [] if issued is None else [(issued.knowledge.foreign or {}).get(home.number)]
    else:
        threads = event.lanes.index if event.which is None else event.lanes.index[event.which]
        clocks = [foreign_clock(watch.order, user >> 5, user & 31, home.number) for user in threads.tolist()]
    return all(clock is not None and clock[ORDER, thread] > number for clock in clocks)


def foreign_clock(order: Order, warp: int, lane: int, number: int) -> np.ndarray | None:
    """What a lane knows of another CTA."""
    own = order.alone[warp].get(lane) if lane < SEVERAL else None
    return ((own.foreign if own else order.foreign[warp]) or {}).get(number)


def signal(watch: Any, event: Any, home: Order, barrier: MbarrierClock) -> None:
    """An arrival, or bytes that landed, at an mbarrier of another CTA."""
    known = watch.order.nothing()
    if event.operation is not None:
        issued = watch.sync.operations.get(event.operation)
        if issued is None:
            return
        known.join(issued.knowledge)
        clock = watch.order.fit(known)
        done = watch.order.next if issued.engine in COPIES else issued.writes
        clock[ORDER, issued.column] = max(clock[ORDER, issued.column], done)
    else:
        for warp, lanes in participants(event.lanes, event.which):
            watch.sync.publish(warp, lanes, known, event.order == "relaxed")
    barrier.published.join(in_terms_of(known, watch.order.number, home))
    if event.completed:
        barrier.end_phase(event.phase)


class ClusterBarrier:
    """Rounds of barrier.cluster: every arrival publishes, whoever waits learns all of it."""

    def __init__(self):
        self._rounds: dict[tuple[int, int], dict[int, np.ndarray]] = {}

    def step(self, watch: Any, event: Any) -> None:
        """arrive or leave by one warp."""
        cluster = watch.cta.cluster
        key = (id(cluster), event.generation)
        if event.op == "leave":
            carried = self._rounds.get(key)
            if carried is not None:
                watch.order.acquire(event.warp, None, received(carried, watch.order))
            return
        self._rounds.pop((id(cluster), event.generation - 2), None)
        known = watch.order.nothing()
        watch.sync.publish(event.warp, None, known, event.decoded.mods.get("order") == "relaxed")
        carried = {watch.order.number: known.clock, **(known.foreign or {})}
        self._rounds[key] = merge_foreign(self._rounds.get(key), carried)


class _Verdict:
    """Files conflicts between CTAs under the names of shared memory."""

    def __init__(self, verdict: Any):
        self.verdict = verdict
        self.orders = verdict.orders
        self.home: Any = None

    def global_memory(self, earlier, later, kinds, place, clock, remark) -> None:
        """As `Verdict.global_memory`, for an address of the shared memory of `home`."""
        buffer = f"{self.verdict.names.shared(place)} of CTA {self.home.position}"
        self.verdict.global_memory(earlier, later, kinds, buffer, clock, remark)


class ClusterShadow(GlobalShadow):
    """Shadow of the shared memories of a cluster for accesses by several CTAs."""

    def __init__(self, verdict: Any, granule_shift: int, strict: bool):
        super().__init__(_Verdict(verdict), granule_shift, strict)
        self._home: Any = None

    def of(self, home: Any) -> ClusterShadow:
        """Choose whose memory the next access goes to."""
        self._home = self.verdict.home = home
        return self

    def forget(self, cta: Any) -> None:
        """A CTA is over; its memory is given to another."""
        self._regions.pop(cta.number, None)

    def _locate(self, cta: Any, addresses, granules) -> tuple[RegionShadow, Any]:
        home = self._home
        shadow = self._regions.get(home.number)
        if shadow is None:
            memory = home.shared.view(1 << self.shift, 1)[:, 0]
            size = len(memory) + 1
            shadow = self._regions[home.number] = RegionShadow(
                0, memory, memory.copy(), np.zeros(size, np.int64), np.zeros(size, np.uint8),
                (np.zeros(size, np.int64), np.zeros(size, np.int64)), np.zeros(size, np.uint8),
            )  # fmt: skip
        return shadow, granules

    def _against(self, watch: Any, agent: Any, earlier: tuple, what: tuple, kinds: tuple[bool, bool]) -> None:
        codes, classes = earlier
        if agent.cta == self._home.number:
            codes = np.where((codes >> 32) - 1 == agent.cta, 0, codes)
        if codes.any():
            super()._against(watch, agent, (codes, classes), what, kinds)

    def synchronise(self, watch: Any, event: Any) -> None:
        """Words of shared memory that synchronise are followed by the shadow of global memory."""
