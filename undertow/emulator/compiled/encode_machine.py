"""Encode the machine forms: which C++ form executes a row, and where it finds its operands.

Keyed by the fixed words of a row's syntax (modifier classes and optional words left out), so a new row of the table
needs an entry here or is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from undertow import ptx

from ..semantics import Decoded, TypedOperand
from ..semantics.memory import element_bytes
from ..semantics.table import Row
from .encode import Encoder, Fields

SPACES = {"generic": 0, "global": 1, "const": 1, "shared": 2, "local": 3, "param": 4}
ATOMIC_OPS = {w: i for i, w in enumerate("and or xor exch add inc dec min max cas".split())}
ATOMIC_TYPES = {w: i for i, w in enumerate("u16 u32 u64 s32 s64 f32 f64 f16 bf16 f16x2 bf16x2".split())}
ATOMIC_TYPES.update(b16=0, b32=1, b64=2)
"""Numbers of enum class Space, AtomicOp and AtomicType in the runtime."""
BULK, CP_ASYNC = 0, 1
WIDE = 5
LIST = 6


@lru_cache(maxsize=None)
def fixed_words(syntax: str) -> str:
    """The words of a syntax line's mnemonic that must stand there: `ld{.weak}.<type> d, [a]` gives `ld`."""
    mnemonic = syntax.partition(" ")[0]
    return re.sub(r"\{[^}]*\}|\.<\w+>", "", mnemonic)


def encode_machine(encoder: Encoder, decoded: Decoded) -> Fields | None:
    """Encode one machine form; None if it does nothing at all.

    Raises: UnsupportedPtx for a row without an entry.
    """
    form = FORMS.get(fixed_words(decoded.row.syntax))
    if form is None:
        raise encoder.unsupported("no compiled form; use the NumPy back end")
    return form(encoder, decoded)


def knows(row: Row) -> bool:
    """Whether a machine row has a compiled form."""
    return fixed_words(row.syntax) in FORMS


def _simple(name: str, sources: str = "", targets: str = "", **aux: int) -> Callable:
    """A form whose operands are rows: names of the syntax line in the order the C++ form wants them."""

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = Fields(op=encoder.machine_op(name), aux=dict(enumerate(aux.values())))
        for operand in sources.split():
            typed = decoded.operands.get(operand)
            fields.s.append(-1 if typed is None else encoder.source(typed))
        for operand in targets.split():
            typed = decoded.operands.get(operand)
            is_wanted = typed is not None and not isinstance(typed.operand, ptx.Sink)
            fields.d.append(encoder.target(typed) if typed is not None and is_wanted else -1)
        return fields

    return build


def _with_mod(name: str, sources: str, targets: str, mod: str, words: str) -> Callable:
    """A form with one modifier that becomes a number, its place among `words`."""
    base = _simple(name, sources, targets)

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = base(encoder, decoded)
        fields.aux[0] = words.split().index(decoded.mods[mod])
        return fields

    return build


def _nothing(encoder: Encoder, decoded: Decoded) -> Fields:
    return Fields(op=encoder.machine_op("nothing"))


def _place(encoder: Encoder, typed: TypedOperand) -> tuple[int, int, int]:
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


def _address(encoder: Encoder, fields: Fields, typed: TypedOperand) -> None:
    """Put an address into s[0], imm and aux[5]."""
    row, width, offset = _place(encoder, typed)
    fields.s.insert(0, row)
    fields.aux[WIDE] = int(width == 64)
    fields.imm = offset


def _scalars(encoder: Encoder, fields: Fields, operands: list[TypedOperand]) -> Fields:
    """Put operands that are read as one value per issue into the list aux[6]."""
    places: list[int] = []
    for typed in operands:
        places += _place(encoder, typed)
        if typed.type == "tensor":
            assert isinstance(typed.operand, ptx.Address)
            if typed.operand.extra:
                raise encoder.unsupported("im2col offsets")
            for coordinate in typed.operand.coordinates:
                places += (encoder.value(coordinate, "b32"), 32, 0)
    fields.aux[LIST] = encoder.list_of(places)
    return fields


def _listed(name: str, operands: str, **aux: int) -> Callable:
    """A form whose operands all go into the list, absent ones left out."""

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = Fields(op=encoder.machine_op(name), aux=dict(enumerate(aux.values())))
        present = [decoded.operands[o] for o in operands.split() if o in decoded.operands]
        return _scalars(encoder, fields, present)

    return build


def _items(typed: TypedOperand) -> tuple:
    return typed.operand.items if isinstance(typed.operand, ptx.Vector) else (typed.operand,)


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
    _address(encoder, fields, decoded.operands["a"])
    return fields


def _register_bits(encoder: Encoder, items: tuple, size: int) -> int:
    """Width of the rows that a memory access moves; they must be alike."""
    widths = {encoder.file_bits(i) for i in items if isinstance(i, ptx.Register)} or {max(8 * size, 16)}
    if len(widths) != 1 or min(widths) < 8 * size or 1 in widths:
        raise encoder.unsupported(f"registers of {sorted(widths)} bits for elements of {8 * size}")
    return widths.pop()


def _load(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = _memory_fields(encoder, decoded, "load")
    items = _items(decoded.operands["d"])
    bits = _register_bits(encoder, items, fields.aux[1])
    fields.aux[3], fields.aux[4] = bits, int(decoded.mods["type"][0] == "s" and bits > 8 * fields.aux[1])
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
    items = _items(typed)
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
            for i in _items(decoded.operands["d"])
        ]
        fields.d = [targets[0], -1] if len(rows) == 1 else [-1, encoder.list_of(targets)]
    return fields


