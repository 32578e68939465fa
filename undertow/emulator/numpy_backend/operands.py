"""Names for operands in generated code, and what each name is bound to for a set of lanes.

A name such as `r32_17_f4` stands for the row of register 17 of the 32-bit file, seen as float32. The same code serves
every lane set: only the bindings differ.
"""

import numpy as np

from undertow import ptx

from ..errors import UnsupportedPtx
from ..program import Program, Slot
from ..semantics import TypedOperand

PACKED = {"f32x2": "f4", "f16x2": "u2", "bf16x2": "u2"}
_FLOATS = {"f32": "f4", "f64": "f8"}


def numpy_type(type_name: str) -> str:
    """NumPy type code for a PTX type; half types are bit patterns, packed types their element."""
    if type_name == "pred":
        return "?"
    if type_name in PACKED:
        return PACKED[type_name]
    if type_name in _FLOATS:
        return _FLOATS[type_name]
    if type_name in ("f16", "bf16"):
        return "u2"
    kind = "i" if type_name[0] == "s" else "u"
    return f"{kind}{ptx.TYPE_BITS[type_name] // 8}"


def immediate_bits(immediate: ptx.Immediate, type_name: str) -> int:
    """Bit pattern of a literal used as this type."""
    bits = ptx.TYPE_BITS[type_name]
    if immediate.kind == "int":
        return immediate.value & ((1 << bits) - 1)
    if immediate.kind == f"f{bits}" or (immediate.kind == "f32" and bits > 32):
        return immediate.value
    raw = np.array(immediate.value, np.uint32 if immediate.kind == "f32" else np.uint64)
    value = raw.view(np.float32 if immediate.kind == "f32" else np.float64).astype(np.float64)
    if type_name == "f16":
        return int(value.astype(np.float16).view(np.uint16))
    if type_name == "bf16":
        from .rounding import f32_to_bf16

        return int(f32_to_bf16(value.astype(np.float32)))
    if bits == 32:
        return int(value.astype(np.float32).view(np.uint32))
    return int(value.view(np.uint64))


class Names:
    """Collects the names that a block uses. specs: name -> how to bind it; registers: slots touched."""

    def __init__(self, program: Program):
        self.program = program
        self.specs: dict[str, tuple] = {}
        self.slots: set[Slot] = set()

    def _name(self, name: str, spec: tuple) -> str:
        self.specs.setdefault(name, spec)
        return name

    def slot(self, register: ptx.Register) -> Slot:
        """Slot of a register, noted as used."""
        slot = self.program.slots[register.name]
        self.slots.add(slot)
        return slot

    def carry(self) -> str:
        """The carry flag."""
        slot = self.program.slots["%cc"]
        self.slots.add(slot)
        return self._row(slot, "?")

    def _row(self, slot: Slot, dtype: str) -> str:
        return self._name(f"r{slot.file}_{slot.index}_{dtype.replace('?', 'p')}", ("row", slot, dtype))

    def part(self, slot: Slot, dtype: str, place: int) -> str:
        """Every lane's part number `place` of a wider register."""
        return self._name(f"r{slot.file}_{slot.index}_{dtype}_{place}", ("part", slot, dtype, place))

    def rows(self, slots: list[Slot]) -> str | None:
        """Consecutive registers of one file as a two-dimensional view, if they are consecutive."""
        first = slots[0]
        if any(s != Slot(first.file, first.index + i) for i, s in enumerate(slots)) or first.file in ("p", "128"):
            return None
        self.slots.update(slots)
        return self._name(f"m{first.file}_{first.index}_{len(slots)}", ("rows", first, len(slots)))

    def temporary(self, dtype: str, wide: bool, which: str) -> str:
        """A scratch row; `wide` for packed pairs."""
        return self._name(f"t{which}_{dtype.replace('?', 'p')}{'w' if wide else ''}", ("temporary", dtype, wide))

    def constant(self, bits: int, dtype: str) -> str:
        """A 0-d array of that bit pattern."""
        return self._name(f"k{dtype.replace('?', 'p')}_{bits:x}", ("constant", bits, dtype))

    def filled(self, bits: int, dtype: str, view: str | None = None) -> str:
        """One constant per lane."""
        return self._name(f"f{dtype}_{view or ''}_{bits:x}", ("filled", bits, dtype, view))

    def parameter(self, offset: int, dtype: str) -> str:
        """A value of the parameter block."""
        return self._name(f"q{dtype}_{offset}", ("parameter", offset, dtype))

    def register(self, register: ptx.Register, type_name: str) -> str:
        """A register used as a type; narrower uses see its low part."""
        slot = self.slot(register)
        if slot.file == "p" or type_name == "pred":
            if slot.file != "p" or type_name not in ("pred", "any"):
                raise UnsupportedPtx(f"register {register.name} of type .{register.type} used as .{type_name}")
            return self._row(slot, "?")
        if type_name == "any":
            type_name = f"b{slot.file}"
        bits = ptx.TYPE_BITS[type_name]
        if bits > int(slot.file):
            raise UnsupportedPtx(f"register {register.name} of type .{register.type} used as .{type_name}")
        if bits < int(slot.file):
            return self.part(slot, numpy_type(type_name), 0)
        return self._row(slot, numpy_type(type_name) if bits < 128 else "u8")

    def source(self, operand: ptx.Operand, type_name: str) -> str:
        """Expression for a value that an instruction reads."""
        if isinstance(operand, ptx.Register):
            return self.register(operand, type_name)
        if isinstance(operand, ptx.Negated):
            return f"logical_not({self.register(operand.register, 'pred')})"
        if isinstance(operand, ptx.Immediate):
            if type_name == "any":
                type_name = "b32"
            if type_name == "pred":
                return self.constant(int(operand.value != 0), "?")
            bits = immediate_bits(operand, type_name)
            if type_name in PACKED:
                return self.filled(bits, f"u{ptx.TYPE_BITS[type_name] // 8}", PACKED[type_name])
            return self.constant(bits, numpy_type(type_name))
        if isinstance(operand, ptx.Special):
            return self._special(operand.name, type_name)
        if isinstance(operand, ptx.Symbol):
            dtype = "u8" if type_name == "any" else numpy_type(type_name).replace("i", "u")
            name = f"s_{dtype}_{self._symbol_number(operand.name)}_{operand.offset & 0xFFFFFFFF:x}"
            return self._name(name, ("symbol", operand.name, operand.offset, dtype, False))
        if isinstance(operand, ptx.Vector):
            return "[" + ", ".join(self.source(item, type_name) for item in operand.items) + "]"
        raise UnsupportedPtx(f"operand {operand}")

    def _special(self, name: str, type_name: str) -> str:
        dtype = "u4" if type_name == "any" else numpy_type(type_name)
        if name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo", "%clock_hi", "%globaltimer_hi"):
            return f"clock({name!r})"
        return self._name(f"x{name[1:].replace('.', '_')}_{dtype}", ("special", name, dtype))

    def address(self, address: ptx.Address) -> str:
        """Expression for base + offset, one per lane."""
        base = address.base
        if isinstance(base, ptx.Register):
            slot = self.slot(base)
            row = self.register(base, "any")
            if not address.offset:
                return row
            bits = address.offset & ((1 << int(slot.file)) - 1)
            return f"({row} + {self.constant(bits, f'u{int(slot.file) // 8}')})"
        if isinstance(base, ptx.Symbol):
            offset = base.offset + address.offset
            name = f"s_full_{self._symbol_number(base.name)}_{offset & 0xFFFFFFFF:x}"
            return self._name(name, ("symbol", base.name, offset, "u8", True))
        return self.filled(base.value + address.offset, "u8")

    def _symbol_number(self, name: str) -> int:
        kernel, module = self.program.kernel, self.program.module
        return [*(p.name for p in kernel.parameters), *kernel.variables, *module.variables, *module.functions].index(
            name
        )

    def typed_source(self, typed: TypedOperand) -> str:
        """Expression for a source operand of a row; a tensor address becomes (address, [coordinates])."""
        operand = typed.operand
        if typed.spec.is_async:
            return "None"
        if isinstance(operand, ptx.Address):
            text = self.address(operand)
            if typed.type == "tensor":
                if operand.extra:
                    raise UnsupportedPtx("tensor copy with im2col offsets")
                coordinates = ", ".join(self.source(c, "b32") for c in operand.coordinates)
                return f"({text}, [{coordinates}])"
            return text
        if isinstance(operand, ptx.Vector) and typed.type == "vector":
            return "[" + ", ".join(self.source(item, "any") for item in operand.items) + "]"
        return self.source(operand, typed.type)


