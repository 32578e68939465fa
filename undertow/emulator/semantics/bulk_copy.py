"""Bulk copies: PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk" and their groups, `st.bulk`.

Each distinct tuple of operands in a warp is one copy. Data is read and written when the engine completes the copy.
"""

import numpy as np

from ..async_agents import AsyncOperation
from ..cluster import locate
from ..errors import MemoryFault, ProtocolError
from ..events import MemoryAccess
from .asynchronous_copy import CHAPTER, global_address, make_commit, make_wait
from .atomics import combine
from .lane_values import distinct
from .mbarrier import Signals, shared_address
from .table import NO_EFFECTS, Effect, machine

REDUCE_OPS = "and or xor add inc dec min max"
REDUCE_TYPES = "f16 bf16 b32 u32 s32 b64 u64 s64 f32 f64"
ASYNC_LOAD = (
    Effect("issue", "shared", "async"), Effect("read", "global", "async"), Effect("write", "shared", "async"),
    Effect("release", "mbarrier", "async"),
)  # fmt: skip
ASYNC_STORE = (
    Effect("issue", "global", "async"), Effect("read", "shared", "async"), Effect("write", "global", "async")
)  # fmt: skip


class AsyncAccess:
    """Publishes what an engine reads and writes."""

    def __init__(self, decoded, bus):
        self.decoded = decoded
        self.sink = bus.sink(MemoryAccess)

    def __call__(self, operation, kind: str, space: str, addresses, size: int, home=None) -> None:
        """Report accesses of `size` bytes at each address by an operation; home: whose shared memory, if another's."""
        if self.sink:
            places = np.atleast_1d(np.asarray(addresses, np.int64))
            home = None if home is operation.lanes.cta else home
            self.sink(
                MemoryAccess(
                    operation.lanes, self.decoded, kind, space, "async", places, size, None, operation, home=home
                )
            )


def check_bulk(size: int, *addresses: int) -> None:
    """Refuse bulk copies whose size or addresses are not multiples of 16 bytes."""
    if size % 16 or any(a % 16 for a in addresses):
        places = ", ".join(f"{a:#x}" for a in addresses)
        raise MemoryFault(f"bulk copy of {size} bytes between {places}: all must be multiples of 16")


@machine(
    "cp.async.bulk.<dst>.global.mbarrier::complete_tx::bytes{.L2::cache_hint} "
    "[d], [a], size:u32, [m]{, policy:b64}",
    chapter=CHAPTER, effects=ASYNC_LOAD, dst="shared::cta shared::cluster",
)  # fmt: skip
def _bulk_load(decoded, bus):
    return _make_bulk_load(decoded, bus)


@machine(
    "cp.async.bulk.<dst>.global.mbarrier::complete_tx::bytes.multicast::cluster{.L2::cache_hint} "
    "[d], [a], size:u32, [m], mask:u16{, policy:b64}",
    chapter=CHAPTER, effects=ASYNC_LOAD, dst="shared::cluster",
)  # fmt: skip
def _bulk_load_multicast(decoded, bus):
    return _make_bulk_load(decoded, bus)


def destinations(cta, target: int, word: int, mask: int | None) -> tuple[tuple, int, int]:
    """CTAs that a copy goes to, and the addresses there of its data and its mbarrier.

    mask: ranks that a multicast goes to; the same addresses in each.
    Raises: ProtocolError if data and mbarrier lie in different CTAs.
    """
    home, target = locate(cta, shared_address(target))
    owner, word = locate(cta, shared_address(word))
    if owner is not home:
        raise ProtocolError("a copy to the shared memory of one CTA with an mbarrier of another")
    homes = (home,)
    if mask is not None:
        homes = tuple(cta.cluster.member(rank) for rank in range(16) if mask >> rank & 1)
    for each in homes:
        each.shared.mbarrier(word)
    return homes, target, word


