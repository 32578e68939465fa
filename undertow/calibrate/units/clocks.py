"""The clock of the SMs while all of them work, from their cycle counters and the chip's wall clock."""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import ALL, Benchmark, Launch, Measured, Results, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Block, Mma
from undertow.calibrate.units.arithmetic import INSTRUCTIONS, lines
from undertow.calibrate.units.machines import MACHINES

GROUP = 32
SECONDS_OF_CYCLES = 400_000_000  # about 0.2 s
WARPS = 16
LINES = 64


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """Of an architecture."""
    m = MACHINES[arch]
    mma = Mma(128, "shared", GROUP, m.issuers)
    tensor = Probe("clock_mma", f"{m.module}.interval", m.threads * m.issuers, 32, m.smem, mma)
    of_mma = SECONDS_OF_CYCLES // (GROUP * 64 * m.issuers)
    launches = [Launch(tensor, of_mma, ALL)]
    for name, cycles_each in (("mufu", 8), ("fma", 1)):
        block = Block(lines(INSTRUCTIONS[name], LINES))
        probe = Probe(f"clock_{name}", "loops.loop", 32 * WARPS, 4 * WARPS, settings=block)
        launches.append(Launch(probe, SECONDS_OF_CYCLES // (LINES * cycles_each * WARPS // 4), ALL))
    return (
        Benchmark(
            "clock",
            "GHz of the SMs while all of them run matrix instructions, ex2 or FMA for a fifth of a second",
            tuple(launches),
            _evaluate,
        ),
    )


def _evaluate(results: Results) -> list[Measured]:
    found = []
    for name in ("mma", "mufu", "fma"):
        first = results[f"clock_{name}-all"][..., :4]
        each = (first[..., 2] - first[..., 0]) / (first[..., 3] - first[..., 1])
        found.append(
            measured(f"sm_clock_{name}", np.median(each, -1), "GHz", "all SMs at work, random operands", False)
        )
    return found
