"""Loads of global memory that find their data in L2, while all SMs load."""

from __future__ import annotations

from undertow.calibrate.benchmark import ALL, Benchmark, Launch, Measured, Results, cycles, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Block

COUNT = 100
CHAIN, CHASING = 16, 4  # loads in a block, warps of an SM
LINES, WARPS = 8, 16
VECTOR_BYTES, ROW = 16, 512  # of a 128-bit load by a lane, by a warp
PART = WARPS * LINES * ROW  # bytes of a CTA
# volatile: not from L1
CHASE = Block(
    ("mov.b64 w0, ADDRESS;", *("ld.volatile.global.b64 w0, [w0];",) * CHAIN, "cvt.u32.u64 x0, w0;"),
    ("st.global.b64 [ADDRESS], ADDRESS;",),
    lane_stride=8,
    warp_stride=LINES * ROW,
    offset=PART,
    space="global",
)


def load(index: int) -> str:
    """A 128-bit load by all lanes."""
    first = 4 * index
    targets = ", ".join(f"t{first + i}" for i in range(4))
    return f"ld.volatile.global.v4.b32 {{{targets}}}, [ADDRESS+{index * ROW}];"


STREAM = Block(
    (*(load(i) for i in range(LINES)), *(f"xor.b32 x{i}, x{i}, t{4 * i};" for i in range(LINES))),
    lane_stride=VECTOR_BYTES,
    warp_stride=LINES * ROW,
    offset=PART,
    space="global",
)


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """The same for all architectures."""
    del arch
    chase = Probe("global_chase", "loops.loop", 32 * CHASING, 4 * CHASING, settings=CHASE)
    stream = Probe("global_stream", "loops.loop", 32 * WARPS, 4 * WARPS, settings=STREAM)
    return (
        Benchmark(
            "global-memory",
            "loads of global memory from L2 by all SMs: from one to its use, and bytes per cycle of an SM",
            (Launch(chase, COUNT, ALL, PART // 4), Launch(stream, COUNT, ALL, PART // 4)),
            _evaluate,
        ),
    )


def _evaluate(results: Results) -> list[Measured]:
    latency = cycles(results["global_chase-all"]) / (COUNT * CHAIN)
    rate = WARPS * COUNT * LINES * ROW / cycles(results["global_stream-all"])
    return [
        measured("global_load_latency", latency, "cycles", f"chains of loads by {CHASING} warps of every SM, from L2"),
        measured("global_bytes_per_cycle", rate, "bytes/cycle", f"128-bit loads by {WARPS} warps of every SM, from L2"),
    ]
