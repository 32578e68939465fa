"""Loads, stores, atomics: PTX ISA, "Data Movement" (ld, st) and "Parallel Synchronization" (atom, red).

Addresses without a state space are generic: windows of the address space belong to shared, parameter and local
memory, the rest is global. Within one instruction lanes act in ascending order.
"""

from typing import Any

import numpy as np

from ..cluster import ADDRESS_MASK, RANK_SHIFT, locate
from ..errors import MemoryFault, UnsupportedPtx
from ..events import MemoryAccess
from . import data_movement
from .atomics import ATOMIC_TYPES, combine
from .lane_values import active_positions, full
from .table import Effect, machine

CHAPTER = "data-movement-and-conversion-instructions"
SPACES = "global shared shared::cta shared::cluster local param param::entry param::func const"
TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128"
_CACHE: dict[str, Any] = {
    "cop": "ca cg cs lu cv wb wt",
    "evict": "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate",
    "evict2": "L2::evict_normal L2::evict_first L2::evict_last",
    "prefetch": "L2::64B L2::128B L2::256B",
    "vec": "v2 v4 v8",
    "scope": "cta cluster gpu sys",
}
_WINDOW_SHIFT = 32
_WINDOW_SPACES = {window >> _WINDOW_SHIFT: name for name, window in data_movement.WINDOWS.items() if window}


def element_bytes(type_name: str) -> int:
    """Size of a memory element: b128 counts as two of 8 bytes elsewhere."""
    return int(type_name.lstrip("usbf")) // 8


class _Access:
    """What a load, store or atomic needs to find its memory; shared by the handlers of this file."""

    def __init__(self, decoded, bus, kind: str):
        mods = decoded.mods
        self.decoded = decoded
        self.kind = kind
        space = (mods.get("space") or "generic").partition("::")[0]
        self.space = "global" if space == "const" else space
        self.order = mods.get("order") or ("relaxed" if kind == "atomic" else "weak")
        self.scope = mods.get("scope") or ""
        self.sink = bus.sink(MemoryAccess)

    def parts(self, lanes, addresses: np.ndarray, num_bytes: int, positions: np.ndarray | None):
        """Split active lanes by memory: yields (memory, space, positions or None, addresses, writable check)."""
        if positions is not None:
            addresses = addresses[positions]
        if not len(addresses):
            return
        space = self.space
        if space == "generic":
            high = addresses >> np.uint64(_WINDOW_SHIFT)
            if (high == high[0]).all():
                space, offset = self._window(int(high[0]))
                addresses = addresses - np.uint64(offset)
            else:
                base = np.arange(len(addresses)) if positions is None else positions
                for value in np.unique(high):
                    chosen = np.flatnonzero(high == value)
                    space, offset = self._window(int(value))
                    yield from self._in_space(
                        lanes, space, addresses[chosen] - np.uint64(offset), num_bytes, base[chosen]
                    )
                return
        yield from self._in_space(lanes, space, addresses, num_bytes, positions)

    @staticmethod
    def _window(high: int) -> tuple[str, int]:
        space = _WINDOW_SPACES.get(high)
        return (space, high << _WINDOW_SHIFT) if space else ("global", 0)

    def _in_space(self, lanes, space, addresses, num_bytes, positions):
        cta = lanes.cta
        if space == "shared":
            if len(cta.cluster.ctas) > 1 and int(addresses.max()) >> RANK_SHIFT:
                yield from self._in_cluster(cta, addresses, positions)
            else:
                yield cta.shared, space, positions, addresses
        elif space == "param":
            if self.kind != "read":
                raise MemoryFault("write to the parameter block of a kernel")
            yield cta.machine.parameter_memory, space, positions, addresses
        elif space == "local":
            yield _LocalMemory(lanes, positions), space, positions, addresses
        else:
            memory = cta.machine.global_memory
            for region, chosen in memory.spread(addresses, num_bytes):
                if self.kind != "read":
                    memory.check_writable(region)
                if chosen is None:
                    yield region, "global", positions, addresses
                else:
                    base = np.arange(len(addresses)) if positions is None else positions
                    yield region, "global", base[chosen], addresses[chosen]

    def _in_cluster(self, cta, addresses, positions):
        """Split lanes by the CTA whose shared memory they name."""
        ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
        base = np.arange(len(addresses)) if positions is None else positions
        for rank in np.unique(ranks).tolist():
            chosen = np.flatnonzero(ranks == rank)
            home, _ = locate(cta, rank << RANK_SHIFT)
            if self.kind != "read":
                home.progress += 1
            yield home.shared, "shared", base[chosen], addresses[chosen] & addresses.dtype.type(ADDRESS_MASK)

    def publish(self, lanes, memory, space: str, addresses, size: int, positions) -> None:
        which = np.arange(lanes.n) if positions is None else positions
        home = memory.owner if space == "shared" and memory.owner is not lanes.cta else None
        self.sink(
            MemoryAccess(
                lanes, self.decoded, self.kind, space, "generic", addresses, size, which, None, self.order, self.scope,
                home,
            )
        )  # fmt: skip


