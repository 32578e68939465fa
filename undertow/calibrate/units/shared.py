"""Loads and stores of shared memory: passes through the port, latencies, and the fence before the async proxy."""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import SUBPARTITIONS, Benchmark, Launch, Measured, Results, between, cycles, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Block

WARPS = 16
IN_FLIGHT = 16  # loads of a warp into registers of their own
LINES = 16
COUNT = 1000
SMEM = 32768
CHAIN = 64
STORES = 4  # before a fence
VECTOR_BYTES, LANES = 16, 32


def loads(count: int, stride: int) -> tuple[str, ...]:
    """128-bit loads `stride` bytes apart, as many in a row as there are registers, and then a use of each."""
    out: list[str] = []
    for start in range(0, count, IN_FLIGHT):
        group = range(start, min(start + IN_FLIGHT, count))
        for index in group:
            targets = ", ".join(f"t{4 * (index - start) + i}" for i in range(4))
            out.append(f"ld.volatile.shared.v4.b32 {{{targets}}}, [ADDRESS+{index * stride}];")
        out += [f"xor.b32 x{index % 8}, x{index % 8}, t{4 * (index - start)};" for index in group]
    return tuple(out)


def store(index: int, stride: int) -> str:
    """A 128-bit store."""
    return f"st.volatile.shared.v4.b32 [ADDRESS+{index * stride}], {{x0, x1, x2, x3}};"


ROW = LANES * VECTOR_BYTES  # of one 128-bit access by all lanes
BLOCKS = {
    "load_uniform": Block(loads(LINES, VECTOR_BYTES)),
    "load_lanes": Block(loads(LINES, ROW), lane_stride=VECTOR_BYTES),
    "store_lanes": Block(tuple(store(i, ROW) for i in range(LINES)), lane_stride=VECTOR_BYTES),
    "store_word": Block(tuple(f"st.volatile.shared.b32 [ADDRESS+{128 * i}], x0;" for i in range(LINES)), lane_stride=4),
    "store_quarter": Block(
        tuple(f"st.volatile.shared.b32 [ADDRESS+{128 * i}], x0;" for i in range(LINES)),
        lane_stride=4,
        every=SUBPARTITIONS,
    ),
}
CHASES = {
    "word_uniform": (0, "ld.volatile.shared.b32 x0, [x0];"),
    "word_lanes": (4, "ld.volatile.shared.b32 x0, [x0];"),
    "vector_uniform": (0, "ld.volatile.shared.v4.b32 {x0, t1, t2, t3}, [x0];"),
    "vector_lanes": (16, "ld.volatile.shared.v4.b32 {x0, t1, t2, t3}, [x0];"),
}
WORK = ("fma.rn.f32 x0, x0, x0, x0;",) * 32  # a chain, which a fence stands before
FENCES = {
    "work": WORK,
    "fence": ("fence.proxy.async.shared::cta;", *WORK),
    "fences": ("fence.proxy.async.shared::cta;",) * 8,
    "fence_device": ("fence.acq_rel.gpu;",) * 8,
    "fence_all_proxies": ("fence.proxy.async;",) * 8,
    "stores": tuple(store(i, ROW) for i in range(STORES)),
    "stores_fence": (*(store(i, ROW) for i in range(STORES)), "fence.proxy.async.shared::cta;"),
    "store_fence": ("st.volatile.shared.b32 [ADDRESS], x0;", "fence.proxy.async.shared::cta;"),
}


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """The same for all architectures."""
    del arch
    return (
        Benchmark(
            "shared-rate",
            "cycles of the port per 128-bit load with one address or many, and per store; one sub-partition's passes",
            tuple(Launch(_probe(f"shared_{name}", WARPS, block), COUNT) for name, block in BLOCKS.items()),
            _rates_of,
        ),
        Benchmark(
            "shared-latency",
            "from a load of shared memory to its use",
            tuple(Launch(_probe(f"chase_{name}", 1, _chase(*of)), COUNT) for name, of in CHASES.items()),
            _latencies_of,
        ),
        Benchmark(
            "fence",
            "what a proxy fence costs with and without stores before it, and a fence of the device",
            tuple(
                Launch(_probe(f"fence_{name}", 1, Block(text, lane_stride=VECTOR_BYTES)), COUNT)
                for name, text in FENCES.items()
            ),
            _fences_of,
        ),
    )


