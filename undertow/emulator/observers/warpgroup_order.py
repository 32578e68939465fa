"""Edges of happens-before made by wgmma: what an asynchronous MMA knows of, and what waiting for one teaches.

An MMA is issued by four warps and reads its operands in shared memory for all of them, so it comes after only what
every one of them knew when it issued it; and through the async proxy, so that a fence.proxy.async must lie between a
store and it. A warp that has waited for a group knows that its MMAs have read everything, on behalf of all four warps:
one warp's arrival is enough to hand a buffer back (CUTLASS's pipelines do that). It learns nothing of what the other
warps have done besides.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from .clocks import Issued, Knowledge, Order

WARPS = 4


@dataclass
class _Stream:
    """Of one warpgroup: record number of each MMA, and what the warps that have issued one had in common."""

    numbers: list[int] = field(default_factory=list)
    common: dict[int, Knowledge] = field(default_factory=dict)


class WarpgroupOrder:
    """Turns the steps of wgmma in one CTA into edges of its `Order`."""

    def __init__(self, order: Order):
        self.order = order
        self._streams: dict[int, _Stream] = defaultdict(_Stream)
        self._issued: dict[int, int] = defaultdict(int)
        self._groups: dict[int, list[int]] = defaultdict(list)

    def step(self, event) -> None:
        """mma, commit or wait by warps; a wgmma.fence orders registers only."""
        for warp in event.lanes.warps:
            if event.op == "mma":
                self._join(self._streams[warp // WARPS].common, self._issued[warp], warp)
                self._issued[warp] += 1
            elif event.op == "commit":
                self._groups[warp].append(self._issued[warp])
            elif event.op == "wait":
                self._wait(warp, event.limit)

    def _join(self, common: dict[int, Knowledge], number: int, warp: int) -> None:
        clock, foreign = self.order.knowledge_of_warp(warp), self.order.foreign[warp] or {}
        earlier = common.get(number)
        if earlier is not None:
            others = earlier.foreign or {}
            foreign = {cta: _less(others[cta], foreign[cta]) for cta in others.keys() & foreign.keys()}
            clock = _less(earlier.clock, clock)
        common[number] = Knowledge(clock, dict(foreign) or None)

    def _wait(self, warp: int, limit: int) -> None:
        groups = self._groups[warp]
        if len(groups) <= limit:
            return
        complete = groups[-1 - limit]
        del groups[: len(groups) - limit]
        if complete:
            column = self.order.column("wgmma", warp // WARPS)
            self.order.warp_learns_stream(warp, column, self._streams[warp // WARPS].numbers[complete - 1])

    def issue(self, operation) -> Issued:
        """The last of the four warps has issued an MMA."""
        group = operation.warp // WARPS
        stream = self._streams[group]
        known = stream.common.pop(operation.details["number"])
        issued = Issued(known, "wgmma", operation.thread, self.order.next)
        issued.column = self.order.column("wgmma", group)
        issued.reads = issued.writes = self.order.record_engine(operation.decoded.index, issued.column, issued)
        stream.numbers.append(issued.reads)
        return issued


def _less(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What two clocks have in common."""
    width = min(one.shape[1], other.shape[1])
    return np.minimum(one[:, :width], other[:, :width])