class _LocalMemory:
    """Local memory of some lanes, with the gather and scatter of ByteMemory."""

    def __init__(self, lanes, positions):
        self.data = lanes.cta.local
        self.index = lanes.index if positions is None else lanes.index[positions]

    def _columns(self, addresses, num_bytes: int) -> np.ndarray:
        if int(addresses.max()) + num_bytes > self.data.shape[1] or int(np.bitwise_or.reduce(addresses)) % num_bytes:
            raise MemoryFault(f"{num_bytes} bytes at local address {int(addresses.max()):#x}: misaligned or outside")
        return addresses.astype(np.intp)[:, None] + np.arange(num_bytes)

    def gather(self, addresses, size: int, count: int) -> np.ndarray:
        raw = self.data[self.index[:, None], self._columns(addresses, size * count)]
        return np.ascontiguousarray(raw).view(f"u{size}").T

    def scatter(self, addresses, size: int, values: np.ndarray) -> None:
        columns = self._columns(addresses, size * len(values))
        self.data[self.index[:, None], columns] = np.ascontiguousarray(values.T).view(np.uint8)


def _vector_length(mods) -> int:
    return int(mods["vec"][1:]) if mods.get("vec") else 1


def _make_load(decoded, bus):
    mods = decoded.mods
    access = _Access(decoded, bus, "read")
    size, count = element_bytes(mods["type"]), _vector_length(mods)
    if size == 16:
        raise UnsupportedPtx(f"{decoded.instruction.mnemonic}: 128-bit scalar registers in memory")
    unsigned = np.dtype(f"u{size}")
    polls = access.order in ("relaxed", "acquire") or bool(mods.get("volatile"))

    def load(lanes, mask, address, *ignored):
        positions = active_positions(lanes, mask)
        if polls:
            lanes.cta.polls += 1
        result = None
        for memory, space, where, addresses in access.parts(lanes, address, size * count, positions):
            values = memory.gather(addresses, size, count)
            if access.sink:
                access.publish(lanes, memory, space, addresses, size * count, where)
            if where is None:
                return values if count > 1 else values[0]
            if result is None:
                result = np.zeros((count, lanes.n), unsigned)
            result[:, where] = values
        if result is None:
            result = np.zeros((count, lanes.n), unsigned)
        return result if count > 1 else result[0]

    return load


def _make_store(decoded, bus):
    mods = decoded.mods
    access = _Access(decoded, bus, "write")
    size, count = element_bytes(mods["type"]), _vector_length(mods)
    if size == 16:
        raise UnsupportedPtx(f"{decoded.instruction.mnemonic}: 128-bit scalar registers in memory")
    unsigned = np.dtype(f"u{size}")

    def store(lanes, mask, address, value, *ignored):
        positions = active_positions(lanes, mask)
        items = value if isinstance(value, list) else [value]
        values = np.empty((count, lanes.n), unsigned)
        for row, item in zip(values, items, strict=True):
            row[:] = item if item.dtype == unsigned else item.view(unsigned)
        lanes.cta.progress += 1
        for memory, space, where, addresses in access.parts(lanes, address, size * count, positions):
            memory.scatter(addresses, size, values if where is None else values[:, where])
            if access.sink:
                access.publish(lanes, memory, space, addresses, size * count, where)

    return store


