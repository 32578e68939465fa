"""Loads and stores of tensor memory, which only sm_100a has."""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import Benchmark, Launch, Measured, Results, between, cycles, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Beside, Block, Mma
from undertow.calibrate.units.beside import COUNT as GROUPS
from undertow.calibrate.units.beside import GROUP, WARPS, WINDOW, rates
from undertow.calibrate.units.machines import MACHINES

COUNT = 500
WIDTHS = (8, 16, 32)  # registers of one instruction
WARPGROUP = 4  # warps, one for every quarter of the lanes
IN_A_ROW = 4  # instructions before a wait, where a rate is measured
LOAD_WAIT, STORE_WAIT = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"


def registers(width: int, first: int = 0) -> str:
    """So many scratch registers."""
    return "{" + ", ".join(f"t{first + i}" for i in range(width)) + "}"


def load(width: int, first: int = 0) -> str:
    """A load of the warp's 32 lanes."""
    return f"tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {registers(width, first)}, [ADDRESS];"


def store(width: int) -> str:
    """A store to them, of what the first registers happen to hold."""
    values = "{" + ", ".join(f"x{i % 8}" for i in range(width)) + "}"
    return f"tcgen05.st.sync.aligned.32x32b.x{width}.b32 [ADDRESS], {values};"


def _use(width: int, first: int = 0) -> str:
    return f"xor.b32 x0, x0, t{first + width - 1};"


BLOCKS = {
    **{f"load_x{w}": (load(w), LOAD_WAIT, _use(w)) for w in WIDTHS},
    **{f"store_x{w}": (store(w), STORE_WAIT) for w in WIDTHS},
    "loads": (*(load(16, 16 * i) for i in range(IN_A_ROW)), LOAD_WAIT, *(_use(16, 16 * i) for i in range(IN_A_ROW))),
    "stores": (*(store(16),) * IN_A_ROW, STORE_WAIT),
}


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """None where there is no tensor memory."""
    if arch != "sm_100a":
        return ()
    m = MACHINES[arch]
    alone = tuple(
        Launch(Probe(f"tmem_{name}", "tcgen05.loop", m.threads, 16, m.smem, Block(text, space="tensor")), COUNT)
        for name, text in BLOCKS.items()
    )
    settings = Beside(Mma(128, "shared", GROUP), Block(BLOCKS["loads"], space="tensor"), WARPS, WINDOW)
    slots = GROUPS + 1 + 3 * WARPS
    probe = Probe("tmem_loads_beside", "tcgen05.beside", m.threads + 32 * WARPS, slots, m.smem, settings)
    return (
        Benchmark(
            "tensor-memory",
            "tcgen05.ld and tcgen05.st: from issue until the wait is over, registers per cycle, loads beside MMAs",
            (*alone, Launch(probe, GROUPS)),
            _evaluate,
        ),
    )


def _evaluate(results: Results) -> list[Measured]:
    per_block = {name: cycles(results[f"tmem_{name}-1"]) / COUNT for name in BLOCKS}
    found = [
        measured(f"tmem_{name}", each, "cycles", "one warp of every sub-partition, awaited each time", False)
        for name, each in per_block.items()
        if "_x" in name
    ]
    for kind in ("load", "store"):
        narrow, middle, wide = (float(np.median(per_block[f"{kind}_x{w}"])) for w in WIDTHS)
        per_register = (wide - narrow) / (WIDTHS[-1] - WIDTHS[0])
        each = [w - per_register * width for w, width in zip((narrow, middle, wide), WIDTHS)]
        how = f"x{', x'.join(map(str, WIDTHS))}, less the slope over their registers"
        found.append(between(f"tmem_{kind}_latency", [max(0.0, x) for x in each], "cycles", how))
        rate = IN_A_ROW * 16 / per_block[f"{kind}s"]
        how = f"{IN_A_ROW} of x16 in a row, and a wait; a lower bound"
        found.append(measured(f"tmem_{kind}_registers_per_cycle", rate, "registers/cycle", how))
    both = rates(MACHINES["sm_100a"], results["tmem_loads_beside-1"], IN_A_ROW * 16)
    alone = IN_A_ROW * 16 * WARPGROUP / np.median(per_block["loads"])
    slowdown = max(1.0, float(alone / np.median(both.per_cycle)))
    how = "the same loads by eight warps, beside n = 128, against four warps alone"
    return [*found, Measured("tmem_load_slowdown_beside_mma", slowdown, 1.0, max(slowdown, 2.0), "factor", how)]
