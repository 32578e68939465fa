"""What the text of a kernel says about registers and the ways through it: uses, successors, asynchronous registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow import ptx

if TYPE_CHECKING:
    from .program import Program
    from .semantics.table import Decoded, TypedOperand


@dataclass(frozen=True)
class Usage:
    """Registers that an instruction reads and writes. A guarded write keeps the old value in some lanes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    keeps_old: bool


def registers_of(operand: ptx.Operand) -> Iterator[str]:
    """Names of the registers inside an operand."""
    if isinstance(operand, ptx.Register):
        yield operand.name
    elif isinstance(operand, ptx.Negated):
        yield operand.register.name
    elif isinstance(operand, (ptx.Vector, ptx.Group)):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, ptx.Address):
        for item in (operand.base, *operand.coordinates, *operand.extra):
            yield from registers_of(item)


def usage(decoded: Decoded) -> Usage:
    """Return what an instruction reads and writes."""
    reads = [name for typed in decoded.sources for name in registers_of(typed.operand)]
    writes = [name for typed in decoded.operands.values() if _is_written(typed) for name in registers_of(typed.operand)]
    if decoded.guard is not None:
        reads.append(decoded.guard.register.name)
    return Usage(tuple(reads), tuple(writes), decoded.guard is not None)


def successors(program: Program, decoded: Decoded) -> list[int]:
    """Instructions that may run next; one past the last means the end."""
    opcode, following = decoded.instruction.opcode, decoded.index + 1
    passes = [following] if decoded.guard is not None else []
    if opcode == "bra":
        return [program.target(_label(decoded)), *passes]
    if opcode == "brx":
        return [*branch_table(program, decoded), *passes]
    if opcode in ("ret", "exit", "trap"):
        return passes
    return [following]


def _label(decoded: Decoded) -> ptx.LabelRef:
    operand = decoded.operands["target"].operand
    assert isinstance(operand, ptx.LabelRef)
    return operand


def branch_table(program: Program, decoded: Decoded) -> list[int]:
    """Targets of a brx.idx, in order."""
    operand = decoded.operands["targets"].operand
    assert isinstance(operand, ptx.LabelRef)
    return [program.kernel.labels[name] for name in program.kernel.branch_targets[operand.name]]


def _is_written(typed: TypedOperand) -> bool:
    return typed.spec.is_dst or (typed.spec.is_async and typed.spec.name == "acc")


def async_operands(decoded: Decoded) -> dict[str, tuple[str, ...]]:
    """Registers by operand name that an instruction accesses after it has been issued."""
    return {name: tuple(registers_of(typed.operand)) for name, typed in decoded.operands.items() if typed.spec.is_async}


def async_registers(program: Program) -> dict[str, None]:
    """All registers of a kernel that some instruction accesses asynchronously, in the order of the text."""
    return {name: None for decoded in program.code for names in async_operands(decoded).values() for name in names}
