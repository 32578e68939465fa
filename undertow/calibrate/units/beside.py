"""What warps and tensor cores take from each other: shared memory's port, ex2, FMA.

One port or two, and who wins, decides what a schedule gains; on sm_100a nobody has measured it in public.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from undertow.calibrate.benchmark import SUBPARTITIONS, Benchmark, Launch, Measured, Results, between, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Beside, Block, Mma
from undertow.calibrate.units.arithmetic import INSTRUCTIONS, lines
from undertow.calibrate.units.machines import MACHINES, Machine, operand_passes
from undertow.calibrate.units.shared import ROW, VECTOR_BYTES, loads, store

WARPS = 8  # that run the blocks
GROUP, COUNT = 32, 64
WINDOW = 1000  # cycles of the others per group, which takes at least 32 * 32
SETTLED = 5000  # cycles from the begin on that do not count
COLUMNS = (128, 64)
STORES, LOADS = 32, 16  # in a block; more loads would not find registers
PASSES = {"store": 4, "load_lanes": 4, "load_uniform": 2}  # of a 128-bit access by a warp
FULL = 0.9  # of the port
ONE_PORT = 1.05  # passes per cycle that two ports would exceed, and one cannot
SMEM_OF_BLOCKS = STORES * ROW


@dataclass(frozen=True)
class Rates:
    """What both sides got. interval: cycles per matrix instruction. per_cycle: the others' warp instructions."""

    interval: np.ndarray
    per_cycle: np.ndarray


def memory(at: int) -> dict[str, Block]:
    """Blocks of stores and loads. at: first byte of what they access."""
    return {
        "store": Block(tuple(store(i, ROW) for i in range(STORES)), lane_stride=VECTOR_BYTES, offset=at),
        "load_lanes": Block(loads(LOADS, ROW), lane_stride=VECTOR_BYTES, offset=at),
        "load_uniform": Block(loads(LOADS, VECTOR_BYTES), offset=at),
    }


ARITHMETIC = {  # the longer the block, the less often a warp leaves the issue slot to another one
    "mufu": (Block(lines(INSTRUCTIONS["mufu"], 32)),),
    "fma": (Block(lines(INSTRUCTIONS["fma"], 64)), Block(lines(INSTRUCTIONS["fma"], 128))),
}


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """Of an architecture."""
    m = MACHINES[arch]
    places = ("shared", m.elsewhere)
    accesses = [(name, block, a, n) for n in COLUMNS for a in places for name, block in memory(m.blocks_at).items()]
    arithmetic = [
        (_named(name, block), block, a, 128) for a in places for name, blocks in ARITHMETIC.items() for block in blocks
    ]
    alone = tuple(_launch(m, "none", Block(()), a, n) for n in COLUMNS for a in places)
    return (
        Benchmark(
            "shared-port",
            "operand reads of the tensor cores beside loads and stores: one port or two, and who wins",
            (*alone, *(_launch(m, *of) for of in accesses)),
            lambda results: _port_of(m, results),
        ),
        Benchmark(
            "arithmetic-beside-mma",
            "ex2 and FMA while the tensor cores work, and what they take from them",
            (*alone, *(_launch(m, *of) for of in arithmetic)),
            lambda results: _arithmetic_of(m, results),
        ),
    )


def _named(name: str, block: Block) -> str:
    return f"{name}_x{len(block.text)}"


def _launch(m: Machine, name: str, block: Block, a: str, n: int) -> Launch:
    mma = Mma(n, a, GROUP, m.issuers)
    threads = m.threads * m.issuers + 32 * WARPS
    slots = m.issuers * (COUNT + 1) + 3 * WARPS
    settings = Beside(mma, block, WARPS, WINDOW)
    smem = m.blocks_at + SMEM_OF_BLOCKS
    return Launch(Probe(f"beside_{name}_{a}_n{n}", f"{m.module}.beside", threads, slots, smem, settings), COUNT)


def rates(m: Machine, results: np.ndarray, instructions: int) -> Rates:
    """Of the time in which both were at work. instructions: of a warp in a block."""
    return Rates(interval_of(m, results), per_cycle_of(m, results) * instructions)


def interval_of(m: Machine, results: np.ndarray) -> np.ndarray:
    """Cycles per matrix instruction while the others were at work."""
    issued = results[..., : m.issuers * (COUNT + 1)].reshape(*results.shape[:2], m.issuers, COUNT + 1)
    others = _others(m, results)
    begin, end = others[..., 0].min(-1) + SETTLED, others[..., 1].max(-1)
    inside = (issued >= begin[..., None, None]) & (issued <= end[..., None, None])
    first, last = np.where(inside, issued, np.iinfo(np.int64).max).min(-1), np.where(inside, issued, 0).max(-1)
    groups = inside.sum(-1) - 1
    return 1 / (1 / ((last - first) / (groups * GROUP))).sum(-1)


