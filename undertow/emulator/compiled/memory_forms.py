"""Encode loads, stores, atomics and warp-wide matrix moves."""

from __future__ import annotations

from undertow import ptx

from ..semantics import Decoded, TypedOperand
from ..semantics.memory import element_bytes
from .encode import Encoder, Fields
from .form_parts import ATOMIC_OPS, ATOMIC_TYPES, LIST, SPACES, Form, items_of, put_address


def _memory_fields(encoder: Encoder, decoded: Decoded, name: str) -> Fields:
    """What ld, st and atom share: address, space, element size and count."""
    mods = decoded.mods
    type_name = mods["type"]
    size = 4 if type_name.endswith("x2") else element_bytes(type_name)
    if size == 16:
        raise encoder.unsupported("128-bit scalar registers in memory")
    fields = Fields(op=encoder.machine_op(name))
    space = (mods.get("space") or "generic").partition("::")[0]
    if decoded.instruction.opcode == "ldu" and mods["global"]:
        space = "global"
    fields.aux = {0: SPACES[space], 1: size, 2: int(mods["vec"][1:]) if mods.get("vec") else 1, LIST: -1}
    put_address(encoder, fields, decoded.operands["a"])
    return fields


def _register_bits(encoder: Encoder, items: tuple, size: int) -> int:
    """Width of the rows that a memory access moves; they must be alike."""
    widths = {encoder.file_bits(i) for i in items if isinstance(i, ptx.Register)} or {max(8 * size, 16)}
    if len(widths) != 1 or min(widths) < 8 * size or 1 in widths:
        raise encoder.unsupported(f"registers of {sorted(widths)} bits for elements of {8 * size}")
    return widths.pop()


def _load(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = _memory_fields(encoder, decoded, "load")
    items = items_of(decoded.operands["d"])
    bits = _register_bits(encoder, items, fields.aux[1])
    fields.aux[3], fields.aux[4] = bits, int(decoded.mods["type"][0] == "s" and bits > 8 * fields.aux[1])
    fields.aux[7] = int(bool(decoded.mods.get("volatile") or decoded.mods.get("order")))
    rows = [encoder.scratch(bits) if isinstance(i, ptx.Sink) else encoder.value(i, "any") for i in items]
    if len(rows) != fields.aux[2]:
        raise encoder.unsupported(f"{len(rows)} registers for {fields.aux[2]} elements")
    if len(rows) == 1:
        fields.d = rows
    else:
        fields.aux[LIST] = encoder.list_of(rows)
    return fields


def _value_rows(encoder: Encoder, typed: TypedOperand, fields: Fields) -> list[int]:
    """Rows of the stored values; literals become constants of the registers' width."""
    items = items_of(typed)
    bits = _register_bits(encoder, items, fields.aux[1])
    fields.aux[3] = bits
    if len(items) != fields.aux[2]:
        raise encoder.unsupported(f"{len(items)} values for {fields.aux[2]} elements")
    element = typed.type if bits == ptx.TYPE_BITS.get(typed.type) else f"b{bits}"
    return [encoder.value(i, "any" if isinstance(i, ptx.Register) else element) for i in items]


def _store(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = _memory_fields(encoder, decoded, "store")
    rows = _value_rows(encoder, decoded.operands["b"], fields)
    if len(rows) == 1:
        fields.s.append(rows[0])
    else:
        fields.aux[LIST] = encoder.list_of(rows)
    return fields


def _atomic(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = _memory_fields(encoder, decoded, "atomic")
    op = decoded.mods.get("op") or "cas"
    rows = _value_rows(encoder, decoded.operands["b"], fields)
    if fields.aux[3] != 8 * fields.aux[1]:
        raise encoder.unsupported("registers wider than the atomic's type")
    fields.aux[7] = ATOMIC_OPS[op] | ATOMIC_TYPES[decoded.mods["type"]] << 8
    fields.s.append(rows[0])
    fields.s.append(encoder.source(decoded.operands["c"]) if op == "cas" else 0)
    fields.d = [-1, -1]
    if len(rows) > 1:
        fields.aux[LIST] = encoder.list_of(rows)
    if "d" in decoded.operands:
        bits = fields.aux[3]
        targets = [
            encoder.scratch(bits) if isinstance(i, ptx.Sink) else encoder.register_target(i, f"b{bits}")
            for i in items_of(decoded.operands["d"])
        ]
        fields.d = [targets[0], -1] if len(rows) == 1 else [-1, encoder.list_of(targets)]
    return fields


FORMS: dict[str, Form] = {
    "ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic, "atom.cas": _atomic,
}  # fmt: skip
