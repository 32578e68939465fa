"""Reads of bytes that nobody has written: shared memory, TMEM, and the global buffers named as workspaces.

Granule: 4 bytes of shared and global memory; one column of a quarter of the lanes of TMEM. Engines read too: an MMA
its operands and the accumulator it adds to, a bulk store its source. A write narrower than the granule counts for all
of it. Global buffers hold what the host put there, so only those passed as `workspaces` (arrays) start unwritten.
Where `race` watches the same launch, a read that races with its write is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .. import events as ev
from .base import Finding, Ledger
from .names import ENGINES, Names

_COLUMNS = 512


class UninitialisedRead:
    """Marks writes and checks reads."""

    subscriptions: ClassVar[tuple[type, ...]] = (ev.CtaStarted, ev.MemoryAccess, ev.TmemAccess, ev.TmemAllocation)

    def __init__(self, plan: Any = None, labels: Any = None, workspaces: Sequence[Any] = (), race: Any = None):
        self._plan, self._labels, self._workspaces, self._race = plan, labels, workspaces, race
        self.ledger = Ledger()

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch."""
        self._names = Names(program, launch, self._labels, self._plan)
        self._program = program
        self._shared: dict[int, np.ndarray] = {}
        self._tmem: dict[int, np.ndarray] = {}
        self._global: dict[int, np.ndarray] = {}

    def observe(self, event: Any) -> None:
        """Take one event."""
        if isinstance(event, ev.MemoryAccess):
            self._memory(event)
        elif isinstance(event, ev.TmemAccess):
            self._tensor(event)
        elif isinstance(event, ev.CtaStarted):
            self._shared[id(event.cta)] = np.zeros(event.cta.shared.end // 4 + 1, bool)
            self._tmem[id(event.cta)] = np.zeros((4, _COLUMNS), bool)
            self._names.memory = event.cta.machine.global_memory
        elif event.op == "alloc":
            self._tmem[id(event.lanes.cta)][:, event.column : event.column + event.num_columns] = False

    def finish(self) -> list[Finding]:
        """All findings, less reads that race with the write: there the missing order is the finding."""
        racing = self._race.racing_instructions() if self._race else set()
        return [f for key, f in self.ledger.findings.items() if key[1] not in racing]

    def _memory(self, event) -> None:
        if event.space == "shared":
            written, base = self._shared[id(event.home or event.lanes.cta)], 0
        elif event.space == "global" and self._workspaces:
            region = event.lanes.cta.machine.global_memory.region(int(event.addresses[0]), 1)
            if not any(owner is workspace for owner in region.owners for workspace in self._workspaces):
                return
            base = region.base
            written = self._global.setdefault(base, np.zeros(region.num_bytes // 4 + 1, bool))
        else:
            return
        count = max(event.size >> 2, 1)
        if len(event.addresses) == 1:
            start = int(event.addresses[0]) - base >> 2
            granules: Any = slice(start, start + count)
        else:
            granules = (event.addresses.astype(np.int64) - base) >> 2
            if count > 1:
                granules = granules[:, None] + np.arange(count)
        if event.kind == "write":
            written[granules] = True
            return
        known = written[granules]
        if not known.all():
            first = int(np.flatnonzero(~known.reshape(-1))[0])
            place = granules.start + first if isinstance(granules, slice) else int(granules.reshape(-1)[first])
            address = base + 4 * place
            name = self._names.shared(address) if event.space == "shared" else self._names.global_memory(address)
            self._report(event, event.lanes.warps[0], name, f"{event.space} memory")
        if event.kind == "atomic":
            written[granules] = True

    def _tensor(self, event) -> None:
        written = self._tmem[id(event.lanes.cta)]
        quarters = slice(event.row // 32, (event.row + event.num_rows) // 32)
        columns = slice(event.column, event.column + event.num_columns)
        if event.kind == "write":
            written[quarters, columns] = True
            return
        known = written[quarters, columns]
        if not known.all():
            column = event.column + int(np.argmax(~known.all(0)))
            role, engine = self._names.role(event.warp), "tensor" if event.operation else ""
            details = event.operation.details if event.operation else None
            region = self._names.region(role, engine, False, column, details) or self._names.labels.tmem(column)
            self._report(event, event.warp, f"TMEM column {column} ({region})", "tensor memory")

    def _report(self, event, warp: int, place: str, space: str) -> None:
        index = event.decoded.index
        if self.ledger.has("uninitialised-read", index, space):
            return
        warp = event.operation.warp if event.operation else warp
        who = f"warp {warp} ({self._names.role(warp)})"
        if event.operation:
            who = f"{ENGINES.get(event.operation.engine, event.operation.engine)} of {who}"
        message = f"{who} reads {place}, which nobody has written"
        self.ledger.add(
            ("uninitialised-read", index, space), Finding("uninitialised-read", message, self._program.where(index))
        )