def per_cycle_of(m: Machine, results: np.ndarray) -> np.ndarray:
    """Runs of the block per cycle, of all warps together."""
    others = _others(m, results)
    return others[..., 2].sum(-1) / (others[..., 1] - others[..., 0]).mean(-1)


def _others(m: Machine, results: np.ndarray) -> np.ndarray:
    begin = m.issuers * (COUNT + 1)
    return results[..., begin : begin + 3 * WARPS].reshape(*results.shape[:2], WARPS, 3)


def _port_of(m: Machine, results: Results) -> list[Measured]:
    found: list[Measured] = []
    sums, free_loads, delays = [], [], []
    wins: dict[str, list[float]] = {name: [] for name in PASSES}
    for n in COLUMNS:
        for a in ("shared", m.elsewhere):
            alone = rates(m, results[f"beside_none_{a}_n{n}-1"], 0).interval
            found.append(measured(f"mma_interval_{a}_n{n}_alone", alone, "cycles", "nobody else", False))
            for name, passes in PASSES.items():
                both = rates(m, results[f"beside_{name}_{a}_n{n}-1"], STORES if name == "store" else LOADS)
                others = both.per_cycle * passes
                about = f"{WARPS} warps of {name.replace('_', ' ')}, 128-bit"
                found += [
                    measured(f"mma_interval_{a}_n{n}_beside_{name}", both.interval, "cycles", about, False),
                    measured(f"{name}_passes_beside_mma_{a}_n{n}", others, "passes/cycle", about, False),
                ]
                operands = operand_passes(m, n, a) / both.interval
                sums.append(float(np.median(operands + others)))
                if np.median(operand_passes(m, n, a) / alone) > FULL:  # they could use all of it
                    wins[name].append(float(np.median(operands / others)))
                elif sums[-1] < FULL and name != "store":
                    free_loads.append(float(np.median(others)))
                if name == "store" and a != "shared":
                    delays.append(float(np.median((both.interval - alone) / (others * both.interval))))
    return [*found, *_of_the_port(sums, wins, free_loads), *_of_the_stores(m, delays)]


def _of_the_port(sums: list[float], wins: dict[str, list[float]], free_loads: list[float]) -> list[Measured]:
    """sums: passes per cycle of each pair. wins: of operands per pass of others, where operands could use all."""
    shares = float(max(sums) <= ONE_PORT)
    how = f"passes of both together, most in {len(sums)} pairs: {max(sums):.3f} a cycle; one port has 1"
    found = [Measured("mma_shares_port", shares, shares, shares, "switch", how)]
    everybody = [*wins["store"], *wins["load_lanes"], *wins["load_uniform"]]
    if everybody and shares:
        how = "passes of operands per pass of stores, where operands alone fill the port; the range: of loads, too"
        found.append(between("mma_grants_per_other", [float(np.median(wins["store"])), *everybody], "grants", how))
    if free_loads:
        how = "passes of loads per cycle where neither they nor the operands need all of the port"
        found.append(between("load_share_beside_mma", [float(np.median(free_loads)), *free_loads], "share", how))
    return found


def _of_the_stores(m: Machine, delays: list[float]) -> list[Measured]:
    if m.module != "wgmma":
        return []
    how = f"{WARPS} warps of stores beside n = {', '.join(map(str, COLUMNS))}, a in registers"
    return [between("mma_delay_per_store_pass", [max(0.0, delay) for delay in delays], "cycles", how)]


def _arithmetic_of(m: Machine, results: Results) -> list[Measured]:
    found = []
    for name, blocks in ARITHMETIC.items():
        intervals, delays = [], []
        for a in ("shared", m.elsewhere):
            alone = rates(m, results[f"beside_none_{a}_n128-1"], 0).interval
            for block in blocks:
                both = rates(m, results[f"beside_{_named(name, block)}_{a}_n128-1"], len(block.text))
                intervals.append(float(np.median(SUBPARTITIONS / both.per_cycle)))
                delays.append(float(np.median((both.interval - alone) / (both.per_cycle * both.interval))))
                about = f"{WARPS} warps of {name} in blocks of {len(block.text)}"
                beside = f"mma_interval_{a}_n128_beside_{_named(name, block)}"
                found.append(measured(beside, both.interval, "cycles", about, False))
        lengths = " and ".join(str(len(block.text)) for block in blocks)
        how = f"{WARPS} warps, blocks of {lengths}, beside n = 128, a in shared memory, {m.elsewhere}"
        found.append(between(f"{name}_interval_beside_mma", intervals, "cycles", how))
        if name == "fma":
            found.append(between("mma_delay_per_fma", [max(0.0, delay) for delay in delays], "cycles", how))
    return found