def _make_bulk_load(decoded, bus):
    publish, signal = AsyncAccess(decoded, bus), Signals(decoded, bus)
    spreads = "mask" in decoded.operands

    def handler(lanes, mask, dst, src, size, *rest):
        cta, barrier = lanes.cta, rest[0]
        ranks = rest[1:2] if spreads else ()
        for position, (target, source, num_bytes, word, *to) in distinct(lanes, mask, dst, src, size, barrier, *ranks):
            check_bulk(num_bytes, target, source)
            homes, target, word = destinations(cta, target, word, to[0] if to else None)

            def run(operation, facts=(homes, target, source, num_bytes, word)):
                homes, target, source, num_bytes, word = facts
                for home in homes:
                    home.shared.check_range(target, num_bytes)
                data = np.empty(0, np.uint8)
                if num_bytes:
                    region = cta.machine.global_memory.region(global_address(source), num_bytes)
                    data = region.data[source - region.base :][:num_bytes]
                    publish(operation, "read", "global", source, num_bytes)
                for home in homes:
                    if num_bytes:
                        home.shared.data[target : target + num_bytes] = data
                        publish(operation, "write", "shared", target, num_bytes, home)
                    signal(lanes, "complete_tx", (home, word), num_bytes, operation)

            details = {"shared": target, "global": source, "bytes": num_bytes, "mbarrier": word, "homes": homes}
            thread = int(lanes.index[position])
            cta.engines.issue(AsyncOperation("bulk_load", decoded, lanes, thread, run, (), details))

    return handler


_BETWEEN = (
    Effect("issue", "shared", "async"), Effect("read", "shared", "async"), Effect("write", "shared", "async"),
    Effect("release", "mbarrier", "async"),
)  # fmt: skip


def _make_bulk_shared(decoded, bus):
    """From the CTA's shared memory to that of any CTA of the cluster: a copy, or a reduction into what is there."""
    publish, signal = AsyncAccess(decoded, bus), Signals(decoded, bus)
    op, type_name = decoded.mods.get("op"), decoded.mods.get("type")

    def handler(lanes, mask, dst, src, size, barrier):
        cta = lanes.cta
        for position, (target, source, num_bytes, word) in distinct(lanes, mask, dst, src, size, barrier):
            source = shared_address(source)
            check_bulk(num_bytes, target, source)
            homes, target, word = destinations(cta, target, word, None)

            def run(operation, home=homes[0], target=target, source=source, num_bytes=num_bytes, word=word):
                home.shared.check_range(target, num_bytes)
                cta.shared.check_range(source, num_bytes)
                place = home.shared.data[target : target + num_bytes]
                data = cta.shared.data[source : source + num_bytes].copy()
                place[:] = data if op is None or not num_bytes else reduce_bytes(op, type_name, place, data)
                publish(operation, "read", "shared", source, num_bytes)
                publish(operation, "write" if op is None else "atomic", "shared", target, num_bytes, home)
                signal(lanes, "complete_tx", (home, word), num_bytes, operation)

            details = {"shared": target, "source": source, "bytes": num_bytes, "mbarrier": word, "homes": homes}
            thread = int(lanes.index[position])
            cta.engines.issue(AsyncOperation("bulk_load", decoded, lanes, thread, run, (), details))

    return handler


machine(
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [a], size:u32, [m]",
    chapter=CHAPTER, effects=_BETWEEN,
)(_make_bulk_shared)  # fmt: skip
machine(
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.<op>.<type> "
    "[d], [a], size:u32, [m]",
    chapter=CHAPTER, effects=_BETWEEN, op=REDUCE_OPS, type="b32 u32 s32 b64 u64 s64",
)(_make_bulk_shared)  # fmt: skip


@machine(
    "cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint} [d], [a], size:u32{, policy:b64}",
    chapter=CHAPTER, effects=ASYNC_STORE,
)  # fmt: skip
def _bulk_store(decoded, bus):
    return _make_bulk_to_global(decoded, bus, None, "bulk_store")


