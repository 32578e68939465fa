"""Records what the warps of one CTA execute, and what synchronises them: program positions, no values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from undertow.emulator import Finding
from undertow.emulator.events import (
    AsyncIssued,
    BarrierOperation,
    BulkGroup,
    CtaStarted,
    MbarrierOperation,
    MemoryAccess,
    PieceExecuted,
    WarpgroupStep,
)
from undertow.emulator.observers.bank_passes import passes

from .errors import TimingError

CLAIMS = ("add", "inc")
CLAIMED = "dynamic scheduling: the CTA claims the work that it claims when it runs alone"
ORDERED = ("acquire", "relaxed", "volatile")
WARP_LANES = 32
WARPGROUP_WARPS = 4
PASS_BYTES = 128
_LANES = np.arange(WARP_LANES)


@dataclass
class Operation:
    """An asynchronous operation: engine, who issued it, its bytes or MMA shape, and the token that it completes.

    place: where in the issuing warp's stream. operands: first shared addresses of MMA operands, in the order in which
    they are read. depth, m, n: of an MMA. accumulator: TMEM column, -1 where there is none.
    """

    engine: str
    warp: int
    place: int
    bytes: int = 0
    shape: Any = None
    token: int = -1
    accumulator: int = -1
    shared: int = -1
    operands: list[int] = field(default_factory=list)


@dataclass
class Token:
    """What a wait waits for: a phase of an mbarrier or a round of a named barrier. needed: arrivals and copies."""

    kind: str
    place: int
    phase: int
    needed: int = 0


class Recorder:
    """Observer of one CTA. streams: PTX instruction per executed one, ~index where the guard was false.

    facts: (position in the stream, kind, number) per warp, in order of position; see `_add`. assumptions: what the
    recording takes for granted.
    """

    subscriptions: ClassVar[tuple[type, ...]] = (
        CtaStarted, PieceExecuted, MbarrierOperation, BarrierOperation, WarpgroupStep, AsyncIssued, BulkGroup,
        MemoryAccess,
    )  # fmt: skip

    def __init__(self):
        self.streams: list[list[int]] = []
        self.facts: list[list[tuple[int, str, int]]] = []
        self.operations: list[Operation] = []
        self.tokens: list[Token] = []
        self.assumptions: dict[str, None] = {}
        self._token_of: dict[tuple, int] = {}
        self._numbers: dict[int, int] = {}
        self._incarnation: dict[int, int] = defaultdict(int)
        self._mmas: dict[int, list[int]] = defaultdict(list)
        self._groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._wgmma_groups: dict[int, list[int]] = defaultdict(list)
        self._issued_mmas: dict[int, int] = defaultdict(int)
        self._passes: dict[tuple, int] = {}
        self._blocking: list[bool] = []
        self._program: Any = None
        self._on: dict[type, Callable[[Any], None]] = {
            CtaStarted: self._started, PieceExecuted: self._piece, MbarrierOperation: self._mbarrier,
            BarrierOperation: self._barrier, WarpgroupStep: self._warpgroup, AsyncIssued: self._issued,
            BulkGroup: self._bulk_group, MemoryAccess: self._memory,
        }  # fmt: skip

    def start(self, program: Any, launch: Any) -> None:
        """Take the program of the launch."""
        self._program = program
        self._blocking = [decoded.row.blocking for decoded in program.code]
        if tuple(launch.cluster) not in ((1, 1, 1), (1, 1), (1,)):
            raise TimingError(f"cluster={launch.cluster}: clusters of several CTAs are not modelled")

    def observe(self, event: Any) -> None:
        """Record an event."""
        self._on[type(event)](event)

    def finish(self) -> list[Finding]:
        """Return no findings."""
        return []

    def mma_of(self, warpgroup: int, number: int) -> int:
        """The operation of a warpgroup's MMA number, counted from 1."""
        return self._mmas[warpgroup][number - 1]

    def _started(self, event: CtaStarted) -> None:
        if self.streams:
            raise TimingError("a second CTA began; record one CTA at a time")
        self.streams = [[] for _ in event.cta.warps]
        self.facts = [[] for _ in event.cta.warps]

    def _piece(self, event: PieceExecuted) -> None:
        index, mask, streams = event.begin, event.mask, self.streams
        if self._blocking[index]:
            for warp in event.lanes.warps:
                stream = streams[warp]
                if not stream or stream[-1] not in (index, ~index):  # a wait that is asked again is one wait
                    stream.append(index)
            if mask is not None and not mask.any():
                for warp in event.lanes.warps:
                    streams[warp][-1] = ~index
            return
        if mask is None:
            executed = range(index, event.end)
            for warp in event.lanes.warps:
                streams[warp].extend(executed)
            return
        warps = event.lanes.warps
        if len(mask) % WARP_LANES == 0:
            passed = [part.any() for part in mask.reshape(len(warps), -1)]  # of whole warps, or of one
        else:
            of_warp = event.lanes.index // WARP_LANES
            passed = [mask[of_warp == warp].any() for warp in warps]
        for warp, does in zip(warps, passed, strict=True):
            streams[warp].append(index if does else ~index)

    def _add(self, warp: int, decoded: Any, kind: str, number: int) -> None:
        """A fact of the instruction that the warp executes: passes, bytes, wait, arrive, barrier, op, need, mma."""
        self.facts[warp].append((self._place(warp, decoded), kind, number))

    def _place(self, warp: int, decoded: Any) -> int:
        """Position in the warp's stream of an instruction of the piece that it executes."""
        index, stream = decoded.index, self.streams[warp]
        last = stream[-1]
        place = len(stream) - 1 - ((last if last >= 0 else ~last) - index)
        assert stream[place] in (index, ~index)
        return place

    def _token(self, kind: str, place: int, phase: int) -> int:
        key = (kind, place, self._incarnation[place] if kind == "mbarrier" else 0, phase)
        if key not in self._token_of:
            self._token_of[key] = len(self.tokens)
            self.tokens.append(Token(kind, place, phase))
        return self._token_of[key]

    def _refuse(self, decoded: Any, why: str) -> None:
        raise TimingError(f"control flow depends on time: {why}, {self._program.where(decoded.index)}")

    @staticmethod
    def _warps_of(event: Any) -> list[int]:
        lanes = event.lanes
        if event.which is None:
            return lanes.warps
        return [lanes.warps[0]] if len(lanes.warps) == 1 else np.unique(lanes.index[event.which] // WARP_LANES).tolist()

    def _mbarrier(self, event: MbarrierOperation) -> None:
        if event.home is not None:
            raise TimingError("an mbarrier of another CTA: clusters of several CTAs are not modelled")
        if event.op == "init":
            self._incarnation[event.address] += 1
            return
        if event.op == "inval":
            return
        if event.op == "wait":
            if not event.completed:
                self._refuse(event.decoded, "an mbarrier was asked before its phase was complete")
            if event.phase >= 0:
                token = self._token("mbarrier", event.address, event.phase)
                for warp in self._warps_of(event):
                    self._add(warp, event.decoded, "wait", token)
            return
        if event.op == "expect_tx":
            return  # the arrival that goes with it, and the bytes, are what a phase waits for
        token = self._token("mbarrier", event.address, event.phase)
        if event.operation is not None:
            self.operations[self._numbers[event.operation.number]].token = token
            self.tokens[token].needed += 1
            return
        for warp in self._warps_of(event):
            facts, fact = self.facts[warp], (self._place(warp, event.decoded), "arrive", token)
            if not facts or facts[-1] != fact:  # lanes that arrive one by one are one instruction
                self.tokens[token].needed += 1
                facts.append(fact)

    def _barrier(self, event: BarrierOperation) -> None:
        if event.op == "leave":
            return
        token = self._token("barrier", event.barrier, event.generation)
        self.tokens[token].needed += 1
        self._add(event.warp, event.decoded, "barrier", token)

    def _warpgroup(self, event: WarpgroupStep) -> None:
        for warp in event.lanes.warps:
            if event.op == "mma":
                self._issued_mmas[warp] += 1
                self._add(warp, event.decoded, "mma", self._issued_mmas[warp])
            elif event.op == "commit":
                self._wgmma_groups[warp].append(self._issued_mmas[warp])
            elif event.op == "wait":
                groups = self._wgmma_groups[warp]
                done = groups[len(groups) - event.limit - 1] if len(groups) > event.limit else 0
                self._add(warp, event.decoded, "need", done)

    def _issued(self, event: AsyncIssued) -> None:
        issued = event.operation
        details, warp = issued.details, issued.warp
        place = self._place(warp, issued.decoded)
        if issued.engine == "cp_async" and self.operations and self._numbers:
            last = self.operations[-1]
            if last.engine == "cp_async" and (last.warp, last.place) == (warp, place):
                last.bytes += PASS_BYTES // WARP_LANES
                self._numbers[issued.number] = len(self.operations) - 1
                return
        engine = "commit" if issued.engine == "tensor" and "mbarrier" in details else issued.engine
        operation = Operation(engine, warp, place, details.get("bytes", 0), details.get("shape"))
        operation.shared = details.get("shared", -1)
        operation.accumulator = details["accumulator"] & 0xFFFF if "accumulator" in details else -1
        number = self._numbers[issued.number] = len(self.operations)
        self.operations.append(operation)
        if engine == "wgmma":
            self._mmas[warp // WARPGROUP_WARPS].append(number)
        else:
            self._add(warp, issued.decoded, "op", number)

    def _bulk_group(self, event: BulkGroup) -> None:
        key = (event.kind, event.thread if event.kind == "bulk" else event.thread // WARP_LANES)
        warp = event.thread // WARP_LANES
        groups = self._groups[key]
        if event.op == "commit":
            before = groups[-1] if groups else -1
            last = max((self._numbers[o.number] for o in event.operations), default=before)
            if event.kind == "bulk" or last != before:
                groups.append(last)
            return
        (limit,) = event.operations
        done = groups[len(groups) - limit - 1] if len(groups) > limit else -1
        place = self._place(warp, event.decoded)
        if done >= 0 and (not self.facts[warp] or self.facts[warp][-1][0] != place):
            self.facts[warp].append((place, "need", done))

    def _memory(self, event: MemoryAccess) -> None:
        if event.operation is not None:
            self._operand(event)
            return
        if event.home is not None:
            raise TimingError("shared memory of another CTA: clusters of several CTAs are not modelled")
        if event.space == "global":
            self._global(event)
            return
        if event.space != "shared" or event.which is None:
            return
        lanes, addresses, which = event.lanes, event.addresses, event.which
        if len(lanes.warps) == 1:
            self._add(lanes.warps[0], event.decoded, "passes", self._passes_of(event, addresses, lanes.index[which]))
            return
        if len(addresses) == len(lanes.warps) * WARP_LANES:
            back = len(self.streams[lanes.warps[0]]) - self._place(lanes.warps[0], event.decoded)
            for warp, number in zip(lanes.warps, self._passes_of_all(event, addresses), strict=True):
                self.facts[warp].append((len(self.streams[warp]) - back, "passes", number))  # all execute this piece
            return
        of_warp = lanes.index[which] // WARP_LANES
        for warp in lanes.warps:
            mine = of_warp == warp
            if mine.any():
                number = self._passes_of(event, addresses[mine], lanes.index[which][mine])
                self._add(warp, event.decoded, "passes", number)

    def _operand(self, event: MemoryAccess) -> None:
        assert event.operation is not None
        if event.operation.engine in ("wgmma", "tensor") and event.space == "shared":
            self.operations[self._numbers[event.operation.number]].operands.append(int(event.addresses.min()))

    def _global(self, event: MemoryAccess) -> None:
        if event.kind == "read" and event.order in ORDERED:
            self._refuse(event.decoded, f"ld.{event.order} of global memory (turns between CTAs)")
        if event.kind == "atomic" and event.decoded.destinations:
            if event.decoded.mods.get("op") not in CLAIMS:
                self._refuse(event.decoded, "the result of an atomic on global memory (turns between CTAs)")
            self.assumptions[f"{CLAIMED}, {self._program.where(event.decoded.index)}"] = None
        lanes = event.lanes
        count = len(event.addresses) * event.size // len(lanes.warps)
        for warp in lanes.warps:
            self._add(warp, event.decoded, "bytes", count)

    def _passes_of_all(self, event: MemoryAccess, addresses: np.ndarray) -> list[int]:
        """Of whole warps, whose lanes are in order; mostly each does what the first one does, elsewhere."""
        of_warp = addresses.reshape(-1, WARP_LANES)
        moved = of_warp - of_warp[0]
        if (moved == moved[:, :1]).all() and not (moved[:, 0] % PASS_BYTES).any():
            of_warp = of_warp[:1]
        numbers = [self._passes_of(event, mine, _LANES) for mine in of_warp]
        return numbers * (len(addresses) // WARP_LANES // len(numbers))

    def _passes_of(self, event: MemoryAccess, addresses: np.ndarray, lanes: np.ndarray) -> int:
        start = int(addresses[0])
        key = (event.kind, event.size, start % PASS_BYTES, (addresses - addresses[0]).tobytes(), len(lanes))
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = _passes(event, addresses.astype(np.int64), lanes % WARP_LANES)
        return found


def _passes(event: MemoryAccess, addresses: np.ndarray, lanes: np.ndarray) -> int:
    """Passes through the port; a load of which all lanes together want few words needs one (measured)."""
    if event.kind == "read":
        words = np.unique(addresses[:, None] // 4 + np.arange(max(1, event.size // 4)))
        if len(words) <= PASS_BYTES // 4 and np.bincount(words % 32).max() == 1:
            return 1
    return passes(addresses, lanes, event.size)[0]
