"""Fences that a warp does not await: found in the machine code of compiled kernels, on every path through it.

A proxy fence or a membar holds a scoreboard until it is complete. Before the warp lets anybody go on, the scoreboard
has to be free: an instruction that waits for it must come first, at the latest the one that lets go. ptxas 13.4 and
13.5 were seen to forget that where a loop ends with the fence and begins anew with the barrier; on an H200 the tensor
cores then read shared memory as it had been before (`docs/hopper.md`). Neither PTX nor an emulator of it can show that.

What cannot be followed is no proof: `unawaited` raises then. Which scoreboards a fence holds, and who waits for one, is
read from control bits (`kernels.sass`), what an instruction does from its number (`kernels.opcodes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from undertow.kernels.opcodes import (
    BPT,
    BRA,
    BSSY,
    BSYNC,
    CALL_REL,
    EXIT,
    FENCE,
    KILL,
    MEMBAR,
    PHASECHK,
    PUBLISHES,
    SILENT,
    WARPSYNC,
)
from undertow.kernels.sass import NONE, SIZE, Code, Instruction, SassError, kernels_of

_COLLECTIVE = 1 << 22  # of a WARPSYNC, in its high word: it jumps
_TRAP = 4  # of a BPT, in the upper half of its low word
_VIEWS = "SGT"  # what a FENCE.VIEW.ASYNC is about: shared memory, global memory, tensor memory


@dataclass(frozen=True)
class Unawaited:
    """A fence of a kernel that may be incomplete when `kind`, an instruction, lets others go on. Addresses in bytes."""

    kernel: str
    fence: str
    fence_address: int
    kind: str
    address: int

    def __str__(self) -> str:
        return (
            f"{self.kernel}: the {self.fence} at {self.fence_address:#x} may be incomplete when the {self.kind} at "
            f"{self.address:#x} is issued, for on a path between them nothing waits for it"
        )


def unawaited(content: bytes) -> list[Unawaited]:
    """What is wrong in an object file, a library or a cubin: for each fence the first places that do not wait for it.

    Raises: SassError where there is no machine code, or where a path behind a fence cannot be followed.
    """
    return [found for code in kernels_of(content) for found in unawaited_in(code)]


def unawaited_in(code: Code) -> Iterator[Unawaited]:
    """The same of one kernel.

    Raises: SassError where a path behind a fence cannot be followed.
    """
    ends = {x.target for x in code.instructions if x.operation == BSSY}
    for fence in code.instructions:
        if fence.operation == FENCE:  # ptxas gives none to a fence that it thinks that nobody needs
            scoreboards = sorted(fence.sets) or [NONE]
        elif fence.operation == MEMBAR:  # without one it holds up the warp itself
            scoreboards = sorted(fence.sets)
        else:
            continue
        for scoreboard in scoreboards:
            for place in _reached(code, fence, scoreboard, ends):
                yield Unawaited(code.name, _name(fence), fence.address, PUBLISHES[place.operation], place.address)


def _reached(code: Code, fence: Instruction, scoreboard: int, ends: set[int]) -> Iterator[Instruction]:
    """The instructions that publish, on paths from a fence on which nobody waits for the scoreboard."""
    due, seen = list(_followers(code, fence, ends)), set()
    while due:
        address = due.pop()
        if address in seen:
            continue
        seen.add(address)
        if address % SIZE or not 0 <= address < SIZE * len(code.instructions):
            raise SassError(f"{code.name}: a path behind {fence.address:#x} leaves the code for {address:#x}")
        there = code.instructions[address // SIZE]
        if there.waits_for(scoreboard):
            continue
        if there.operation in PUBLISHES and there.opcode != PHASECHK:
            yield there
        else:
            due += _followers(code, there, ends)


def _followers(code: Code, x: Instruction, ends: set[int]) -> tuple[int, ...]:
    """The addresses that may come after an instruction; too many of them do no harm."""
    behind = x.address + SIZE
    if x.operation == BRA:
        return (x.target,) if _is_unconditional(x) else (x.target, behind)
    if x.opcode == CALL_REL:  # to a fixed address; a RET behind it cannot be followed
        return (x.target, behind) if x.is_guarded else (x.target,)
    if x.operation in (EXIT, KILL) or (x.operation == BPT and x.low >> 32 == _TRAP):
        return (behind,) if x.is_guarded else ()
    is_silent = (
        x.operation in SILENT
        or x.opcode == PHASECHK
        or (x.operation == BSYNC and behind in ends)  # elsewhere lanes might go on from where their BSSY says
        or (x.operation == WARPSYNC and not x.high & _COLLECTIVE)
    )
    if not is_silent:
        raise SassError(f"{code.name}: at {x.address:#x}, behind a fence, an instruction is not known: {x.low:#018x}")
    return (behind,)


def _is_unconditional(x: Instruction) -> bool:
    """A BRA that always jumps: no guard, no uniform form, no second predicate, no other kind of branch."""
    return x.low & 0xFF00FFFF == 0x7947 and not x.low >> 32 & 3 and x.high >> 18 & 0x7FFFFF == 0xE0


def _name(fence: Instruction) -> str:
    if fence.operation == MEMBAR:
        return "MEMBAR"
    view = fence.high >> 8 & 3
    return f"FENCE.VIEW.ASYNC.{_VIEWS[view]}" if view < len(_VIEWS) else "FENCE"
