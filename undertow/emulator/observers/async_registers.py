"""Registers that belong to asynchronous MMAs: when the warp may touch them, and when an MMA may.

wgmma-register-in-flight  the warp reads or writes a register of D, or writes one of A, between the wgmma.mma_async and
                          the wgmma.wait_group that covers its group; reading one of A is advice, because it cannot
                          change a result
wgmma-fence-missing       no wgmma.fence between an access to a register and the MMA that takes it, between MMAs of
                          different shapes on one register, or before the first MMA of a warp

POLICY: a copy from register to register between the fence and the MMA is advice. Compilers put such copies there, in
front of an accumulator that begins anew; ptxas gives both the same register.
Every warp is judged by itself: what it has issued, committed, waited for and fenced. One missing wait is told once,
for the latest MMA that it leaves in flight; one missing fence once, for the first MMA behind it. Source: PTX ISA,
"wgmma.mma_async" and "wgmma.fence". ptxas answers an access in flight by waiting there, so that results are right and
the MMAs serialised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from undertow import ptx

from .. import events as ev
from ..flow import async_operands, usage
from .base import Finding, Ledger
from .names import Names

IN_FLIGHT, UNFENCED = "wgmma-register-in-flight", "wgmma-fence-missing"


@dataclass
class _WarpState:
    """What one warp has under way. touched: ordinary accesses since the last fence, owned: MMAs' since then."""

    fenced: bool = False
    open: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    touched: dict[str, int] = field(default_factory=dict)
    owned: dict[str, tuple[str, str, int]] = field(default_factory=dict)

    def fence(self) -> None:
        self.fenced = True
        self.touched.clear()
        self.owned.clear()

    def in_flight(self) -> Iterable[int]:
        return (index for group in (*self.groups, self.open) for index in group)


class AsyncRegisters:
    """Follows the MMAs of every warp."""

    subscriptions: ClassVar[tuple[type, ...]] = (ev.CtaFinished, ev.WarpgroupStep, ev.RegisterAccess)

    def __init__(self, plan: Any = None, labels: Any = None):
        self._plan, self._labels = plan, labels
        self.ledger = Ledger()

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch."""
        self._program = program
        self._names = Names(program, launch, self._labels, self._plan)
        self._warps: dict[tuple[int, int], _WarpState] = defaultdict(_WarpState)
        self._operands: dict[int, dict[str, tuple[str, ...]]] = {}

    def observe(self, event: Any) -> None:
        """Take one event."""
        if isinstance(event, ev.CtaFinished):
            for key in [key for key in self._warps if key[0] == id(event.cta)]:
                del self._warps[key]
            return
        lanes = event.lanes
        warps = lanes.warps
        if isinstance(event, ev.RegisterAccess):
            if event.mask is not None:
                active = set((lanes.index[event.mask] // 32).tolist())
                warps = [warp for warp in warps if warp in active]
            for warp in warps:
                self._access(self._warps[id(lanes.cta), warp], warp, event.decoded)
            return
        for warp in warps:
            self._step(self._warps[id(lanes.cta), warp], warp, event)

    def finish(self) -> list[Finding]:
        """All findings."""
        return self.ledger.list()

    def _of(self, index: int) -> dict[str, tuple[str, ...]]:
        if index not in self._operands:
            self._operands[index] = async_operands(self._program.code[index])
        return self._operands[index]

    def _step(self, state: _WarpState, warp: int, event) -> None:
        if event.op == "fence":
            state.fence()
        elif event.op == "commit":
            state.groups.append(state.open)
            state.open = []
        elif event.op == "wait":
            del state.groups[: max(len(state.groups) - event.limit, 0)]
        else:
            self._mma(state, warp, event.decoded)

    def _mma(self, state: _WarpState, warp: int, decoded: Any) -> None:
        index, shape = decoded.index, decoded.mods["shape"]
        if not state.fenced:
            self._unfenced(warp, index, -1, "before its first wgmma.mma_async")
            state.fence()
        worst: tuple[int, str] | None = None
        for operand, names in self._of(index).items():
            for name in names:
                before = state.owned.get(name)
                if name in state.touched and (worst is None or self._is_copy(worst[0])):
                    worst = state.touched[name], f"{name} after an ordinary access to it"
                elif before and (before[0] != operand or (operand == "acc" and before[1] != shape)):
                    worst = before[2], f"{name} after a wgmma.mma_async used it in another way"
        if worst is not None:
            self._unfenced(warp, index, *worst)
            state.fence()
        for operand, names in self._of(index).items():
            state.owned.update(dict.fromkeys(names, (operand, shape, index)))
        state.open.append(index)

    def _is_copy(self, index: int) -> bool:
        decoded = self._program.code[index]
        source = decoded.operands.get("a")
        return decoded.instruction.opcode == "mov" and source is not None and isinstance(source.operand, ptx.Register)

    def _access(self, state: _WarpState, warp: int, decoded: Any) -> None:
        used = usage(decoded)
        for name in (*used.reads, *used.writes):
            if name not in state.touched or self._is_copy(state.touched[name]):
                state.touched[name] = decoded.index
        for mma in reversed(list(state.in_flight())):
            for operand, names in self._of(mma).items():
                owned = set(names)
                written, read = owned.intersection(used.writes), owned.intersection(used.reads)
                if written or read:
                    self._touched(warp, decoded, (mma, operand), min(written or read), bool(written))
                    return

    def _touched(self, warp: int, decoded: Any, owner: tuple[int, str], register: str, writes: bool) -> None:
        mma, operand = owner
        severity = "advice" if operand == "a" and not writes else "error"
        key = (IN_FLIGHT, mma, severity)
        if self.ledger.has(*key):
            return
        part = "accumulator" if operand == "acc" else "A"
        verb = "writes" if writes else "reads"
        message = (
            f"warp {warp} ({self._names.role(warp)}) {verb} {register}, a register of the {part} of a wgmma.mma_async"
            " that is in flight"
        )
        missing = "wgmma.commit_group behind the MMA and a wgmma.wait_group that covers it"
        hint = "ptxas inserts a wait here and serialises the MMAs"
        where, other = self._program.where(decoded.index), self._program.where(mma)
        self.ledger.add(key, Finding(IN_FLIGHT, message, where, other, hint, missing, severity=severity))

    def _unfenced(self, warp: int, mma: int, access: int, what: str) -> None:
        severity = "advice" if access >= 0 and self._is_copy(access) else "error"
        key = (UNFENCED, mma, severity)
        if self.ledger.has(*key):
            return
        who = f"warp {warp} ({self._names.role(warp)})"
        message = f"{who}: a wgmma.mma_async takes {what}, with no wgmma.fence between"
        if access < 0:
            message = f"{who} executes no wgmma.fence {what}"
        other = self._program.where(access) if access >= 0 else ""
        missing = "wgmma.fence by all four warps in front of the MMA"
        where = self._program.where(mma)
        self.ledger.add(key, Finding(UNFENCED, message, where, other, "", missing, severity=severity))
