"""Registers that belong to asynchronous MMAs: when the warp may touch them, and when an MMA may.

wgmma-register-in-flight  the warp reads or writes a register of D, or writes one of A, between the wgmma.mma_async and
                          the wgmma.wait_group that covers its group; reading one of A is advice, because it cannot
                          change a result
wgmma-fence-missing       no wgmma.fence between an access to a register and the MMA that takes it, between MMAs of
                          different shapes on one register, or before the first MMA of a warp

POLICY: moves between the fence and the MMA are advice. Compilers put them there whatever the source says: copies in
front of an accumulator that begins anew, constants of A. So is a read of a register of A, which the MMA only reads.
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

from .. import events as ev
from ..flow import async_operands, usage
from .base import Finding, Ledger
from .names import Names

_NONE, _MOVE, _READ, _WRITE = range(4)
"""What an ordinary access does to a register, by the harm that it can do."""
IN_FLIGHT, UNFENCED = "wgmma-register-in-flight", "wgmma-fence-missing"


@dataclass
class _WarpState:
    """What one warp has under way.

    touched: by register, the worst ordinary access since the last fence and its instruction. owned: MMAs' since then.
    """

    fenced: bool = False
    open: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    touched: dict[str, tuple[int, int]] = field(default_factory=dict)
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
        worst = (_NONE, -1, "")
        for operand, names in self._of(index).items():
            for name in names:
                harm, access = state.touched.get(name, (_NONE, -1))
                if operand == "a" and harm == _READ:
                    harm = _MOVE
                before = state.owned.get(name)
                if harm > worst[0]:
                    worst = harm, access, f"{name} after an ordinary access to it"
                elif before and (before[0] != operand or (operand == "acc" and before[1] != shape)):
                    worst = _WRITE, before[2], f"{name} after a wgmma.mma_async used it in another way"
        if worst[0]:
            self._unfenced(warp, index, *worst[1:], severity="advice" if worst[0] == _MOVE else "error")
            state.fence()
        for operand, names in self._of(index).items():
            state.owned.update(dict.fromkeys(names, (operand, shape, index)))
        state.open.append(index)

    def _access(self, state: _WarpState, warp: int, decoded: Any) -> None:
        used = usage(decoded)
        is_move = decoded.instruction.opcode == "mov"
        for names, harm in ((used.reads, _READ), (used.writes, _WRITE)):
            harm = _MOVE if is_move else harm
            for name in names:
                if harm > state.touched.get(name, (_NONE, -1))[0]:
                    state.touched[name] = harm, decoded.index
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
        hint = "" if severity == "advice" else "ptxas inserts a wait here and serialises the MMAs"
        where, other = self._program.where(decoded.index), self._program.where(mma)
        self.ledger.add(key, Finding(IN_FLIGHT, message, where, other, hint, missing, severity=severity))

    def _unfenced(self, warp: int, mma: int, access: int, what: str, severity: str = "error") -> None:
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
