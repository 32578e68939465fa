"""Turn a basic block into Python source: one array operation per PTX instruction.

Guarded lane forms compute for all lanes and copy under the mask. Machine forms call their handler. With no observer
of executed instructions the source contains no trace of events.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType

from undertow import ptx

from ..errors import UnsupportedPtx
from ..events import InstructionExecuted, PieceExecuted, RegisterAccess
from ..program import Block, Program, Slot
from ..semantics import Decoded, TypedOperand
from ..semantics.mbarrier import SPLIT
from . import arithmetic
from .operands import PACKED, Names, bind, numpy_type

FILE_NAME = "<ptx block>"


@dataclass(frozen=True)
class BlockCode:
    """A compiled block: code, names to bind, instruction per source line, handlers needed, registers used."""

    code: CodeType
    specs: dict[str, tuple]
    line_index: list[int]
    handlers: list[int]
    used: dict[str, list[int]]
    source: str


@dataclass(frozen=True)
class Observed:
    """What somebody wants to see: every instruction, every piece, every access to a register that may be in flight."""

    instructions: bool = False
    pieces: bool = False
    registers: bool = False


class _Writer:
    def __init__(self, program: Program, observed: Observed, pieces: dict[int, int]):
        self.program = program
        self.observed = observed
        self.pieces = pieces
        self.suspicious = program.suspicious_accesses if observed.registers else frozenset()
        self.names = Names(program)
        self.lines: list[str] = ["def block():"]
        self.line_index: list[int] = [-1]
        self.handlers: list[int] = []
        self.current = 0

    def line(self, text: str) -> None:
        self.lines.append("    " + text)
        self.line_index.append(self.current)

    def instruction(self, decoded: Decoded) -> None:
        """Emit one instruction."""
        self.current = decoded.index
        mask = self._mask(decoded)
        if self.observed.instructions:
            self.line(f"publish(InstructionExecuted(L, code[{decoded.index}], {mask}))")
        if decoded.index in self.pieces:
            self.line(f"publish_piece(PieceExecuted(L, {decoded.index}, {self.pieces[decoded.index]}, {mask}))")
        if decoded.index in self.suspicious:
            self.line(f"publish_access(RegisterAccess(L, code[{decoded.index}], {mask}))")
        row = decoded.row
        if row.control:
            return
        if row.numpy is None:
            if not self._parameter_load(decoded, mask):
                self._handler(decoded, mask)
        elif decoded.instruction.opcode == "mov" and self._vector_move(decoded, mask):
            return
        else:
            self._lane_form(decoded, mask)

    def _mask(self, decoded: Decoded) -> str:
        guard = decoded.guard
        if guard is None:
            return "None"
        register = self.names.register(guard.register, "pred")
        if not guard.negated:
            return register
        name = f"g{decoded.index}"
        self.line(f"{name} = logical_not({register})")
        return name

    def _copy(self, target: str, value: str, mask: str, packed: bool = False) -> None:
        where = "" if mask == "None" else f", where={f'repeat({mask}, 2)' if packed else mask}"
        self.line(f"copyto({target}, {value}{where})")

    def _lane_form(self, decoded: Decoded, mask: str) -> None:
        text = decoded.row.column("numpy", decoded.mods)
        assert text is not None
        values, after = {}, []
        for typed in decoded.operands.values():
            if typed.spec.is_dst:
                values[typed.spec.name] = self._lane_target(typed, mask, after)
            else:
                values[typed.spec.name] = self.names.typed_source(typed)
        if re.search(r"\bcc\b", text):
            if mask != "None":
                raise UnsupportedPtx(f"guarded carry form {decoded.instruction.mnemonic}")
            values["cc"] = self.names.carry()
        names = "|".join(map(re.escape, values))
        self.line(re.sub(rf"(?<!')\b({names})\b(?!')", lambda m: values[m.group(1)], text))
        for target, value, packed in after:
            self._copy(target, value, mask, packed)

    def _lane_target(self, typed: TypedOperand, mask: str, after: list) -> str:
        """Where a lane form writes: the register itself, or a temporary that is copied afterwards."""
        dtype, packed = numpy_type(typed.type), typed.type in PACKED
        temporary = self.names.temporary(dtype, packed, typed.spec.name)
        if isinstance(typed.operand, ptx.Sink):
            return temporary
        if not isinstance(typed.operand, ptx.Register):
            raise UnsupportedPtx(f"destination {typed.operand}")
        slot = self.names.slot(typed.operand)
        if slot.file != "p" and ptx.TYPE_BITS[typed.type] < int(slot.file):
            after.append((self._extended(slot, typed.type), temporary, False))
            return temporary
        register = self.names.register(typed.operand, typed.type)
        if mask == "None":
            return register
        after.append((register, temporary, packed))
        return temporary

    def _extended(self, slot: Slot, type_name: str) -> str:
        """The whole register, as the signed or unsigned type that a narrower value extends to."""
        kind = "i" if type_name[0] == "s" else "u"
        return self.names._row(slot, f"{kind}{int(slot.file) // 8}")

    def _vector_move(self, decoded: Decoded, mask: str) -> bool:
        target, value = decoded.operands["d"], decoded.operands["a"]
        total = ptx.TYPE_BITS[target.type]
        if isinstance(value.operand, ptx.Vector):
            items = value.operand.items
            if not isinstance(target.operand, ptx.Register):
                raise UnsupportedPtx("mov from a vector to something that is not a register")
            slot, bits = self.names.slot(target.operand), total // len(items)
            for place, item in enumerate(items):
                self._copy(self.names.part(slot, f"u{bits // 8}", place), self.names.source(item, f"b{bits}"), mask)
            return True
        if isinstance(target.operand, ptx.Vector):
            items = target.operand.items
            bits = total // len(items)
            for place, item in enumerate(items):
                if isinstance(item, ptx.Sink):
                    continue
                if not isinstance(value.operand, ptx.Register) or not isinstance(item, ptx.Register):
                    raise UnsupportedPtx("mov to a vector from something that is not a register")
                part = self.names.part(self.names.slot(value.operand), f"u{bits // 8}", place)
                self._copy(self.names.register(item, f"b{bits}"), part, mask)
            return True
        return False

    def _parameter_load(self, decoded: Decoded, mask: str) -> bool:
        """A load from a named parameter is a constant of the launch."""
        if decoded.instruction.opcode != "ld" or not (decoded.mods.get("space") or "").startswith("param"):
            return False
        address = decoded.operands["a"].operand
        if not isinstance(address, ptx.Address) or not isinstance(address.base, ptx.Symbol):
            return False
        offsets = {p.name: p.offset for p in self.program.kernel.parameters}
        if address.base.name not in offsets:
            return False
        offset = offsets[address.base.name] + address.base.offset + address.offset
        typed = decoded.operands["d"]
        size = ptx.TYPE_BITS[typed.type] // 8
        items = typed.operand.items if isinstance(typed.operand, ptx.Vector) else (typed.operand,)
        for place, item in enumerate(items):
            if isinstance(item, ptx.Register):
                dtype = numpy_type(typed.type)
                value = self.names.parameter(offset + place * size, dtype if dtype[0] == "i" else f"u{size}")
                self._copy(self._unsigned_target(item, typed.type), value, mask)
        return True

    def _unsigned_target(self, register: ptx.Register, type_name: str) -> str:
        """The register a machine form writes: unsigned, or extended if the value is narrower."""
        slot = self.names.slot(register)
        if slot.file == "p":
            return self.names.register(register, "pred")
        return self._extended(slot, type_name if type_name != "any" else "b32")

    def _handler(self, decoded: Decoded, mask: str) -> None:
        sources = []
        for spec in decoded.row.operands:
            if not spec.is_dst:
                typed = decoded.operands.get(spec.name)
                sources.append("None" if typed is None else self.names.typed_source(typed))
        while sources and sources[-1] == "None":
            sources.pop()
        call = f"h{decoded.index}({', '.join(['L', mask, *sources])})"
        self.handlers.append(decoded.index)
        destinations = decoded.destinations
        if not destinations and not decoded.row.blocking:
            self.line(call)
            return
        self.line(f"v = {call}")
        if decoded.row.blocking:
            self.line("if v.__class__ is list or v is SPLIT: return v")
        for i, typed in enumerate(destinations):
            value = f"v[{i}]" if len(destinations) > 1 else "v"
            self._store_result(typed, value, mask)

    def _store_result(self, typed: TypedOperand, value: str, mask: str) -> None:
        operand = typed.operand
        if isinstance(operand, ptx.Sink):
            return
        if isinstance(operand, ptx.Vector):
            registers = [i for i in operand.items if isinstance(i, ptx.Register)]
            bits = ptx.TYPE_BITS[typed.type]
            slots = [self.names.slot(r) for r in registers]
            rows = self.names.rows(slots) if len(registers) == len(operand.items) else None
            if rows and int(slots[0].file) == bits:
                self._copy(rows, value, mask)
                return
            for place, item in enumerate(operand.items):
                if isinstance(item, ptx.Register):
                    self._store_result(TypedOperand(item, typed.type, typed.spec), f"{value}[{place}]", mask)
            return
        assert isinstance(operand, ptx.Register)
        if typed.type[0] == "s" and self.names.slot(operand).file != "p":
            value = f"{value}.view({numpy_type(typed.type)!r})"
        self._copy(self._unsigned_target(operand, typed.type), value, mask)


def pieces_of(block: Sequence[Decoded]) -> dict[int, int]:
    """Begin and end of every piece of a block; instructions with a guard, or that may wait, are pieces of their own."""
    pieces: dict[int, int] = {}
    begin = -1
    for decoded in block:
        alone = decoded.guard is not None or decoded.row.blocking
        if alone or begin < 0:
            begin = decoded.index
        pieces[begin] = decoded.index + 1
        if alone:
            begin = -1
    return pieces


def compile_block(program: Program, block: Block, observed: Observed) -> BlockCode:
    """Generate and compile the function of a block; results are kept with the program."""
    key = (block.start, observed)
    if key in program.block_cache:
        return program.block_cache[key]
    instructions = program.code[block.start : block.end]
    writer = _Writer(program, observed, pieces_of(instructions) if observed.pieces else {})
    for decoded in instructions:
        try:
            writer.instruction(decoded)
        except UnsupportedPtx as error:
            raise UnsupportedPtx(f"{decoded.instruction.mnemonic}: {error.fact}").at(
                program.where(decoded.index)
            ) from None
    if len(writer.lines) == 1:
        writer.line("pass")
    source = "\n".join(writer.lines) + "\n"
    module_code = compile(source, FILE_NAME, "exec")
    code = next(c for c in module_code.co_consts if isinstance(c, CodeType))
    used: dict[str, list[int]] = {}
    for slot in sorted(writer.names.slots, key=lambda s: (s.file, s.index)):
        used.setdefault(slot.file, []).append(slot.index)
    result = BlockCode(code, writer.names.specs, writer.line_index, writer.handlers, used, source)
    program.block_cache[key] = result
    return result


_BASE: dict = {}


def bind_block(block: BlockCode, lanes, machine):
    """Make the block's function for one set of lanes."""
    space = lanes.namespace
    if not _BASE:
        _BASE.update(arithmetic.names())
        _BASE.update(InstructionExecuted=InstructionExecuted, RegisterAccess=RegisterAccess, SPLIT=SPLIT)
        _BASE.update(PieceExecuted=PieceExecuted)
    if "copyto" not in space:
        space.update(_BASE)
        space.update(code=machine.program.code, publish=machine.instruction_sink, publish_access=machine.register_sink)
        space.update(publish_piece=machine.piece_sink, clock=machine.clock, repeat=repeat)
    for index in block.handlers:
        name = f"h{index}"
        if name not in space:
            space[name] = machine.handler(index)
    for name, spec in block.specs.items():
        if name not in space:
            space[name] = bind(spec, lanes, machine)
    return FunctionType(block.code, space)


def repeat(mask, times: int):
    """One guard bit per half of a packed pair."""
    return mask.repeat(times)
