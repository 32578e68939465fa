"""Who waits for whom when nobody can run: the circle of a deadlock in the names of pipelines and barriers.

A wait for an mbarrier is a wait for those who arrive at it: the roles that the plan names where there is a plan, else
the warps that have arrived there before in this launch (or issued the copy or commit that did). A wait at a named
barrier is a wait for those who have taken part in it before and are not there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from .. import events as ev
from ..errors import Deadlock, EmulatorError
from .base import Finding
from .names import Names


class WaitFor:
    """Remembers who signals what, and explains a Deadlock by it."""

    subscriptions: ClassVar[tuple[type, ...]] = (ev.MbarrierOperation, ev.BarrierOperation, ev.AsyncIssued)

    def __init__(self, plan: Any = None, labels: Any = None):
        self._plan, self._labels = plan, labels

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch."""
        self._names = Names(program, launch, self._labels, self._plan)
        self._signallers: dict[tuple[str, int], set[int]] = defaultdict(set)

    def observe(self, event: Any) -> None:
        """Note who arrives."""
        if isinstance(event, ev.AsyncIssued):
            word = event.operation.details.get("mbarrier")
            if word is not None:
                self._signallers["mbarrier", word].add(event.operation.warp)
        elif isinstance(event, ev.BarrierOperation):
            if event.op != "leave":
                self._signallers["barrier", event.barrier].add(event.warp)
        elif event.operation is None and event.op in ("arrive", "arrive_drop"):
            threads = event.lanes.index if event.which is None else event.lanes.index[event.which]
            self._signallers["mbarrier", event.address].update((threads // 32).tolist())

    def finish(self) -> list[Finding]:
        """Nothing to tell of a launch that came to its end."""
        return []

    def explain(self, error: EmulatorError) -> tuple[str, str] | None:
        """The shortest circle of waits, if there is one."""
        if not isinstance(error, Deadlock):
            return None
        entries = [entry for entry in error.report if entry.kind in ("mbarrier", "barrier")]
        waiting = {entry.warp: entry for entry in entries}
        if len(waiting) < len(entries):  # warps of several CTAs: their numbers do not tell them apart
            return None
        edges = {
            warp: [w for w in sorted(self._awaited(entry)) if w in waiting and not _same_wait(entry, waiting[w])]
            for warp, entry in waiting.items()
        }
        cycle = min((c for c in (_cycle_from(edges, warp) for warp in edges) if c), key=len, default=None)
        if cycle is None:
            lines = [f"warp {w} ({e.role}) {self._what(e)}" for w, e in sorted(waiting.items())]
            return "deadlock without a circle: somebody will never be signalled; " + "; ".join(lines[:4]), ""
        parts = [f"warp {w} ({waiting[w].role}) {self._what(waiting[w])}" for w in cycle]
        return "deadlock: " + ", ".join(parts) + f", which waits for warp {cycle[0]}", (
            "every warp in the circle waits for a signal that the next one sends only later"
        )

    def _what(self, entry: Any) -> str:
        if entry.kind == "mbarrier":
            return f"waits for {self._names.shared(entry.subject)}"
        return f"waits at {self._names.labels.barrier_id(entry.subject)}"

    def _awaited(self, entry: Any) -> set[int]:
        plan = self._names.plan
        if entry.kind == "mbarrier" and plan is not None:
            pipeline, _, side = self._names.shared(entry.subject).partition(".")
            if plan.has_pipeline(pipeline):
                found = plan.pipeline(pipeline)
                role = found.producer if side.startswith("full") else found.consumer
                return set(plan.role(role).warps)
        return self._signallers.get((entry.kind, entry.subject), set())


def _same_wait(one: Any, other: Any) -> bool:
    return one.kind == other.kind == "barrier" and one.subject == other.subject


def _cycle_from(edges: dict[int, list[int]], start: int) -> list[int] | None:
    """The shortest way from a warp back to itself."""
    paths = [[start]]
    seen = set()
    while paths:
        path = paths.pop(0)
        for following in edges.get(path[-1], ()):
            if following == start:
                return path
            if following not in seen:
                seen.add(following)
                paths.append([*path, following])
    return None