def bind(spec: tuple, lanes, machine) -> np.ndarray:
    """Make the array that a name stands for, for one set of lanes."""
    kind = spec[0]
    if kind == "row":
        slot, dtype = spec[1:]
        return slot_row(lanes, slot).view(dtype)
    if kind == "part":
        slot, dtype, place = spec[1:]
        ratio = (int(slot.file) // 8) // np.dtype(dtype).itemsize
        return slot_row(lanes, slot).view(dtype)[place::ratio]
    if kind == "rows":
        slot, count = spec[1:]
        return lanes.registers.words[slot.file][slot.index : slot.index + count, lanes.columns]
    if kind == "temporary":
        return np.zeros(lanes.n * (2 if spec[2] else 1), spec[1])
    if kind == "constant":
        return pattern(spec[1], spec[2])
    if kind == "filled":
        bits, dtype, view = spec[1:]
        row = np.full(lanes.n, pattern(bits, dtype))
        return row.view(view) if view else row
    if kind == "parameter":
        return machine.parameter_value(spec[1], spec[2])
    if kind == "special":
        return machine.special(lanes, spec[1], spec[2])
    name, offset, dtype, is_full = spec[1:]
    value = pattern(machine.symbol_address(name) + offset, dtype)
    return np.full(lanes.n, value) if is_full else value


def slot_row(lanes, slot: Slot) -> np.ndarray:
    """The registers of these lanes, as the file's own unsigned type."""
    if slot.file == "p":
        return lanes.registers.p[slot.index, lanes.columns]
    if slot.file == "128":
        columns = slice(2 * lanes.columns.start, 2 * lanes.columns.stop)
        return lanes.registers.words["128"][slot.index, columns]
    return lanes.registers.words[slot.file][slot.index, lanes.columns]


def pattern(bits: int, dtype: str) -> np.ndarray:
    """0-d array with a bit pattern."""
    if dtype == "?":
        return np.array(bool(bits))
    size = np.dtype(dtype).itemsize
    return np.array(bits & ((1 << 8 * size) - 1), f"u{size}").view(dtype)
