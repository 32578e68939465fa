"""Lifetime of TMEM allocations: what a CTA allocates it must free before it ends.

Accesses to columns that are not allocated, a dealloc of something else than one allocation, and lanes of another
warp's quarter stop the machine (`tmem-lifetime`, `tmem-lane`); a dealloc that is not ordered after all accesses is
found by `race`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .. import events as ev
from .base import Finding, Ledger


class TmemLifetime:
    """Looks at the allocations of every CTA at its end."""

    subscriptions: ClassVar[tuple[type, ...]] = (ev.CtaFinished, ev.TmemAllocation)

    def __init__(self):
        self.ledger = Ledger()

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch."""
        self._program = program
        self._alloc: dict[int, int] = {}

    def observe(self, event: Any) -> None:
        """Note where columns were allocated; look at what is left at the end."""
        if isinstance(event, ev.TmemAllocation):
            if event.op == "alloc":
                self._alloc[event.column] = event.decoded.index
            return
        for column, count in event.cta.tmem.allocations.items():
            index = self._alloc[column]
            if self.ledger.has("tmem-lifetime", index):
                continue
            message = f"the CTA ends with TMEM columns {column}..{column + count - 1} still allocated"
            hint = "tcgen05.dealloc before the CTA ends: the next CTA on this multiprocessor waits for the columns"
            self.ledger.add(
                ("tmem-lifetime", index), Finding("tmem-lifetime", message, self._program.where(index), hint=hint)
            )

    def finish(self) -> list[Finding]:
        """All findings."""
        return self.ledger.list()
