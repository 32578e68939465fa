"""What a barrier costs a softmax-like phase: replayed, beside what an H200 was measured to take.

    python tools/timeline_phases.py

Eight warps go through phases of 1, 2 or 6 batches of 16 FFMA, 16 ex2, 8 conversions, 2 stores and 2 loads of 128 bits;
beside them nothing, or two warpgroups of m64n128k16 wgmma with A in shared memory (SS) or in registers (RS). With a
barrier of the eight warps after each phase, they all want the port of shared memory at once. The replay is asked how
long a phase takes with and without the barrier, at several latencies of the barrier itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from undertow.cases import Kernel
from undertow.plan.description import Launch, Pointer
from undertow.timing.chip import read_chip
from undertow.timing.run import run
from undertow.timing.trace import Trace, record

MEASURED = {  # what runs beside, batches: cycles of a phase without and with a barrier; CUDA on one H200, medians of 10
    ("", 1): (464, 605), ("", 2): (759, 873), ("", 6): (1814, 1947),
    ("SS", 1): (646, 797), ("SS", 2): (988, 1332), ("SS", 6): (2622, 3015),
    ("RS", 1): (632, 782), ("RS", 2): (1009, 1162), ("RS", 6): (2537, 2694),
}  # fmt: skip
LATENCIES = (16, 45, 65, 120)
WARPS, SEEDS = 8, 3
ACCUMULATORS = ", ".join(f"%f{100 + i}" for i in range(64))


def batch() -> str:
    """The work of one batch, as PTX."""
    lines = [f"fma.rn.f32 %f{i}, %f{i}, %f90, %f91;\nex2.approx.ftz.f32 %f{20 + i}, %f{i};" for i in range(16)]
    lines += [f"cvt.rn.bf16x2.f32 %r{20 + i}, %f{20 + 2 * i}, %f{21 + 2 * i};" for i in range(8)]
    for i in range(2):
        first = 20 + 4 * i
        values = ", ".join(f"%r{first + j}" for j in range(4))
        lines.append(f"st.shared.v4.b32 [%r4+{i * 4096}], {{{values}}};")
    for i in range(2):
        first = 40 + 4 * i
        values = ", ".join(f"%r{first + j}" for j in range(4))
        lines.append(f"ld.shared.v4.b32 {{{values}}}, [%r2+{i * 16}];")
    lines += [f"mov.b32 %f{60 + i}, %r{40 + i};\nadd.f32 %f{i}, %f{i}, %f{60 + i};" for i in range(8)]
    return "\n".join(lines) + "\n"


def matrices(kind: str, count: int) -> str:
    """MMAs of a warpgroup, two groups of eight at a time; kind: SS or RS."""
    a, flags = ("%d0", "1, 1, 0, 0") if kind == "SS" else ("{%r60, %r61, %r62, %r63}", "1, 1, 0")
    shape = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    lines = ["wgmma.fence.sync.aligned;"]
    for i in range(count):
        lines.append(f"{shape} {{{ACCUMULATORS}}}, {a}, %d1, %p1, {flags};")
        if i % 8 == 7:
            lines.append("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;")
    lines.append("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;")
    return "\n".join([*lines, *(f"st.shared.f32 [%r4+16384], %f{100 + i};" for i in range(64))]) + "\n"


def kernel(beside: str, batches: int, phases: int, barrier: bool, mmas: int) -> Kernel:
    """The whole kernel: warps 0 to 7 work, two more warpgroups multiply."""
    threads = 512 if beside else 256
    work = (batch() * batches + "barrier.sync.aligned 1, 256;\n" * barrier) * phases
    zeros = "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(200))
    zeros += "".join(f"mov.b32 %r{i}, 0;\n" for i in range(20, 70))
    text = f""".version 8.3
.target sm_90a
.address_size 64
.visible .entry phases(.param .u64 unused) .maxntid {threads}, 1, 1
{{
.reg .pred %p<4>; .reg .b32 %r<100>; .reg .f32 %f<200>; .reg .b64 %d<8>;
.shared .align 1024 .b8 buf[49152];
mov.u32 %r1, %tid.x; mov.u32 %r2, buf; and.b32 %r3, %r1, 255; shl.b32 %r3, %r3, 4; add.u32 %r4, %r2, %r3;
st.shared.v4.b32 [%r4], {{%r3, %r3, %r3, %r3}};
{zeros}shr.u32 %r5, %r2, 4; cvt.u64.u32 %d0, %r5; or.b64 %d0, %d0, 4611686293305294848; add.u64 %d1, %d0, 1024;
setp.ne.u32 %p1, %r1, 9999;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ge.u32 %p2, %r1, 256; @%p2 bra MATRICES;
{work}bra END;
MATRICES:
{matrices(beside, mmas) if beside else ""}END:
ret;
}}
"""
    return Kernel("phases", text, Launch((1, 1, 1), (threads, 1, 1), (Pointer(np.zeros(1, np.int32)),)))


def cycles_of_a_phase(trace: Trace, constants: Mapping[str, float], phases: int) -> float:
    """Mean over the eight warps, from a quarter to 85% of what each issues."""
    found = []
    for seed in range(SEEDS):
        issued = run(trace, constants, seed).issued
        for warp in range(WARPS):
            stream = issued[trace.stream(warp)]
            low, high = int(len(stream) * 0.25), int(len(stream) * 0.85)
            found.append((stream[high] - stream[low]) * len(stream) / (high - low) / phases)
    return float(np.mean(found))


def main() -> None:
    point = read_chip("h200").point()
    print("| beside | batches | without, measured | replayed | cost, measured | replayed at", end=" ")
    print(" | ".join(map(str, LATENCIES)), "|")
    print("| --- " * (5 + len(LATENCIES)) + "|")
    missed = []
    for (beside, batches), (without, with_) in MEASURED.items():
        phases = 30 if batches < 6 else 12
        mmas = int(phases * with_ * 1.3 / 128 / 8) * 8 + 32  # they outlast the phases
        free, held = (record(kernel(beside, batches, phases, barrier, mmas), point) for barrier in (False, True))
        base = cycles_of_a_phase(free, point, phases)
        costs = [
            cycles_of_a_phase(held, {**point, "named_barrier_latency": latency}, phases) - base for latency in LATENCIES
        ]
        missed.append([cost - (with_ - without) for cost in costs])
        told = " | ".join(f"{cost:.0f}" for cost in costs)
        print(
            f"| {beside or 'nothing'} | {batches} | {without} | {base:.0f} | {with_ - without} | {told} |", flush=True
        )
    means = ", ".join(f"{latency}: {mean:+.0f}" for latency, mean in zip(LATENCIES, np.mean(missed, axis=0)))
    print(f"Replayed less measured cost, mean over the rows: {means}")


if __name__ == "__main__":
    main()