def _probe(name: str, warps: int, block: Block) -> Probe:
    return Probe(name, "loops.loop", 32 * warps, 4 * warps, SMEM, block)


def _chase(stride: int, text: str) -> Block:
    """Every lane follows a pointer to itself."""
    return Block(("mov.b32 x0, ADDRESS;", *(text,) * CHAIN), ("st.volatile.shared.b32 [ADDRESS], ADDRESS;",), stride)


def _rates_of(results: Results) -> list[Measured]:
    each = {name: cycles(results[f"shared_{name}-1"]) / (WARPS * COUNT * LINES) for name in BLOCKS}
    quarter = each["store_quarter"] * SUBPARTITIONS
    how = f"{WARPS} warps"
    return [
        measured("uniform_load_cycles", each["load_uniform"], "cycles", f"{how}, 128-bit, one address a warp", False),
        measured("lane_load_cycles", each["load_lanes"], "cycles", f"{how}, 128-bit, no bank conflict", False),
        measured("lane_store_cycles", each["store_lanes"], "cycles", f"{how}, 128-bit, no bank conflict", False),
        measured(
            "shared_port_bytes_per_cycle",
            np.stack([ROW / each["load_lanes"], ROW / each["store_lanes"]]),
            "bytes/cycle",
            f"{how}, 128-bit loads and stores without bank conflicts",
        ),
        measured(
            "shared_load_registers_per_cycle",
            4 / each["load_uniform"],
            "registers/cycle",
            f"{how}, 128-bit loads with one address a warp",
        ),
        measured("lsu_pass_interval", quarter, "cycles", "32-bit stores by four warps of one sub-partition"),
    ]


def _latencies_of(results: Results) -> list[Measured]:
    each = {name: float(np.median(cycles(results[f"chase_{name}-1"]))) / (COUNT * CHAIN) for name in CHASES}
    found = [
        Measured(f"shared_load_{name}_latency", value, value, value, "cycles", "one warp, a chain of 64", False)
        for name, value in each.items()
    ]
    less = {"word_uniform": 1, "word_lanes": 1, "vector_uniform": 2, "vector_lanes": 4}
    beyond = [each[name] - passes for name, passes in less.items()]
    ordered = [beyond[1], *beyond]
    how = "chains of loads, less their passes; the value is that of 32-bit loads with an address a lane"
    return [*found, between("shared_load_latency", ordered, "cycles", how)]


def _fences_of(results: Results) -> list[Measured]:
    per_block = {name: cycles(results[f"fence_{name}-1"]) / COUNT for name in FENCES}
    fence, in_a_row = per_block["fence"] - per_block["work"], per_block["fences"] / 8
    drained = per_block["store_fence"] - in_a_row - 1
    device = [float(np.median(per_block[name])) / 8 for name in ("fence_device", "fence_all_proxies")]
    return [
        measured(
            "shared_fence_cycles",
            np.stack([fence, fence, in_a_row]),
            "cycles",
            "fence.proxy.async.shared::cta with nothing to wait for, in a chain of fma; the upper end: in a row",
        ),
        between("device_fence_cycles", device, "cycles", "fence.acq_rel.gpu, and fence.proxy.async of all spaces"),
        measured("shared_store_latency", drained, "cycles", "a 32-bit store and a fence, less the fence and a pass"),
        measured("four_stores_and_fence", per_block["stores_fence"], "cycles", "one warp, 128-bit stores", False),
        measured("four_stores", per_block["stores"], "cycles", "the same without the fence", False),
    ]
