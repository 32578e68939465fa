"""Turn a decoded kernel into the array of instructions that the C++ interpreter runs.

Registers become byte offsets into a warp's register file, literals rows of constants, labels positions, modifiers
numbers. Nothing depends on a launch, so a kernel is encoded once. Where PTX lets a register be wider than the type of
an instruction, helper moves through scratch rows surround it; they belong to their instruction and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from undertow import ptx

from ..errors import UnsupportedPtx
from ..flow import branch_table, successors
from ..numpy_backend.operands import immediate_bits
from ..program import Program
from ..semantics import Decoded, TypedOperand
from . import registers
from .generate import LANES, all_forms, lane_form

INST = np.dtype(
    [
        ("lane", "u8"), ("op", "i4"), ("index", "i4"), ("guard", "i4"), ("guard_flip", "u4"), ("d", "i4", 2),
        ("s", "i4", 6), ("aux", "i4", 8), ("imm", "i8"),
    ]
)  # fmt: skip
"""One instruction; mirrors `struct Inst` of runtime/program.hpp."""

LANE, BRANCH, EXIT, INDEXED_BRANCH, TRAP = 0, 1, 2, 3, 4
BEFORE, AFTER = -1, -2
"""Instead of an instruction's number: helper moves in front of it and behind it."""

IN_CONSTANTS = -(1 << 31)
_SPECIALS = (
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x",
    "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge", "%lanemask_gt", "zero", "one", "%dynamic_smem_size", "%total_smem_size", "zero64",
    "%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z",
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.x", "%cluster_nctaid.y",
    "%cluster_nctaid.z", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster",
)  # fmt: skip
SPECIALS = {name: i for i, name in enumerate(_SPECIALS)}
"""Numbers of special registers, as in runtime/specials.hpp."""


class NotCompiled(UnsupportedPtx):
    """The compiled back end does not know this form or operand; the NumPy back end may."""


@dataclass
class Encoded:
    """The arrays that the interpreter copies: instructions, constant rows, operand lists, special registers."""

    code: np.ndarray
    constants: np.ndarray
    lists: np.ndarray
    specials: np.ndarray
    register_bytes: int
    predicate_bytes: int
    instruction_of: np.ndarray  # PTX instruction by position in `code`


@dataclass
class Fields:
    """Operands of one instruction under construction."""

    lane: int = 0
    op: int = LANE
    d: list[int] = field(default_factory=list)
    s: list[int] = field(default_factory=list)
    aux: dict[int, int] = field(default_factory=dict)
    imm: int = 0


