"""Non-bulk asynchronous copies: PTX ISA, "cp.async", their groups, and `cp.async.mbarrier.arrive`."""

import numpy as np

from ..async_agents import AsyncOperation
from ..errors import ProtocolError
from ..events import BulkGroup, MemoryAccess
from ..state import Wait
from . import data_movement
from .lane_values import full
from .mbarrier import SPACE, Signals, shared_address
from .table import Effect, machine

CHAPTER = "data-movement-and-conversion-instructions-asynchronous-copy"
_COPY = (Effect("issue", "shared"), Effect("read", "global"), Effect("write", "shared"))


def global_address(value: int) -> int:
    """Check that a generic address is one of global memory, and return it."""
    if value >= data_movement.SHARED_WINDOW:
        raise ProtocolError(f"address {value:#x} of an asynchronous copy is not in global memory")
    return value


@machine(
    "cp.async.<cop>{.<space>}.global{.L2::cache_hint}{.<prefetch>} [d], [a], size:u32{, src_size:u32}{, policy:b64}",
    chapter=CHAPTER, effects=_COPY, cop="ca cg", space=SPACE, prefetch="L2::64B L2::128B L2::256B",
)  # fmt: skip
def _cp_async(decoded, bus):
    """Copy 4, 8 or 16 bytes per lane; bytes past `src_size` are zero."""
    sink = bus.sink(MemoryAccess)

    def publish(operation, kind: str, space: str, address: int, size: int) -> None:
        addresses = np.array([address], np.uint64)
        event = MemoryAccess(operation.lanes, decoded, kind, space, "generic", addresses, size, None, operation)
        sink(event)

    def handler(lanes, mask, dst, src, size, *rest):
        src_size = rest[0] if rest else None
        num_bytes = int(np.asarray(size).flat[0])
        if num_bytes not in (4, 8, 16):
            raise ProtocolError(f"cp.async of {num_bytes} bytes; allowed are 4, 8 and 16")
        targets, sources = full(dst, lanes.n), full(src, lanes.n)
        limits = None if src_size is None else full(src_size, lanes.n)
        cta = lanes.cta
        for position in range(lanes.n) if mask is None else np.flatnonzero(mask).tolist():
            target, source = shared_address(int(targets[position])), int(sources[position])
            valid = num_bytes if limits is None else min(int(limits[position]), num_bytes)

            def run(operation, target=target, source=source, valid=valid):
                data = np.zeros((num_bytes, 1), np.uint8)
                if valid:
                    region = cta.machine.global_memory.region(global_address(source), valid)
                    data[:valid, 0] = region.data[source - region.base :][:valid]
                cta.shared.rows(np.array([target], np.uint64), num_bytes)
                cta.shared.data[target : target + num_bytes] = data[:, 0]
                cta.progress += 1
                if sink:
                    if valid:
                        publish(operation, "read", "global", source, valid)
                    publish(operation, "write", "shared", target, num_bytes)

            operation = AsyncOperation("cp_async", decoded, lanes, int(lanes.index[position]), run)
            cta.engines.join_group("cp_async", operation)
            cta.engines.issue(operation)

    return handler


def active_threads(lanes, mask) -> list[int]:
    """CTA lane numbers of the active lanes."""
    return (lanes.index if mask is None else lanes.index[mask]).tolist()


def make_commit(kind: str):
    """Build `make` of a commit_group instruction for groups of one kind."""

    def make(decoded, bus):
        sink = bus.sink(BulkGroup)

        def handler(lanes, mask):
            for thread in active_threads(lanes, mask):
                group = lanes.cta.engines.commit_group(kind, thread)
                if sink:
                    sink(BulkGroup(lanes, decoded, "commit", thread, tuple(group), kind=kind))

        return handler

    return make


def make_wait(kind: str, read_only: bool = False, everything: bool = False):
    """Build `make` of a wait_group instruction: at most `limit` groups of each thread may stay open."""

    def make(decoded, bus):
        sink = bus.sink(BulkGroup)
        wait_kind = "bulk_group" if kind == "bulk" else "cp_async_group"

        def handler(lanes, mask, limit=None):
            engines = lanes.cta.engines
            allowed = 0 if limit is None else int(np.asarray(limit).flat[0])
            threads = active_threads(lanes, mask)
            if everything:
                for thread in threads:
                    if (kind, thread) in engines.open_groups:
                        group = engines.commit_group(kind, thread)
                        if sink:
                            sink(BulkGroup(lanes, decoded, "commit", thread, tuple(group), kind=kind))
            busy = [t for t in threads if engines.open_count(kind, t) > allowed]
            if busy:
                detail = f"{engines.open_count(kind, busy[0])} groups of thread {busy[0]} open, {allowed} allowed"

                def ready() -> bool:
                    return all(engines.open_count(kind, t) <= allowed for t in busy)

                return [Wait(wait_kind, allowed, detail, ready) for _ in lanes.warps]
            if sink:
                for thread in threads:
                    sink(BulkGroup(lanes, decoded, "wait", thread, (allowed,), read_only, kind))
            return None

        return handler

    return make


machine("cp.async.commit_group", chapter=CHAPTER, effects=(Effect("issue", "group"),))(make_commit("cp_async"))
machine(
    "cp.async.wait_group limit:u32", chapter=CHAPTER, effects=(Effect("complete", "group"),), blocking=True
)(make_wait("cp_async"))  # fmt: skip
machine(
    "cp.async.wait_all", chapter=CHAPTER, effects=(Effect("complete", "group"),), blocking=True
)(make_wait("cp_async", everything=True))  # fmt: skip


@machine(
    "cp.async.mbarrier.arrive{.noinc}{.<space>}.b64 [a]", chapter=CHAPTER,
    effects=(Effect("issue", "mbarrier"), Effect("release", "mbarrier")), space=SPACE,
)  # fmt: skip
def _cp_async_arrive(decoded, bus):
    """Arrive when all earlier cp.async of the thread are done; without .noinc the pending count first grows by one."""
    signal = Signals(decoded, bus)
    noinc = decoded.mods["noinc"]

    def handler(lanes, mask, address):
        cta, addresses = lanes.cta, full(address, lanes.n)
        for position in range(lanes.n) if mask is None else np.flatnonzero(mask).tolist():
            where, thread = shared_address(int(addresses[position])), int(lanes.index[position])
            cell = cta.shared.mbarrier(where)
            if not noinc:
                cell.pending += 1
            engines = cta.engines
            earlier = [*engines.open_groups.get(("cp_async", thread), [])]
            for group in engines.groups.get(("cp_async", thread), []):
                earlier.extend(group)

            def run(operation, where=where):
                signal(lanes, "arrive", (cta, where), 1, operation)

            engines.issue(AsyncOperation("cp_async", decoded, lanes, thread, run, tuple(earlier)))

    return handler
