"""Encode asynchronous copies and their groups, and the tensor core."""

from __future__ import annotations

from undertow import ptx

from ..flow import async_operands
from ..semantics import Decoded
from ..semantics.memory import element_bytes
from ..semantics.wgmma import form_of
from .encode import Encoder, Fields
from .form_parts import ATOMIC_OPS, ATOMIC_TYPES, LIST, Form, items_of, listed, put_address, put_scalars, simple

BULK, CP_ASYNC = 0, 1
"""Numbers of AsyncEngines::GroupKind in the runtime."""


def _reducing_copy(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = listed("bulk_to_global", "d a size")(encoder, decoded)
    fields.aux[0] = ATOMIC_OPS[decoded.mods["op"]] | ATOMIC_TYPES[decoded.mods["type"]] << 8
    return fields


def _bulk_load(from_shared: int = 0, spreads: int = 0) -> Form:
    """A copy, or a reduction, to shared memory that completes bytes of an mbarrier."""
    base = listed("bulk_load", "d a size m mask", from_shared=from_shared, spreads=spreads, reduction=-1)

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = base(encoder, decoded)
        if decoded.mods.get("op"):
            fields.aux[2] = ATOMIC_OPS[decoded.mods["op"]] | ATOMIC_TYPES[decoded.mods["type"]] << 8
        return fields

    return build


def _cp_async(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = listed("cp_async", "d a size src_size")(encoder, decoded)
    fields.aux[0] = int("src_size" in decoded.operands)
    return fields


def _cp_async_arrive(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = listed("cp_async_arrive", "a")(encoder, decoded)
    fields.aux[0] = int(decoded.mods["noinc"])
    return fields


def _tensor(name: str, operands: str) -> Form:
    """A tensor copy; the map operand comes last, its coordinates behind it."""

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = Fields(op=encoder.machine_op(name))
        put_scalars(encoder, fields, [decoded.operands[o] for o in operands.split()])
        address = decoded.operands[operands.split()[-1]].operand
        assert isinstance(address, ptx.Address)
        op = decoded.mods.get("op")
        fields.aux.update({0: int(decoded.mods["dim"][0]), 1: len(address.coordinates)})
        fields.aux[2] = ATOMIC_OPS[op] if op else -1
        fields.aux[3] = int("mask" in decoded.operands)
        return fields

    return build


def _mma(encoder: Encoder, decoded: Decoded) -> Fields:
    operands = decoded.operands
    fields = Fields(op=encoder.machine_op("mma"))
    places = put_scalars(encoder, fields, [operands[o] for o in ("d", "a", "b", "idesc", "keep")])
    if "scale" in operands:
        _append(encoder, places, [encoder.source(operands["scale"])])
    disabled = []
    if "lanes" in operands:
        if "scale" not in operands:
            _append(encoder, places, [encoder.constant(0, 32)])
        vector = operands["lanes"].operand
        assert isinstance(vector, ptx.Vector)
        disabled = [encoder.value(item, "any") for item in vector.items]
        if len(disabled) not in (4, 8):
            raise encoder.unsupported(f"{len(disabled)} words of disabled lanes; the ISA allows 4 and 8")
        _append(encoder, places, disabled[:6])
    fields.aux.update({0: int(isinstance(operands["a"].operand, ptx.Address)), 1: int("scale" in operands)})
    fields.aux[2] = min(len(disabled), 6)
    return fields


def _wgmma(encoder: Encoder, decoded: Decoded) -> Fields:
    form, operands = form_of(decoded), decoded.operands
    fields = Fields(op=encoder.machine_op("wgmma"))
    names = ("b", "keep") if form.a_in_registers else ("a", "b", "keep")
    put_scalars(encoder, fields, [operands[name] for name in names])
    rows = {
        name: encoder.list_of([encoder.register_target(item, "b32") for item in items_of(operands[name])])
        for name in async_operands(decoded)
    }
    flags = (form.kind == "bf16", form.negate, form.a_mn_major, form.b_mn_major)
    bits = sum(flag << place for place, flag in enumerate(flags))
    fields.aux |= {0: form.n, 1: rows["acc"], 2: rows.get("a", -1), 3: bits, 4: decoded.instruction.line}
    return fields


def _remote_store(encoder: Encoder, decoded: Decoded) -> Fields:
    """st.async and red.async: address, mbarrier, then one value per element."""
    mods = decoded.mods
    fields = Fields(op=encoder.machine_op("remote_store"))
    places = put_scalars(encoder, fields, [decoded.operands["a"], decoded.operands["m"]])
    size = element_bytes(mods["type"])
    for item in items_of(decoded.operands["b"]):
        places_of_item = [encoder.value(item, mods["type"]), 8 * size, 0]
        encoder.lists += places_of_item
        encoder.lists[places.aux[LIST]] += 3
    op = mods.get("op")
    fields.aux |= {0: size, 1: ATOMIC_OPS[op] | ATOMIC_TYPES[mods["type"]] << 8 if op else -1}
    return fields


def _mapa(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = simple("mapa", "a b", "d")(encoder, decoded)
    fields.aux = {0: int(not decoded.mods["space"]), 1: ptx.TYPE_BITS[decoded.mods["type"]]}
    return fields


def _getctarank(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = simple("getctarank", "a", "d")(encoder, decoded)
    fields.aux = {0: ptx.TYPE_BITS[decoded.mods["type"]]}
    return fields


def _append(encoder: Encoder, fields: Fields, rows: list[int]) -> None:
    """Add 32-bit operands to the list that was written last."""
    start = fields.aux[LIST]
    for row in rows:
        encoder.lists += [row, 32, 0]
    encoder.lists[start] += 3 * len(rows)


def _registers(name: str, operand: str, is_target: bool) -> Form:
    """A warp-wide move between registers and tensor memory or matrix tiles."""

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = Fields(op=encoder.machine_op(name))
        put_address(encoder, fields, decoded.operands["a"])
        count = int(decoded.mods["num"][1:])
        items = items_of(decoded.operands[operand])
        if len(items) != count:
            raise encoder.unsupported(f"{len(items)} registers for .{decoded.mods['num']}")
        rows = []
        for item in items:
            if is_target:
                rows.append(encoder.scratch(32) if isinstance(item, ptx.Sink) else encoder.register_target(item, "b32"))
            else:
                rows.append(encoder.value(item, "b32"))
        fields.aux.update({0: count, 1: int(decoded.mods.get("trans") or False), LIST: encoder.list_of(rows)})
        return fields

    return build


FORMS: dict[str, Form] = {
    "cp.async.global": _cp_async,
    "cp.async.commit_group": simple("commit_group", kind=CP_ASYNC),
    "cp.async.wait_group": simple("wait_group", "limit", kind=CP_ASYNC, everything=0),
    "cp.async.wait_all": simple("wait_group", kind=CP_ASYNC, everything=1),
    "cp.async.mbarrier.arrive.b64": _cp_async_arrive,
    "cp.async.bulk.global.mbarrier::complete_tx::bytes": _bulk_load(),
    "cp.async.bulk.global.mbarrier::complete_tx::bytes.multicast::cluster": _bulk_load(spreads=1),
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes": _bulk_load(from_shared=1),
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes": _bulk_load(from_shared=1),
    "cp.async.bulk.global.shared::cta.bulk_group": listed("bulk_to_global", "d a size", reduction=-1),
    "cp.reduce.async.bulk.global.shared::cta.bulk_group": _reducing_copy,
    "cp.async.bulk.commit_group": simple("commit_group", kind=BULK),
    "cp.async.bulk.wait_group": simple("wait_group", "limit", kind=BULK, everything=0),
    "cp.async.bulk.wait_group.read": simple("wait_group", "limit", kind=BULK, everything=0),
    "st.bulk": listed("st_bulk", "a size value"),
    "cp.async.bulk.tensor.global.mbarrier::complete_tx::bytes": _tensor("tensor_load", "d m a"),
    "cp.async.bulk.tensor.global.mbarrier::complete_tx::bytes.multicast::cluster": _tensor("tensor_load", "d m mask a"),
    "cp.async.bulk.tensor.global.shared::cta.bulk_group": _tensor("tensor_store", "a d"),
    "cp.reduce.async.bulk.tensor.global.shared::cta.bulk_group": _tensor("tensor_store", "a d"),
    "tcgen05.mma.cta_group::1.kind::f16": _mma,
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64": listed("commit", "a"),
    "tcgen05.alloc.cta_group::1.sync.aligned.b32": listed("tmem_alloc", "d columns"),
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32": simple("tmem_dealloc", "address columns"),
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned": simple("tmem_relinquish"),
    "tcgen05.ld.sync.aligned.32x32b.b32": _registers("tmem_load", "d", True),
    "tcgen05.st.sync.aligned.32x32b.b32": _registers("tmem_store", "b", False),
    "tcgen05.wait::ld.sync.aligned": simple("tmem_wait"),
    "tcgen05.wait::st.sync.aligned": simple("tmem_wait"),
    "st.async": _remote_store,
    "red.async.relaxed.cluster": _remote_store,
    "mapa": _mapa,
    "getctarank": _getctarank,
    "wgmma.mma_async.sync.aligned.f32": _wgmma,
    "wgmma.fence.sync.aligned": simple("wgmma_fence"),
    "wgmma.commit_group.sync.aligned": simple("wgmma_commit"),
    "wgmma.wait_group.sync.aligned": simple("wgmma_wait", "limit"),
    "ldmatrix.sync.aligned.m8n8.b16": _registers("ldmatrix", "d", True),
    "movmatrix.sync.aligned.m8n8.trans.b16": simple("movmatrix", "a", "d"),
    "stmatrix.sync.aligned.m8n8.b16": _registers("stmatrix", "b", False),
}