def _mbarrier(name: str, rest: str = "", target: str = "", **aux: int) -> Callable:
    """A form on an mbarrier: address first, then operand rows."""
    base = _simple(name, rest, target, **aux)

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = base(encoder, decoded)
        _address(encoder, fields, decoded.operands["a"])
        return fields

    return build


def _arrive(drop: int, expects: int) -> Callable:
    base = _mbarrier("mbarrier_arrive", "count", "d", drop=drop, expects=expects)

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = base(encoder, decoded)
        fields.aux[2] = int("count" in decoded.operands)
        return fields

    return build


def _barrier_sync(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = _simple("barrier_sync", "barrier threads")(encoder, decoded)
    fields.aux = {0: int("threads" in decoded.operands), 1: -1}
    return fields


def _barrier_reduction(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = _simple("barrier_sync", "barrier threads c", "d")(encoder, decoded)
    words = ["popc", "and", "or"]
    fields.aux = {0: int("threads" in decoded.operands), 1: words.index(decoded.mods.get("op") or "popc")}
    if fields.d[0] < 0:
        fields.d = [encoder.scratch(1 if fields.aux[1] else 32)]
    return fields


def _redux(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = _with_mod("redux", "a members", "d", "op", "add min max and or xor")(encoder, decoded)
    fields.aux[1] = int(decoded.mods["type"][0] == "s")
    return fields


def _match(is_all: int) -> Callable:
    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = _simple("match", "a members", "d e")(encoder, decoded)
        fields.aux = {0: is_all, 1: int(decoded.mods["type"] == "b64")}
        return fields

    return build


def _policy(encoder: Encoder, decoded: Decoded) -> Fields:
    return Fields(op=encoder.machine_op("zero"), d=[encoder.target(decoded.operands["d"])])


FORMS: dict[str, Callable] = {
    "ld": _load, "ldu": _load, "st": _store, "atom": _atomic,
    "red": _atomic, "atom.cas": _atomic,
    "shfl.sync.b32": _with_mod("shfl", "a b c members", "d e", "mode", "up down bfly idx"),
    "elect.sync": _simple("elect", "members", "d e"),
    "vote.sync.pred": _with_mod("vote", "a members", "d", "mode", "all any uni"),
    "vote.sync.ballot.b32": _simple("vote_ballot", "a members", "d"),
    "match.any.sync": _match(0), "match.all.sync": _match(1), "redux.sync": _redux,
    "activemask.b32": _simple("activemask", "", "d"), "bar.warp.sync": _simple("bar_warp_sync", "members"),
    "mbarrier.init.b64": _mbarrier("mbarrier_init", "count"), "mbarrier.inval.b64": _mbarrier("mbarrier_inval"),
    "mbarrier.expect_tx.b64": _mbarrier("mbarrier_tx", "count", completes=0),
    "mbarrier.complete_tx.b64": _mbarrier("mbarrier_tx", "count", completes=1),
    "mbarrier.arrive.b64": _arrive(0, 0), "mbarrier.arrive.expect_tx.b64": _arrive(0, 1),
    "mbarrier.arrive.noComplete.b64": _arrive(0, 0), "mbarrier.arrive_drop.b64": _arrive(1, 0),
    "mbarrier.arrive_drop.expect_tx.b64": _arrive(1, 1), "mbarrier.arrive_drop.noComplete.b64": _arrive(1, 0),
    "mbarrier.test_wait.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=0, may_block=0),
    "mbarrier.test_wait.parity.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=1, may_block=0),
    "mbarrier.try_wait.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=0, may_block=1),
    "mbarrier.try_wait.parity.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=1, may_block=1),
    "mbarrier.pending_count.b64": _simple("pending_count", "state", "d"),
    "bar.sync": _barrier_sync, "barrier.sync": _barrier_sync,
    "bar.arrive": _simple("barrier_arrive", "barrier threads"),
    "barrier.arrive": _simple("barrier_arrive", "barrier threads"),
    "bar.red.popc.u32": _barrier_reduction, "bar.red.pred": _barrier_reduction,
    "barrier.red.popc.u32": _barrier_reduction, "barrier.red.pred": _barrier_reduction,
    "barrier.cluster.arrive": _simple("cluster_arrive"), "barrier.cluster.wait": _simple("cluster_wait"),
    "setmaxnreg.sync.aligned.u32": _simple("setmaxnreg", "count"),
    "createpolicy.fractional.b64": _policy,
}  # fmt: skip
"""How to encode a machine row, by the fixed words of its syntax."""

for _words in (
    "membar", "fence", "fence.mbarrier_init.release.cluster", "fence.proxy", "fence.sync_restrict::<space2>.cluster",
    "fence.proxy.async::generic.sync_restrict::<space2>.cluster", "fence.proxy.tensormap::generic.release",
    "fence.proxy.tensormap::generic.acquire", "prefetch", "prefetch.tensormap", "prefetchu.L1",
    "applypriority.L2::evict_normal", "discard.L2", "nanosleep.u32", "pmevent.mask", "pmevent",
    "griddepcontrol.launch_dependents", "griddepcontrol.wait", "cp.async.bulk.prefetch.L2.global",
    "cp.async.bulk.prefetch.tensor.L2.global", "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
):  # fmt: skip
    FORMS[_words] = _nothing

from . import encode_async as encode_async  # noqa: E402  registers the asynchronous forms
