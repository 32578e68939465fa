"""What bulk copies take of shared memory's port from loads and stores, and from operands of the tensor cores.

TMA loads write shared memory, bulk reductions read it; both go through the port that warps and tensor cores use.
"""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import Benchmark, Launch, Measured, Results, between, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Beside, Block, Copy, Mma
from undertow.calibrate.units.beside import (
    COLUMNS,
    COUNT,
    GROUP,
    LOADS,
    PASSES,
    SMEM_OF_BLOCKS,
    STORES,
    WARPS,
    WINDOW,
    interval_of,
    memory,
    per_cycle_of,
)
from undertow.calibrate.units.copies import FRONT, TILE
from undertow.calibrate.units.machines import MACHINES, Machine, operand_passes

DEPTH = 8  # copies in flight: as fast as one SM can
PORT = 128  # bytes per pass
KINDS = ("load", "reduce")
BESIDE = ((0, "none"), (0, "store"), (0, "load_lanes"), (128, "none"), (64, "none"), (128, "store"))


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """Of an architecture."""
    m = MACHINES[arch]
    return (
        Benchmark(
            "copy-port",
            "TMA loads and bulk reductions beside loads, stores and operand reads: what each takes of the port",
            tuple(_launch(m, kind, *of) for kind in KINDS for of in BESIDE),
            lambda results: _shares_of(m, results),
        ),
    )


def _name(kind: str, n: int, block: str) -> str:
    return f"copies_{kind}_n{n}_{block}"


def _launch(m: Machine, kind: str, n: int, block: str) -> Launch:
    mma = Mma(n or 64, "shared", GROUP if n else 0, m.issuers)
    text = Block(()) if block == "none" else memory(m.blocks_at)[block]
    copies = Copy(kind, TILE, DEPTH)
    threads = m.threads * m.issuers + 32 * (WARPS + 1)
    slots = m.issuers * (COUNT + 1) + 3 * (WARPS + 1)
    at = m.blocks_at + SMEM_OF_BLOCKS
    settings = Beside(mma, text, WARPS, WINDOW, copies, at)
    smem = at + FRONT + DEPTH * TILE
    probe = Probe(_name(kind, n, block), f"{m.module}.beside", threads, slots, smem, settings)
    return Launch(probe, COUNT, floats=copies.tiles * TILE // 4)


def passes_of(results: np.ndarray) -> np.ndarray:
    """Of the copies per cycle: the last three results."""
    begin, end, copies = results[..., -3], results[..., -2], results[..., -1]
    return copies * TILE / PORT / (end - begin)


def _shares_of(m: Machine, results: Results) -> list[Measured]:
    found: list[Measured] = []
    taken: list[float] = []
    shares: list[float] = []
    for kind in KINDS:
        for n, block in BESIDE:
            given = results[f"{_name(kind, n, block)}-1"]
            name, about, copies = _name(kind, n, block), _about(kind, n, block), passes_of(given)
            found.append(measured(f"{name}_passes", copies, "passes/cycle", about, False))
            if n:
                interval = interval_of(m, given)
                found.append(measured(f"{name}_mma_interval", interval, "cycles", about, False))
                if kind == "reduce":
                    shares.append(float(np.median(copies / (1 - operand_passes(m, n, "shared") / interval))))
            if block != "none":
                others = per_cycle_of(m, given) * PASSES[block] * (STORES if block == "store" else LOADS)
                found.append(measured(f"{name}_{block}_passes", others, "passes/cycle", about, False))
                if (kind, n, block) == ("load", 0, "store"):
                    taken = ((1 - others) / copies).ravel().tolist()
    of_stores = measured("store_passes_per_copied_pass", taken, "passes", f"{_about('load', 0, 'store')}, of 1 a cycle")
    how = f"bulk reductions: passes in the cycles that operands leave, beside n = {', n = '.join(map(str, COLUMNS))}"
    return [*found, of_stores, between("bulk_read_share_beside_mma", shares, "share", how)]


def _about(kind: str, n: int, block: str) -> str:
    what = {"load": "TMA loads", "reduce": "bulk reductions"}[kind]
    beside = [f"{WARPS} warps of {block.replace('_', ' ')}, 128-bit"] if block != "none" else []
    beside += [f"matrix instructions of n = {n}, both operands in shared memory"] if n else []
    return f"{what} of 16 KB, {DEPTH} in flight, " + (f"beside {' and '.join(beside)}" if beside else "alone")
