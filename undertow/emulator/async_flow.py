"""Which instructions may touch a register that an asynchronous MMA still owns: read off the text of a kernel.

Every way through the kernel is followed, possible or not, so what is found here is a suspicion. Observers are told
when such an instruction executes, and judge it by what is in flight then; all others cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow import ptx

from .flow import async_operands, successors, usage

if TYPE_CHECKING:
    from .program import Program
    from .semantics.table import Decoded

MAX_GROUPS = 8
"""Groups told apart; wait_group never leaves more than seven open."""
MAX_STATES = 32
"""Combinations of groups in flight told apart at one place; beyond that they are thrown together."""

_NO_MMAS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class InFlight:
    """MMAs (instruction indices) of the open group and of each committed one, oldest first."""

    open: frozenset[int] = _NO_MMAS
    groups: tuple[frozenset[int], ...] = ()

    @property
    def all(self) -> frozenset[int]:
        """Every MMA in flight."""
        return self.open.union(*self.groups)

    def after(self, decoded: Decoded) -> InFlight:
        """The state behind an instruction."""
        words = decoded.instruction.mnemonic.split(".")[:2]
        if words == ["wgmma", "mma_async"]:
            return InFlight(self.open | {decoded.index}, self.groups)
        if words == ["wgmma", "commit_group"]:
            groups = (*self.groups, self.open)
            if len(groups) > MAX_GROUPS:
                groups = (groups[0] | groups[1], *groups[2:])
            return InFlight(_NO_MMAS, groups)
        if words == ["wgmma", "wait_group"]:
            limit = decoded.operands["limit"].operand
            kept = limit.value if isinstance(limit, ptx.Immediate) else MAX_GROUPS
            return InFlight(self.open, self.groups[-kept:] if kept else ())
        return self


def suspicious_accesses(program: Program) -> frozenset[int]:
    """Instructions, other than MMAs, that may access a register in flight, or one that no wgmma.fence hands over."""
    owners = {
        decoded.index: frozenset(name for names in async_operands(decoded).values() for name in names)
        for decoded in program.code
        if async_operands(decoded)
    }
    if not owners:
        return frozenset()
    return _Analysis(program, owners).run()


class _Analysis:
    """One walk over the kernel to its fixed point. owners: registers by MMA."""

    def __init__(self, program: Program, owners: dict[int, frozenset[str]]):
        self.program = program
        self.owners = owners
        everything = frozenset().union(*owners.values())
        self.touches: dict[int, frozenset[str]] = {}
        for decoded in program.code:
            if decoded.index not in owners:
                used = usage(decoded)
                touched = everything.intersection((*used.reads, *used.writes))
                if touched:
                    self.touches[decoded.index] = touched
        self.found: set[int] = set()
        self.unfenced: set[str] = set()
        self._seen: set[int] = set()
        self._unions: dict[frozenset[int], frozenset[str]] = {}

    def run(self) -> frozenset[int]:
        """Follow all ways from the first instruction on, block by block, until nothing new turns up."""
        program = self.program
        states: dict[int, frozenset[InFlight]] = {0: frozenset([InFlight()])}
        touched: dict[int, frozenset[str]] = {0: frozenset()}
        work = [0]
        while work:
            block = program.blocks[work.pop()]
            after, dirty = self._walk(block.start, block.end, states[block.start], touched[block.start])
            for target in successors(program, program.code[block.end - 1]):
                if target not in program.blocks:
                    continue
                known = states.get(target, frozenset()), touched.get(target, frozenset())
                states[target], touched[target] = _limited(known[0] | after), known[1] | dirty
                if (states[target], touched[target]) != known or target not in self._seen:
                    self._seen.add(target)
                    work.append(target)
        self.found.update(i for i, names in self.touches.items() if names & self.unfenced)
        return frozenset(self.found)

    def _walk(self, start: int, end: int, states: frozenset[InFlight], dirty: frozenset[str]):
        for decoded in self.program.code[start:end]:
            index = decoded.index
            if index in self.touches:
                names = self.touches[index]
                dirty |= names
                if any(names & self._registers(state.all) for state in states):
                    self.found.add(index)
            elif index in self.owners:
                self.unfenced |= self.owners[index] & dirty
            elif decoded.instruction.mnemonic.startswith("wgmma.fence") and decoded.guard is None:
                dirty = frozenset()
            if decoded.instruction.opcode == "wgmma":
                after = frozenset(state.after(decoded) for state in states)
                states = after if decoded.guard is None else states | after
        return states, dirty

    def _registers(self, mmas: frozenset[int]) -> frozenset[str]:
        if mmas not in self._unions:
            self._unions[mmas] = frozenset().union(*(self.owners[i] for i in mmas))
        return self._unions[mmas]


def _limited(states: frozenset[InFlight]) -> frozenset[InFlight]:
    """Few states: too many become one in which every MMA of any of them is in flight, in the open group."""
    if len(states) <= MAX_STATES:
        return states
    return frozenset([InFlight(frozenset().union(*(state.all for state in states)))])
