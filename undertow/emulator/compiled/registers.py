"""Give virtual registers places in a warp's register file, shared by registers that are never live together.

PTX has thousands of virtual registers in single-assignment style; a row of each per warp would fill megabytes. After
this the rows of a warp fit the cache: what counts is what is live at once, as in the hardware. Every lane is a thread
of its own with its own column, so the liveness of a single thread decides, whatever lanes diverge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..flow import Usage, async_registers, successors, usage
from ..program import CARRY, Program
from ..semantics import Decoded

FILES = {"p": 4, "16": 64, "32": 128, "64": 256, "128": 512}
"""Bytes of a row by register file: one mask for predicates, else 32 lanes."""
ROW_ALIGNMENT = 64


@dataclass
class Allocation:
    """Byte offset of every register's row; predicates come first, in [0, predicate_bytes)."""

    rows: dict[str, int] = field(default_factory=dict)
    predicate_bytes: int = 0
    num_bytes: int = 0

    def reserve(self, num_bytes: int) -> int:
        """Add a row behind all others."""
        place = self.num_bytes
        self.num_bytes += -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return place


def allocate(program: Program) -> Allocation:
    """Place all registers of a kernel.

    A register that may be read before it is written (or is only ever written under a guard) gets a row of its own,
    which keeps the poison it starts with. So does one that an instruction accesses after it has been issued.
    """
    usages = [usage(decoded) for decoded in program.code]
    numbers = {name: i for i, name in enumerate(program.slots)}
    starts, live_in, live_out = _liveness(program, usages, numbers)
    intervals = _intervals(program, usages, numbers, starts, live_in, live_out)
    intervals.update(dict.fromkeys(async_registers(program), (-1, len(program.code) + 1)))
    allocation = Allocation()
    for file, row_bytes in FILES.items():
        members = [n for n in program.slots if program.slots[n].file == file and n in intervals]
        if file == "p":
            allocation.rows[CARRY] = 0
            members = [n for n in members if n != CARRY]
            count = _linear_scan(members, intervals, allocation.rows, row_bytes, row_bytes)
            allocation.reserve((1 + count) * row_bytes)
            allocation.predicate_bytes = allocation.num_bytes
        else:
            count = _linear_scan(members, intervals, allocation.rows, allocation.num_bytes, row_bytes)
            allocation.num_bytes += count * row_bytes
    return allocation


def _liveness(program: Program, usages: list[Usage], numbers: dict[str, int]):
    """Solve the data-flow equations over basic blocks, sets of registers as bits of integers."""
    code = program.code
    starts = sorted({0, *(s for d in code for s in _leaders(program, d) if s < len(code))})
    ends = [*starts[1:], len(code)]
    block_of = {start: i for i, start in enumerate(starts)}
    uses, kills, following = [], [], []
    for start, end in zip(starts, ends, strict=True):
        used = killed = 0
        for i in range(start, end):
            used |= _bits(usages[i].reads, numbers) & ~killed
            written = _bits(usages[i].writes, numbers)
            if usages[i].keeps_old:
                used |= written & ~killed
            else:
                killed |= written
        uses.append(used)
        kills.append(killed)
        following.append([block_of[s] for s in successors(program, code[end - 1]) if s in block_of])
    live_in, live_out = [0] * len(starts), [0] * len(starts)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(starts))):
            out = 0
            for j in following[i]:
                out |= live_in[j]
            into = uses[i] | (out & ~kills[i])
            changed |= into != live_in[i] or out != live_out[i]
            live_in[i], live_out[i] = into, out
    return starts, live_in, live_out


def _leaders(program: Program, decoded: Decoded) -> Iterable[int]:
    following = successors(program, decoded)
    return () if following == [decoded.index + 1] else (*following, decoded.index + 1)


def _bits(names: Iterable[str], numbers: dict[str, int]) -> int:
    bits = 0
    for name in names:
        bits |= 1 << numbers[name]
    return bits


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _intervals(program, usages, numbers, starts, live_in, live_out) -> dict[str, tuple[int, int]]:
    """First and last instruction at which each register holds a value, in text order."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def touch(number: int, place: int) -> None:
        first[number] = min(first.get(number, place), place)
        last[number] = max(last.get(number, place), place)

    ends = [*starts[1:], len(program.code)]
    for start, end, into, out in zip(starts, ends, live_in, live_out, strict=True):
        for number in _members(into):
            touch(number, start)
        for number in _members(out):
            touch(number, end)
        for i in range(start, end):
            for name in (*usages[i].reads, *usages[i].writes):
                touch(numbers[name], i)
    for number in _members(live_in[0] if live_in else 0):
        first[number], last[number] = -1, len(program.code) + 1
    return {name: (first[n], last[n]) for name, n in numbers.items() if n in first}


def _linear_scan(members, intervals, rows: dict[str, int], base: int, row_bytes: int) -> int:
    """Place registers in order of their first use; a row is free again at its register's last use. Returns rows."""
    active: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for name in sorted(members, key=lambda n: intervals[n]):
        start, end = intervals[name]
        still_active = []
        for last, row in active:
            if last <= start:
                free.append(row)
            else:
                still_active.append((last, row))
        active = still_active
        if free:
            row = free.pop()
        else:
            row, count = count, count + 1
        active.append((end if end > start else start + 1, row))
        rows[name] = base + row * row_bytes
    return count
