"""The constants that the engine reads: what a chip file has to say about an architecture, and nothing else.

`cycles` are SM cycles. "Sub-partition" is one of the four quarters of an SM, each of which issues one warp instruction
per cycle. An interval is the time between two warp instructions that one unit of a sub-partition takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SM90, SM100 = "sm_90a", "sm_100a"
BOTH = (SM90, SM100)


class ConstantError(ValueError):
    """A constant that is missing, unknown or out of bounds; the message names it and what is allowed."""


@dataclass(frozen=True)
class ConstantSpec:
    """What the engine means by a constant. minimum: a smaller number means nothing."""

    what: str
    unit: str
    archs: tuple[str, ...] = BOTH
    minimum: float = 0.0


_INTERVAL, _LATENCY = ("cycles", BOTH, 0.25), ("cycles", BOTH)


def _spec(what: str, about: tuple = _LATENCY) -> ConstantSpec:
    return ConstantSpec(what, *about)


_ISSUE = {
    "fma_interval": _spec("fp32 add, multiply and fused multiply-add", _INTERVAL),
    "packed_fma_interval": _spec("the same on two packed fp32 values (f32x2)", ("cycles", (SM100,), 0.25)),
    "alu_interval": _spec("logic, shift, integer add, compare, select, minimum", _INTERVAL),
    "integer_multiply_interval": _spec("integer multiply and multiply-add", _INTERVAL),
    "mufu_interval": _spec("ex2, lg2, rcp, rsqrt and conversions between integer and float", _INTERVAL),
    "convert_interval": _spec("conversion of two fp32 to packed 16-bit values", _INTERVAL),
    "convert_shares_alu": _spec("1: packed conversions take the ALU pipe, 0: one of their own", ("switch", BOTH)),
    "arithmetic_latency": _spec("from an instruction of the FMA or ALU pipe to one that uses its result"),
    "uniform_latency": _spec("from an integer instruction on values that all lanes share to one that uses its result"),
    "predicate_latency": _spec("from a compare to a branch, select or guard that uses the predicate"),
    "mufu_latency": _spec("from ex2 to one that uses its result"),
    "shuffle_latency": _spec("from shfl to one that uses its result"),
    "collective_latency": _spec("from elect, vote or match to one that uses its result"),
    "special_register_latency": _spec("from reading a special register to one that uses it"),
    "taken_branch_cycles": _spec("a warp issues nothing for so long after a branch that is taken"),
    "mufu_interval_beside_mma": _spec("mufu_interval while the tensor cores work", _INTERVAL),
    "fma_interval_beside_mma": _spec("fma_interval while the tensor cores work", _INTERVAL),
    "mma_delay_per_fma": _spec("what a warp's fp32 instruction adds to the MMA that runs beside it"),
    "oldest_first_issue": _spec(
        "which warp issues when the last one cannot; 1: the oldest ready one, 0: the youngest", ("switch", BOTH)
    ),
}

_SHARED = {
    "shared_port_bytes_per_cycle": _spec("width of the shared-memory port of an SM", ("bytes/cycle", BOTH, 1.0)),
    "mma_shares_port": _spec("1: MMA operands come through the same port as loads and stores, 0: through their own",
                             ("switch", BOTH)),
    "mma_grants_per_other": _spec("grants in a row to MMA operands while others want the port",
                                  ("grants", BOTH, 0.25)),
    "store_passes_per_copied_pass": _spec("passes of stores that have to wait for one that a TMA load writes",
                                          ("passes", BOTH)),
    "bulk_read_share_beside_mma": _spec("share that bulk copies which read get of the cycles that MMA operands leave",
                                        ("share", BOTH, 0.01)),
    "load_share_beside_mma": _spec("largest share of the port for loads while an MMA fetches operands",
                                   ("share", BOTH, 0.01)),
    "shared_load_registers_per_cycle": _spec("registers of a warp's load that return to an SM per cycle",
                                             ("registers/cycle", BOTH, 0.25)),
    "shared_load_latency": _spec("from the last pass of a load through the port to one that uses its result"),
    "shared_store_latency": _spec("from the last pass of a store through the port until a fence sees it done"),
    "lsu_pass_interval": _spec("passes of one sub-partition's loads and stores", _INTERVAL),
    "lsu_queue_depth": _spec("loads and stores of a sub-partition that wait for the port", ("instructions", BOTH, 1.0)),
    "shared_fence_cycles": _spec("fence.proxy.async of shared memory, once the warp's stores are done"),
    "device_fence_cycles": _spec("a fence that reaches beyond the CTA"),
    "mma_delay_per_store_pass": _spec("what a store's pass adds to an MMA with A in registers", ("cycles", (SM90,))),
}  # fmt: skip

_TENSOR = {
    "mma_multiply_adds_per_cycle": _spec("16-bit multiply-adds of an SM", ("per cycle", BOTH, 1.0)),
    "mma_operands_ahead": _spec("MMAs whose operands are fetched before they begin", ("instructions", BOTH)),
    "wgmma_in_flight": _spec("MMAs of an SM that are not done when a warpgroup's first warp stands still",
                             ("instructions", (SM90,), 1.0)),
    "wgmma_issue_interval": _spec("a warp's wgmma.mma_async to its next instruction", ("cycles", (SM90,))),
    "wgmma_fill_shared": _spec("from issue to the first product, A in shared memory", ("cycles", (SM90,))),
    "wgmma_fill_register": _spec("from issue to the first product, A in registers", ("cycles", (SM90,))),
    "wgmma_tail": _spec("from the last product until wait_group lets go", ("cycles", (SM90,))),
    "tcgen05_in_flight": _spec("MMAs of an SM that are not done when the issuing warp stands still",
                               ("instructions", (SM100,), 1.0)),
    "tcgen05_issue_interval": _spec("a tcgen05.mma to the warp's next instruction", ("cycles", (SM100,))),
    "tcgen05_fill_shared": _spec("from issue to the first product, A in shared memory", ("cycles", (SM100,))),
    "tcgen05_fill_tmem": _spec("from issue to the first product, A in tensor memory", ("cycles", (SM100,))),
    "tcgen05_tail": _spec("from the last product until the commit's arrival is visible", ("cycles", (SM100,))),
    "tmem_load_latency": _spec("tcgen05.ld, beyond the passes of its registers", ("cycles", (SM100,))),
    "tmem_load_registers_per_cycle": _spec("registers of a warp's tcgen05.ld per cycle of a sub-partition",
                                           ("registers/cycle", (SM100,), 0.05)),
    "tmem_load_slowdown_beside_mma": _spec("factor on these passes while an MMA runs", ("factor", (SM100,), 1.0)),
    "tmem_store_latency": _spec("tcgen05.st, beyond the passes of its registers", ("cycles", (SM100,))),
    "tmem_store_registers_per_cycle": _spec("registers of a warp's tcgen05.st per cycle of a sub-partition",
                                            ("registers/cycle", (SM100,), 0.05)),
}  # fmt: skip

_SYNCHRONISATION = {
    "mbarrier_arrive_cycles": _spec("a warp's mbarrier.arrive or expect_tx to its next instruction"),
    "mbarrier_arrive_latency": _spec("from an arrive to the phase it completes"),
    "mbarrier_wake_latency": _spec("from a phase to a warp that waits for it"),
    "mbarrier_ready_wait": _spec("try_wait and its branch where the phase was complete before"),
    "mbarrier_unit_interval": _spec("mbarrier operations of an SM"),
    "named_barrier_latency": _spec("from the last arrival to the first warp that goes on"),
    "named_barrier_release_interval": _spec("between the warps that a named barrier lets go"),
    "named_barrier_arrive_cycles": _spec("a warp's bar.arrive to its next instruction"),
    "warp_sync_cycles": _spec("bar.warp.sync of a warp that is together"),
    "register_reallocation_cycles": _spec("setmaxnreg"),
    "wake_jitter": _spec("a warp that an mbarrier wakes goes on earlier or later by up to half of this, evenly"),
    "stall_probability": _spec("that an instruction waits for no modelled reason", ("probability", BOTH)),
    "stall_cycles": _spec("how long it then waits"),
    "warp_start_spread": _spec("warps of a CTA start within this time"),
}

_COPIES = {
    "tma_issue_cycles": _spec("a bulk or tensor copy to the issuing warp's next instruction"),
    "tma_load_latency": _spec("from issue to the first bytes in shared memory"),
    "tma_load_burst_bytes_per_cycle": _spec("rate of a single load after its latency", ("bytes/cycle", BOTH, 1.0)),
    "tma_load_bytes_per_cycle": _spec("rate of an SM with many loads, all SMs busy", ("bytes/cycle", BOTH, 1.0)),
    "bulk_reduce_latency": _spec("from issue to the first bytes read from shared memory"),
    "bulk_reduce_bytes_per_cycle": _spec("cp.reduce.async.bulk of an SM, all SMs busy", ("bytes/cycle", BOTH, 0.5)),
    "bulk_store_latency": _spec("from issue to the first bytes read from shared memory"),
    "bulk_store_bytes_per_cycle": _spec("bulk stores of an SM, all SMs busy", ("bytes/cycle", BOTH, 0.5)),
    "global_load_latency": _spec("from ld.global to one that uses its result, all SMs busy"),
    "global_bytes_per_cycle": _spec("rate of an SM's own global loads and stores", ("bytes/cycle", BOTH, 1.0)),
}

CONSTANTS: dict[str, ConstantSpec] = _ISSUE | _SHARED | _TENSOR | _SYNCHRONISATION | _COPIES
"""Name -> what it is. A chip file of an architecture has all constants of that architecture."""


def constants_of(arch: str) -> dict[str, ConstantSpec]:
    """The constants that the engine reads for kernels of `arch`.

    Raises: ConstantError for an architecture that it does not know.
    """
    if arch not in BOTH:
        raise ConstantError(f"arch={arch!r}: allowed are {', '.join(BOTH)}")
    return {name: spec for name, spec in CONSTANTS.items() if arch in spec.archs}


def checked(constants: Mapping[str, float], arch: str) -> dict[str, float]:
    """The constants of `arch` in the order of `CONSTANTS`; others are left out.

    Raises: ConstantError for one that is missing, or smaller than what can mean something.
    """
    wanted = constants_of(arch)
    missing = [name for name in wanted if name not in constants]
    if missing:
        raise ConstantError(f"constants: {', '.join(missing)} missing for {arch}")
    for name, spec in wanted.items():
        if not constants[name] >= spec.minimum:
            raise ConstantError(f"constant {name}={constants[name]}: must be at least {spec.minimum} {spec.unit}")
    return {name: float(constants[name]) for name in wanted}