@machine(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.<op>{.noftz}.<type> "
    "[d], [a], size:u32{, policy:b64}",
    chapter=CHAPTER, effects=(*ASYNC_STORE, Effect("read", "global", "async")), op=REDUCE_OPS, type=REDUCE_TYPES,
)  # fmt: skip
def _bulk_reduce(decoded, bus):
    return _make_bulk_to_global(decoded, bus, (decoded.mods["op"], decoded.mods["type"]), "bulk_reduce")


def _make_bulk_to_global(decoded, bus, reduction: tuple[str, str] | None, engine: str):
    publish = AsyncAccess(decoded, bus)

    def handler(lanes, mask, dst, src, size, policy=None):
        cta = lanes.cta
        for position, (target, source, num_bytes) in distinct(lanes, mask, dst, src, size):
            source = shared_address(source)
            check_bulk(num_bytes, target, source)

            def run(operation, target=target, source=source, num_bytes=num_bytes):
                if not num_bytes:
                    return
                memory = cta.machine.global_memory
                cta.shared.check_range(source, num_bytes)
                region = memory.region(global_address(target), num_bytes)
                memory.check_writable(region)
                place = region.data[target - region.base :][:num_bytes]
                data = cta.shared.data[source : source + num_bytes]
                place[:] = data if reduction is None else reduce_bytes(*reduction, place, data)
                cta.progress += 1
                publish(operation, "read", "shared", source, num_bytes)
                publish(operation, "write" if reduction is None else "atomic", "global", target, num_bytes)

            details = {"shared": source, "global": target, "bytes": num_bytes}
            operation = AsyncOperation(engine, decoded, lanes, int(lanes.index[position]), run, (), details)
            cta.engines.join_group("bulk", operation)
            cta.engines.issue(operation)

    return handler


def reduce_bytes(op: str, type_name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Combine two byte arrays elementwise as `type_name`; returns bytes of the same shape."""
    width = np.dtype(f"u{int(type_name.lstrip('usbf')) // 8}")
    before, after = np.ascontiguousarray(old).view(width), np.ascontiguousarray(new).view(width)
    return combine(op, type_name, before, after).view(np.uint8).reshape(old.shape)


@machine(
    "cp.async.bulk.prefetch.L2.global{.L2::cache_hint} [a], size:u32{, policy:b64}", chapter=CHAPTER, effects=NO_EFFECTS
)
def _bulk_prefetch(decoded, bus):
    return lambda lanes, mask, *sources: None


machine("cp.async.bulk.commit_group", chapter=CHAPTER, effects=(Effect("issue", "group", "async"),))(
    make_commit("bulk")
)
machine(
    "cp.async.bulk.wait_group limit:u32", chapter=CHAPTER, effects=(Effect("complete", "group", "async"),),
    blocking=True,
)(make_wait("bulk"))  # fmt: skip
machine(
    "cp.async.bulk.wait_group.read limit:u32", chapter=CHAPTER, effects=(Effect("complete", "group_read", "async"),),
    blocking=True,
)(make_wait("bulk", read_only=True))  # fmt: skip


@machine("st.bulk{.weak}{.shared::cta} [a], size:u64, value:u64", chapter=CHAPTER, effects=(Effect("write", "shared"),))
def _st_bulk(decoded, bus):
    """Fill shared memory with zero bytes: the ISA allows no other value."""
    sink = bus.sink(MemoryAccess)

    def handler(lanes, mask, address, size, value):
        for position, (target, num_bytes, fill) in distinct(lanes, mask, address, size, value):
            target = shared_address(target)
            if fill or num_bytes % 8 or target % 8:
                raise MemoryFault(f"st.bulk of {num_bytes} bytes at {target:#x} with {fill}: multiples of 8, value 0")
            lanes.cta.shared.check_range(target, num_bytes)
            lanes.cta.shared.data[target : target + num_bytes] = 0
            if sink:
                which = np.array([position])
                sink(MemoryAccess(lanes, decoded, "write", "shared", "generic", np.array([target]), num_bytes, which))

    return handler
