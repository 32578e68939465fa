"""Kernels of a few lines, recorded and replayed on a machine of round numbers in which nothing is random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.emulator import kernels
from undertow import emulator as emu
from undertow.cases import Kernel
from undertow.plan.description import Pointer
from undertow.timing.constants import SM90, SM100, constants_of
from undertow.timing.run import Run, run
from undertow.timing.trace import Trace, record
from undertow.timing.uops import Kind, Unit

ROUND = {
    "fma_interval": 1, "packed_fma_interval": 2, "alu_interval": 2, "integer_multiply_interval": 2, "mufu_interval": 8,
    "convert_interval": 2, "convert_shares_alu": 1, "arithmetic_latency": 4, "uniform_latency": 6,
    "predicate_latency": 5, "mufu_latency": 18, "shuffle_latency": 24, "collective_latency": 7,
    "special_register_latency": 20, "taken_branch_cycles": 10, "mufu_interval_beside_mma": 11,
    "fma_interval_beside_mma": 2, "mma_delay_per_fma": 0, "oldest_first_issue": 0, "shared_port_bytes_per_cycle": 128,
    "mma_shares_port": 1, "mma_grants_per_other": 3, "load_share_beside_mma": 0.25,
    "store_passes_per_copied_pass": 0.5, "bulk_read_share_beside_mma": 0.5,
    "shared_load_registers_per_cycle": 2, "shared_load_latency": 24, "shared_store_latency": 26, "lsu_pass_interval": 3,
    "lsu_queue_depth": 6, "shared_fence_cycles": 4, "device_fence_cycles": 170, "mma_delay_per_store_pass": 0,
    "mma_multiply_adds_per_cycle": 2048, "mma_operands_ahead": 1, "wgmma_in_flight": 2, "wgmma_issue_interval": 16,
    "wgmma_fill_shared": 31, "wgmma_fill_register": 16, "wgmma_tail": 32, "tcgen05_in_flight": 16,
    "tcgen05_issue_interval": 12, "tcgen05_fill_shared": 40, "tcgen05_fill_tmem": 8, "tcgen05_tail": 66,
    "tmem_load_latency": 60, "tmem_load_registers_per_cycle": 2, "tmem_load_slowdown_beside_mma": 1,
    "tmem_store_latency": 12, "tmem_store_registers_per_cycle": 2, "mbarrier_arrive_cycles": 16,
    "mbarrier_arrive_latency": 33, "mbarrier_wake_latency": 30, "mbarrier_ready_wait": 42, "mbarrier_unit_interval": 2,
    "named_barrier_latency": 19, "named_barrier_release_interval": 1, "named_barrier_arrive_cycles": 15,
    "warp_sync_cycles": 1, "register_reallocation_cycles": 30, "wake_jitter": 0, "stall_probability": 0,
    "stall_cycles": 25, "warp_start_spread": 0, "tma_issue_cycles": 40, "tma_load_latency": 400,
    "tma_load_burst_bytes_per_cycle": 128, "tma_load_bytes_per_cycle": 64, "bulk_reduce_latency": 90,
    "bulk_reduce_bytes_per_cycle": 16, "bulk_store_latency": 80, "bulk_store_bytes_per_cycle": 32,
    "global_load_latency": 600, "global_bytes_per_cycle": 32,
}  # fmt: skip


def values(arch: str, **changes: float) -> dict[str, float]:
    """The round numbers of an architecture, with changes."""
    return {name: float((ROUND | changes)[name]) for name in constants_of(arch)}


@dataclass(frozen=True)
class Replayed:
    """A kernel's recording and one run of it."""

    trace: Trace
    run: Run

    def times(self, what: Kind | Unit, warp: int = 0) -> list[float]:
        """When a warp issued its instructions of a kind, or its arithmetic ones of a unit."""
        part = self.trace.stream(warp)
        kind, unit = self.trace.uops[self.trace.uop[part], :2].T
        mine = kind == what if isinstance(what, Kind) else (kind == Kind.ARITHMETIC) & (unit == what)
        return self.run.issued[part][mine].tolist()


def kernel(body: str, *arrays: np.ndarray, arch: str = SM100, **launch) -> Kernel:
    """`body` as a kernel with pointers to arrays in %p0, %p1, ...; %t is the thread number.

    Keywords: declarations, module (text), and of Launch: block, dynamic_smem.
    """
    texts = {name: launch.pop(name) for name in ("declarations", "module") if name in launch}
    text = kernels.kernel(body, len(arrays), **texts).replace("sm_100a", arch)
    params = [Pointer(array) for array in arrays]
    return Kernel("k", text, emu.Launch(params=params, **{"grid": (1,), "block": (32,), **launch}))


def replayed(given: Kernel, arch: str = SM100, seed: int = 0, **changes: float) -> Replayed:
    """Record a kernel and run it once."""
    constants = values(arch, **changes)
    trace = record(given, constants)
    return Replayed(trace, run(trace, constants, seed))


def repeated(text: str, count: int) -> str:
    """A line `count` times, with {i} its number."""
    return "\n".join(text.replace("{i}", str(i)) for i in range(count))


__all__ = ["ROUND", "SM90", "SM100", "Kind", "Replayed", "Unit", "kernel", "repeated", "replayed", "values"]