for _order in ("{.weak}", "{.volatile}", "{.<order>}{.<scope>}"):
    _read = (Effect("read", "any"),) if "order" not in _order else (Effect("read", "any"), Effect("acquire", "any"))
    _write = (Effect("write", "any"),) if "order" not in _order else (Effect("write", "any"), Effect("release", "any"))
    machine(
        f"ld{_order}{{.<space>}}{{.<cop>}}{{.nc}}{{.<evict>}}{{.<evict2>}}{{.L2::cache_hint}}{{.<prefetch>}}{{.<vec>}}"
        ".<type> d, [a]{, policy:b64}",
        chapter=CHAPTER, effects=_read, order="relaxed acquire", space=SPACES, type=TYPES, **_CACHE,
    )(_make_load)  # fmt: skip
    machine(
        f"st{_order}{{.<space>}}{{.<cop>}}{{.<evict>}}{{.<evict2>}}{{.L2::cache_hint}}{{.<vec>}}"
        ".<type> [a], b{, policy:b64}",
        chapter=CHAPTER, effects=_write, order="relaxed release", space=SPACES, type=TYPES, **_CACHE,
    )(_make_store)  # fmt: skip
machine(
    "ldu{.global}{.<vec>}.<type> d, [a]", chapter=CHAPTER, effects=(Effect("read", "global"),), type=TYPES, vec="v2 v4"
)(_make_load)


def _make_atomic(decoded, bus):
    """One lane after the other: read, combine, write; `atom` returns the old value, `red` nothing."""
    mods = decoded.mods
    access = _Access(decoded, bus, "atomic")
    size, op, type_name = element_bytes(mods["type"].removesuffix("x2")), mods["op"], mods["type"]
    if type_name.endswith("x2"):
        size = 4
    count = _vector_length(mods)
    returns = decoded.instruction.opcode == "atom"
    unsigned = np.dtype(f"u{size}")

    def atomic(lanes, mask, address, b, *rest):
        positions = active_positions(lanes, mask)
        third = rest[0] if op == "cas" else None
        items = b if isinstance(b, list) else [b]
        operands = np.stack([full(item, lanes.n).view(unsigned) for item in items])
        swap = None if third is None else full(third, lanes.n).view(unsigned)
        old = np.zeros((count, lanes.n), unsigned)
        changed = False
        for memory, space, where, addresses in access.parts(lanes, address, size * count, positions):
            which = np.arange(lanes.n) if where is None else where
            for k, position in enumerate(which.tolist()):
                one = addresses[k : k + 1]
                before = memory.gather(one, size, count)[:, 0]
                old[:, position] = before
                other = None if swap is None else swap[position : position + 1]
                after = combine(op, type_name, before, operands[:, position], other)
                changed = changed or (after != before).any()
                memory.scatter(one, size, after[:, None])
            if access.sink:
                access.publish(lanes, memory, space, addresses, size * count, where)
        if changed:
            lanes.cta.progress += 1
        else:
            lanes.cta.polls += 1
        return (old if count > 1 else old[0]) if returns else None

    return atomic


_ATOMIC_EFFECTS = (Effect("read", "any"), Effect("write", "any"), Effect("acquire", "any"), Effect("release", "any"))
for _opcode, _dst in (("atom", "d, "), ("red", "")):
    machine(
        f"{_opcode}{{.<order>}}{{.<scope>}}{{.<space>}}.<op>{{.noftz}}{{.L2::cache_hint}}{{.<vec>}}.<type> "
        f"{_dst}[a], b{{, policy:b64}}",
        chapter="parallel-synchronization-and-communication-instructions", effects=_ATOMIC_EFFECTS,
        order="relaxed acquire release acq_rel", scope="cta cluster gpu sys", vec="v2 v4 v8",
        space="global shared shared::cta shared::cluster", op="and or xor exch add inc dec min max",
        type=ATOMIC_TYPES,
    )(_make_atomic)  # fmt: skip
machine(
    "atom{.<order>}{.<scope>}{.<space>}.cas.<type> d, [a], b, c{, policy:b64}",
    chapter="parallel-synchronization-and-communication-instructions", effects=_ATOMIC_EFFECTS,
    order="relaxed acquire release acq_rel", scope="cta cluster gpu sys",
    space="global shared shared::cta shared::cluster", type="b16 b32 b64 u32 u64",
)(lambda decoded, bus: _make_atomic(_with_op(decoded, "cas"), bus))  # fmt: skip


def _with_op(decoded, op: str):
    from dataclasses import replace

    return replace(decoded, mods={**decoded.mods, "op": op})
