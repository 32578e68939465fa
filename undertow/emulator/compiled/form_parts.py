"""Parts from which encoders of machine forms are put together: operand rows, addresses, lists of scalars."""

from __future__ import annotations

from collections.abc import Callable

from undertow import ptx

from ..semantics import Decoded, TypedOperand
from .encode import Encoder, Fields

SPACES = {"generic": 0, "global": 1, "const": 1, "shared": 2, "local": 3, "param": 4}
ATOMIC_OPS = {
    "and": 0, "or": 1, "xor": 2, "exch": 3, "add": 4, "inc": 5, "dec": 6, "min": 7, "max": 8, "cas": 9
}  # fmt: skip
ATOMIC_TYPES = {
    "u16": 0, "b16": 0, "u32": 1, "b32": 1, "u64": 2, "b64": 2, "s32": 3, "s64": 4, "f32": 5, "f64": 6, "f16": 7,
    "bf16": 8, "f16x2": 9, "bf16x2": 10,
}  # fmt: skip
"""Numbers of enum class Space, AtomicOp and AtomicType in the runtime."""
WIDE = 5
"""Where in `aux` an instruction says that its address register has 64 bits."""
LIST = 6
"""Where in `aux` an instruction has its operand list."""

Form = Callable[[Encoder, Decoded], Fields]


def simple(name: str, sources: str = "", targets: str = "", **aux: int) -> Form:
    """A form whose operands are rows: names of the syntax line in the order the C++ form wants them."""

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = Fields(op=encoder.machine_op(name), aux=dict(enumerate(aux.values())))
        for operand in sources.split():
            typed = decoded.operands.get(operand)
            fields.s.append(-1 if typed is None else encoder.source(typed))
        for operand in targets.split():
            typed = decoded.operands.get(operand)
            fields.d.append(-1 if typed is None else encoder.target(typed))
        return fields

    return build


def with_modifier(name: str, sources: str, targets: str, mod: str, words: str) -> Form:
    """A form with one modifier that becomes a number, its place among `words`."""
    base = simple(name, sources, targets)

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = base(encoder, decoded)
        fields.aux[0] = words.split().index(decoded.mods[mod])
        return fields

    return build


def place_of(encoder: Encoder, typed: TypedOperand) -> tuple[int, int, int]:
    """Row, width and offset of an address or scalar operand."""
    operand = typed.operand
    if not isinstance(operand, ptx.Address):
        width = 1 if typed.type == "pred" else 32 if typed.type == "any" else max(ptx.TYPE_BITS[typed.type], 16)
        return encoder.source(typed), width, 0
    if isinstance(operand.base, ptx.Register):
        return encoder.value(operand.base, "any"), encoder.file_bits(operand.base), operand.offset
    if isinstance(operand.base, ptx.Symbol):
        address = encoder.symbol_address(operand.base.name) + operand.base.offset
    else:
        address = operand.base.value
    return encoder.constant(address + operand.offset, 64), 64, 0


def put_address(encoder: Encoder, fields: Fields, typed: TypedOperand) -> None:
    """Put an address into s[0], imm and aux[5]."""
    row, width, offset = place_of(encoder, typed)
    fields.s.insert(0, row)
    fields.aux[WIDE] = int(width == 64)
    fields.imm = offset


def put_scalars(encoder: Encoder, fields: Fields, operands: list[TypedOperand]) -> Fields:
    """Put operands that are read as one value per issue into the list aux[6]."""
    places: list[int] = []
    for typed in operands:
        places += place_of(encoder, typed)
        if typed.type == "tensor":
            assert isinstance(typed.operand, ptx.Address)
            if typed.operand.extra:
                raise encoder.unsupported("im2col offsets")
            for coordinate in typed.operand.coordinates:
                places += (encoder.value(coordinate, "b32"), 32, 0)
    fields.aux[LIST] = encoder.list_of(places)
    return fields


def listed(name: str, operands: str, **aux: int) -> Form:
    """A form whose operands all go into the list, absent ones left out."""

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = Fields(op=encoder.machine_op(name), aux=dict(enumerate(aux.values())))
        present = [decoded.operands[o] for o in operands.split() if o in decoded.operands]
        return put_scalars(encoder, fields, present)

    return build


def items_of(typed: TypedOperand) -> tuple:
    return typed.operand.items if isinstance(typed.operand, ptx.Vector) else (typed.operand,)
