"""Typed events: the only contract between the machine and those who watch it.

An event is built only if an observer subscribed to its class. `lanes` is the LaneSet that executed (its `warps`,
`index` = lane numbers in the CTA, `cta.position`), shared by all events of an instruction; arrays in events belong to
the machine and must be copied if kept. Asynchronous work carries the AsyncOperation that was issued, so an access
made by an engine can be told from one made by the warp that started it: `operation` is None for the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .async_agents import AsyncOperation
    from .semantics.table import Decoded


@dataclass(frozen=True, slots=True)
class CtaStarted:
    """A CTA begins: its memory is poison, no barrier exists."""

    cta: Any


@dataclass(frozen=True, slots=True)
class CtaFinished:
    """All warps of a CTA have exited and nothing is in flight."""

    cta: Any


@dataclass(frozen=True, slots=True)
class InstructionExecuted:
    """An instruction is about to execute; `mask` is the guard over the lanes (None: no guard)."""

    lanes: Any
    decoded: Decoded
    mask: np.ndarray | None


@dataclass(slots=True)
class PieceExecuted:
    """Instructions [begin, end) are about to execute one after another: a cheaper form of InstructionExecuted.

    Where more than one, none has a guard and none can block. `mask` is the guard of a single one (None: no guard).
    """

    lanes: Any
    begin: int
    end: int
    mask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class BranchExecuted:
    """A branch was decided: `taken` and `total` lanes."""

    lanes: Any
    decoded: Decoded
    taken: int
    total: int


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """Bytes [address, address + size) for each address. kind: read, write or atomic (both at once).

    space: shared, global, local or param; proxy: generic or async. For ordinary accesses `which` holds positions
    within `lanes` (parallel to `addresses`); for engines `lanes` is where the operation was issued.
    order: weak, relaxed, acquire, release, acq_rel or volatile. home: whose shared memory, None for the CTA of `lanes`.
    """

    lanes: Any
    decoded: Decoded
    kind: str
    space: str
    proxy: str
    addresses: np.ndarray
    size: int
    which: np.ndarray | None = None
    operation: AsyncOperation | None = None
    order: str = "weak"
    scope: str = ""
    home: Any = None


@dataclass(frozen=True, slots=True)
class TmemAccess:
    """Tensor memory rows [row, row + num_rows) by 32-bit columns [column, column + num_columns), read or written."""

    lanes: Any
    decoded: Decoded
    kind: str
    warp: int
    row: int
    num_rows: int
    column: int
    num_columns: int
    operation: AsyncOperation | None = None


@dataclass(frozen=True, slots=True)
class TmemAllocation:
    """op alloc or dealloc of columns [column, column + num_columns), or relinquish."""

    lanes: Any
    decoded: Decoded
    op: str
    column: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class TmemWait:
    """tcgen05.wait::ld (kind read) or ::st (kind write), or tcgen05.fence (before or after) by these lanes."""

    lanes: Any
    decoded: Decoded
    kind: str


@dataclass(frozen=True, slots=True)
class MbarrierOperation:
    """One operation on the mbarrier at a shared address.

    op: init, inval, arrive, arrive_drop, expect_tx, complete_tx or wait. `phase` is the phase index the operation
    acted on (for a wait: the phase waited for), counting completed phases from 0 since init; `completed` says whether
    that phase ended by it (for a wait: whether it succeeded). count: arrivals or bytes. order: acquire, release,
    relaxed. `operation`: the engine's work behind a complete_tx or a commit's arrive. `which`: positions within
    `lanes` that took part (None: all). home: the CTA of the mbarrier, None for that of `lanes`.
    """

    lanes: Any
    decoded: Decoded
    op: str
    address: int
    phase: int
    completed: bool
    count: int = 1
    order: str = ""
    scope: str = ""
    operation: AsyncOperation | None = None
    parity: int | None = None
    which: np.ndarray | None = None
    home: Any = None


@dataclass(frozen=True, slots=True)
class BarrierOperation:
    """Named barrier: op arrive (not waiting), sync (arrived and waits) or leave, one event per warp.

    `generation` counts completions before; `threads` is the expected number (0: all of the CTA);
    `completed` says whether this arrival completed it.
    """

    lanes: Any
    decoded: Decoded
    op: str
    warp: int
    barrier: int
    generation: int
    threads: int
    completed: bool


@dataclass(frozen=True, slots=True)
class WarpSynchronised:
    """A warp collective that synchronises lanes: bar.warp.sync, shfl, vote, elect, match, redux, activemask."""

    lanes: Any
    decoded: Decoded


@dataclass(frozen=True, slots=True)
class FenceExecuted:
    """fence, membar or fence.proxy by the lanes of `mask` (None: all); the mods of `decoded` say which."""

    lanes: Any
    decoded: Decoded
    mask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class RegistersRequested:
    """setmaxnreg: action inc or dec to `count` registers per thread."""

    lanes: Any
    decoded: Decoded
    action: str
    count: int


@dataclass(frozen=True, slots=True)
class AsyncIssued:
    """An asynchronous operation entered its engine's queue."""

    lanes: Any
    operation: AsyncOperation


@dataclass(frozen=True, slots=True)
class AsyncCompleted:
    """An asynchronous operation has read and written all its data."""

    operation: AsyncOperation


@dataclass(frozen=True, slots=True)
class BulkGroup:
    """op commit or wait by one thread (CTA lane number) on its groups of one kind, bulk or cp_async.

    `operations`: those of the group, or for a wait how many groups may stay open; `read_only`: .read form.
    """

    lanes: Any
    decoded: Decoded
    op: str
    thread: int
    operations: tuple
    read_only: bool = False
    kind: str = "bulk"


@dataclass(frozen=True, slots=True)
class WarpgroupStep:
    """op mma, fence, commit or wait of wgmma by whole warps; limit: groups that a wait lets stay open."""

    lanes: Any
    decoded: Decoded
    op: str
    limit: int = 0


@dataclass(frozen=True, slots=True)
class RegisterAccess:
    """An instruction that may touch a register of an asynchronous MMA in flight is about to execute.

    Published for the instructions of `flow.suspicious_accesses` only; `mask` is the guard over the lanes.
    """

    lanes: Any
    decoded: Decoded
    mask: np.ndarray | None


class EventBus:
    """Delivers events to the observers that asked for their class."""

    def __init__(self, observers=()):
        self._observers = tuple(observers)

    def sink(self, event_class: type):
        """Return a callable that delivers such events, or None if nobody wants them."""
        wanted = [o.observe for o in self._observers if event_class in o.subscriptions]
        if not wanted:
            return None
        if len(wanted) == 1:
            return wanted[0]

        def deliver(event) -> None:
            for observe in wanted:
                observe(event)

        return deliver