class Encoder:
    """Encodes one kernel.

    machine_op: number of a machine form by its name in the C++ table. encode_machine: what encodes machine rows.
    symbol_address: address of a variable or parameter within its state space.
    """

    def __init__(
        self,
        program: Program,
        machine_op: Callable[[str], int],
        encode_machine: Callable[[Encoder, Decoded], Fields],
        symbol_address: Callable[[str], int],
    ):
        self.program = program
        self.machine_op = machine_op
        self.encode_machine = encode_machine
        self.symbol_address = symbol_address
        self.allocation = registers.allocate(program)
        self.records: list[tuple[Fields, int, ptx.Guard | None]] = []
        self.lists: list[int] = []
        self.specials: dict[int, int] = {}
        self.decoded: Decoded
        self._constants: dict[tuple[int, int], int] = {}
        self._constant_bytes = bytearray()
        self._scratch: dict[tuple[int, int], int] = {}
        self._num_scratch: dict[int, int] = {}
        self._after: list[Fields] = []

    def encode(self) -> Encoded:
        """Encode everything.

        Raises: NotCompiled, with its place, for a form or operand that this back end does not know.
        """
        positions, jumps = [], []
        for decoded in self.program.code:
            positions.append(len(self.records))
            self.decoded = decoded
            self._num_scratch.clear()
            self._after = []
            try:
                if decoded.row.control:
                    jumps.append((len(self.records), decoded))
                    self.emit(self._control(decoded))
                elif decoded.row.make is None:
                    self.emit(self._lane(decoded))
                else:
                    self.emit(self.encode_machine(self, decoded))
            except UnsupportedPtx as error:
                raise error.at(self.program.where(decoded.index)) from None
            for fields in self._after:
                self.records.append((fields, AFTER, decoded.guard))
        positions.append(len(self.records))
        self.records.append((Fields(op=EXIT), len(self.program.code), None))
        for place, decoded in jumps:
            self._resolve(self.records[place][0], decoded, positions)
        return self._finish()

    def emit(self, fields: Fields) -> None:
        """Append the instruction proper."""
        self.records.append((fields, self.decoded.index, self.decoded.guard))

    def helper(self, fields: Fields) -> None:
        """Append a move that goes before the instruction."""
        self.records.append((fields, BEFORE, None))

    def unsupported(self, why: str) -> NotCompiled:
        """Build the error for the current instruction."""
        return NotCompiled(f"{self.decoded.instruction.mnemonic}: {why}")

    def _control(self, decoded: Decoded) -> Fields:
        opcode = decoded.instruction.opcode
        if opcode == "bra":
            return Fields(op=BRANCH)
        if opcode == "brx":
            return Fields(op=INDEXED_BRANCH, s=[self.source(decoded.operands["index"])])
        if opcode in ("ret", "exit"):
            return Fields(op=EXIT)
        return Fields(op=TRAP)

    def _resolve(self, fields: Fields, decoded: Decoded, positions: list[int]) -> None:
        """Fill in branch targets now that positions are known."""
        if fields.op == BRANCH:
            fields.aux[0] = positions[successors(self.program, decoded)[0]]
        elif fields.op == INDEXED_BRANCH:
            fields.aux[0] = self.list_of([positions[t] for t in branch_table(self.program, decoded)])

    def _lane(self, decoded: Decoded) -> Fields:
        source = decoded.operands.get("a")
        target = decoded.operands.get("d")
        if decoded.instruction.opcode == "mov" and source and isinstance(source.operand, ptx.Vector):
            assert target
            return self._pack(target, source.operand)
        if decoded.instruction.opcode == "mov" and target and isinstance(target.operand, ptx.Vector):
            assert source
            return self._unpack(target.operand, source)
        types = {name: typed.type for name, typed in decoded.operands.items()}
        form = lane_form(decoded.row, decoded.mods, types)
        number = None if form is None else all_forms().get(form)
        if number is None:
            raise self.unsupported("no compiled form")
        fields = Fields(lane=number)
        for typed in decoded.operands.values():
            if typed.spec.is_dst:
                fields.d.append(self.target(typed))
            else:
                fields.s.append(self.source(typed))
        return fields

    def _pack(self, target: TypedOperand, vector: ptx.Vector) -> Fields:
        total = ptx.TYPE_BITS[target.type]
        bits = total // len(vector.items)
        rows = [self.value(item, f"b{bits}") for item in vector.items]
        return self._vector_move("pack", self.list_of(rows), total, bits, d=[self.target(target)])

    def _unpack(self, vector: ptx.Vector, source: TypedOperand) -> Fields:
        total = ptx.TYPE_BITS[source.type]
        bits = total // len(vector.items)
        rows = [-1 if isinstance(item, ptx.Sink) else self.register_target(item, f"b{bits}") for item in vector.items]
        return self._vector_move("unpack", self.list_of(rows), total, bits, s=[self.source(source)])

    def _vector_move(self, name: str, rows: int, total: int, bits: int, **operands: Any) -> Fields:
        if (total, bits) not in ((64, 32), (128, 32), (128, 64), (32, 16), (64, 16)):
            raise self.unsupported(f"vector of {bits}-bit parts in {total} bits")
        return Fields(op=self.machine_op(name), aux={0: rows, 1: total, 2: bits}, **operands)

    def list_of(self, values: list[int]) -> int:
        """Store an operand list and return where it starts."""
        start = len(self.lists)
        self.lists += [len(values), *values]
        return start

    def constant(self, bits: int, width: int) -> int:
        """Reference to a row with the same value in all lanes; width 1 is a predicate."""
        key = (bits & ((1 << width) - 1), width)
        if key not in self._constants:
            self._constants[key] = len(self._constant_bytes)
            if width == 1:
                row = (b"\xff" if bits else b"\0") * 4
            else:
                row = key[0].to_bytes(width // 8, "little") * LANES
            self._constant_bytes += row.ljust(-(-len(row) // registers.ROW_ALIGNMENT) * registers.ROW_ALIGNMENT, b"\0")
        return IN_CONSTANTS | self._constants[key]

    def scratch(self, width: int) -> int:
        """A row for the current instruction only."""
        number = self._num_scratch.get(width, 0)
        self._num_scratch[width] = number + 1
        if (width, number) not in self._scratch:
            self._scratch[width, number] = self.allocation.reserve(4 if width == 1 else width // 8 * LANES)
        return self._scratch[width, number]

    def file_bits(self, register: ptx.Register) -> int:
        """Width of the register's row; 1 for predicates."""
        file = self.program.slots[register.name].file
        return 1 if file == "p" else int(file)

    def source(self, typed: TypedOperand) -> int:
        """Reference to the row of a source operand, as wide as its type (bytes: 16 bits)."""
        return self.value(typed.operand, typed.type)

    def value(self, operand: ptx.Operand, type_name: str) -> int:
        """Reference to the row of a value used as a type; `any` takes a register as it is."""
        width = _width(type_name)
        if isinstance(operand, ptx.Register):
            have = self.file_bits(operand)
            if type_name == "any":
                width = have
            if have < width or (have == 1) != (width == 1):
                raise self.unsupported(f"register {operand.name} of type .{operand.type} used as .{type_name}")
            row = self.allocation.rows[operand.name]
            return row if have == width else self._narrowed(row, have, width)
        if isinstance(operand, ptx.Negated):
            row = self.scratch(1)
            source = self.allocation.rows[operand.register.name]
            self.helper(Fields(op=self.machine_op("not_predicate"), d=[row], s=[source]))
            return row
        if isinstance(operand, ptx.Immediate):
            if type_name == "pred":
                return self.constant(-int(operand.value != 0), 1)
            return self.constant(immediate_bits(operand, "b32" if type_name == "any" else type_name), width)
        if isinstance(operand, ptx.Special):
            return self._special(operand.name, width)
        if isinstance(operand, ptx.Symbol):
            return self.constant(self.symbol_address(operand.name) + operand.offset, width)
        raise self.unsupported(f"operand {operand}")

    def _narrowed(self, row: int, have: int, width: int) -> int:
        scratch = self.scratch(width)
        aux = {0: have, 1: width, 2: 0}
        self.helper(Fields(op=self.machine_op("resize"), d=[scratch], s=[row], aux=aux))
        return scratch

    def _special(self, name: str, width: int) -> int:
        if name.startswith(("%clock", "%globaltimer")):
            row = self.scratch(width)
            self.helper(Fields(op=self.machine_op("clock"), d=[row], aux={0: width}))
            return row
        number = special_number(name, width)
        if number is None:
            raise self.unsupported(f"special register {name}")
        if number not in self.specials:
            self.specials[number] = self.allocation.reserve(width // 8 * LANES)
        row = self.specials[number]
        return row if width >= 32 else self._narrowed(row, 32, width)

    def target(self, typed: TypedOperand) -> int:
        """Row that the instruction writes; a wider register is filled from it afterwards."""
        if isinstance(typed.operand, ptx.Sink):
            return self.scratch(_width(typed.type))
        return self.register_target(typed.operand, typed.type)

    def register_target(self, operand: ptx.Operand, type_name: str) -> int:
        """Row for a register destination of a type."""
        if not isinstance(operand, ptx.Register):
            raise self.unsupported(f"destination {operand}")
        width, have = _width(type_name), self.file_bits(operand)
        row = self.allocation.rows[operand.name]
        if have == width:
            return row
        if have < width or width == 1:
            raise self.unsupported(f"register {operand.name} of type .{operand.type} written as .{type_name}")
        scratch = self.scratch(width)
        aux = {0: width, 1: have, 2: int(type_name[0] == "s")}
        self._after.append(Fields(op=self.machine_op("resize"), d=[row], s=[scratch], aux=aux))
        return scratch

    def _finish(self) -> Encoded:
        code = np.zeros(len(self.records), INST)
        code["guard"], code["d"] = -1, -1
        instruction_of = np.zeros(len(self.records), np.int64)
        owner = 0
        for place, (fields, index, guard) in enumerate(self.records):
            record = code[place]
            record["lane"], record["op"], record["index"], record["imm"] = fields.lane, fields.op, index, fields.imm
            record["d"][: len(fields.d)] = fields.d
            record["s"][: len(fields.s)] = fields.s
            for which, value in fields.aux.items():
                record["aux"][which] = value
            if guard is not None:
                record["guard"] = self.allocation.rows[guard.register.name]
                record["guard_flip"] = 0xFFFFFFFF if guard.negated else 0
            owner = index if index >= 0 else owner
            instruction_of[place] = owner
        specials = np.array(sorted(self.specials.items()), np.int32).reshape(-1)
        lists = np.array(self.lists or [0], np.int32)
        constants = np.frombuffer(bytes(self._constant_bytes) or bytes(1), np.uint8)
        return Encoded(
            code, constants, lists, specials, self.allocation.num_bytes, self.allocation.predicate_bytes, instruction_of
        )  # fmt: skip


def _width(type_name: str) -> int:
    if type_name == "pred":
        return 1
    return 32 if type_name == "any" else max(ptx.TYPE_BITS[type_name], 16)


def special_number(name: str, width: int) -> int | None:
    """Number of a special register of the runtime, None for one that the emulator does not know."""
    if name == "%gridid":
        name = "zero64" if width == 64 else "zero"
    elif name == "%aggr_smem_size":
        name = "%total_smem_size"
    return SPECIALS.get(name)
