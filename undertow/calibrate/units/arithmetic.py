"""Intervals of the arithmetic pipes, and from an instruction to one that needs its result."""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import SUBPARTITIONS, Benchmark, Launch, Measured, Results, cycles, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Block

WARPS = 16  # four of every sub-partition
LINES = 128  # instructions in a block
COUNT = 400

# {i} and {j}: numbers of two of the eight registers
INSTRUCTIONS = {
    "fma": "fma.rn.f32 x{i}, x{i}, x{i}, x{j};",
    "alu": "prmt.b32 x{i}, x{i}, x{j}, 0x5140;",
    "integer_multiply": "mad.lo.s32 x{i}, x{i}, x{j}, x{i};",
    "mufu": "ex2.approx.ftz.f32 x{i}, x{i};",
    "convert": "cvt.rn.bf16x2.f32 x{i}, x{i}, x{j};",
    "shuffle": "shfl.sync.bfly.b32 x{i}, x{i}, 1, 0x1f, 0xffffffff;",
}
PAIRS = tuple(f"mov.b64 w{i}, {{x{2 * i}, x{2 * i + 1}}};" for i in range(4))
UNPAIRS = tuple(f"mov.b64 {{x{2 * i}, x{2 * i + 1}}}, w{i};" for i in range(4))


def lines(template: str, count: int, registers: int = 8) -> tuple[str, ...]:
    """`count` instructions that go through the registers in turn."""
    return tuple(template.format(i=i % registers, j=(i + 1) % registers) for i in range(count))


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """Of an architecture."""
    return _rates(arch), _latencies(), _fetches()


def _rate(name: str, text: tuple[str, ...]) -> Launch:
    return Launch(Probe(f"rate_{name}", "loops.loop", 32 * WARPS, 4 * WARPS, settings=Block(text)), COUNT)


def _chain(name: str, text: tuple[str, ...]) -> Launch:
    return Launch(Probe(f"chain_{name}", "loops.loop", 32, 4, settings=Block(text)), COUNT)


def interval(results: np.ndarray, instructions: int, warps: int = WARPS) -> np.ndarray:
    """Cycles per warp instruction of one sub-partition. instructions: of a warp, all told."""
    return cycles(results) * SUBPARTITIONS / (warps * instructions)


def _rates(arch: str) -> Benchmark:
    texts = {name: lines(template, LINES) for name, template in INSTRUCTIONS.items()}
    mixed = zip(lines(INSTRUCTIONS["convert"], LINES // 2, 4), lines("prmt.b32 x{i}, x{i}, x{j}, 0x5140;", LINES // 2))
    texts["convert_and_alu"] = tuple(line for pair in mixed for line in pair)
    if arch == "sm_100a":
        texts["packed_fma"] = (*PAIRS, *lines("fma.rn.f32x2 w{i}, w{i}, w{i}, w{j};", LINES, 4), *UNPAIRS)
    return Benchmark(
        "arithmetic-rate",
        "cycles between warp instructions of a pipe: FMA, ALU, integer multiply, ex2, conversion, shuffle",
        tuple(_rate(name, text) for name, text in texts.items()),
        lambda results: _rates_of(results, tuple(texts)),
    )


def _rates_of(results: Results, names: tuple[str, ...]) -> list[Measured]:
    each = {name: interval(results[f"rate_{name}-1"], COUNT * LINES) for name in names}
    how = f"{WARPS} warps, blocks of {LINES} independent instructions"
    found = [
        measured(f"{name}_interval", each[name], "cycles", how, is_constant=name != "shuffle")
        for name in names
        if name != "convert_and_alu"
    ]
    both, alone = np.median(each["convert_and_alu"]), np.median(each["convert"] + each["alu"]) / 2
    shares = float(both > 0.75 * alone)
    apart = f"conversions and prmt in turn: {both:.2f} cycles each; {alone:.2f} would be one pipe"
    return [*found, Measured("convert_shares_alu", shares, shares, shares, "switch", apart)]


CHAINS = {
    "fma": lines("fma.rn.f32 x0, x0, x0, x0;", LINES),
    "alu": lines("prmt.b32 x0, x0, x0, 0x2103;", LINES),
    "mufu": lines("ex2.approx.ftz.f32 x0, x0;", LINES),
    "shuffle": lines("shfl.sync.bfly.b32 x0, x0, 1, 0x1f, 0xffffffff;", LINES),
    "select": lines("setp.lt.f32 p, x0, x1; selp.f32 x0, x2, x3, p;", LINES // 2),
    "vote": lines("setp.ne.b32 p, x0, 0; vote.sync.ballot.b32 x0, p, 0xffffffff;", LINES // 2),
    "short": lines("fma.rn.f32 x0, x0, x0, x0;", LINES // 4),
}


def _latencies() -> Benchmark:
    return Benchmark(
        "arithmetic-latency",
        "from an instruction to one that needs its result: FMA, ALU, ex2, shuffle, compare, vote; a taken branch",
        tuple(_chain(name, text) for name, text in CHAINS.items()),
        _latencies_of,
    )


def _latencies_of(results: Results) -> list[Measured]:
    block = {name: cycles(results[f"chain_{name}-1"]) / COUNT for name in CHAINS}
    branch = (4 * block["short"] - block["fma"]) / 3  # four branches against one
    each = {name: (cycles_ - branch) / LINES for name, cycles_ in block.items()}
    arithmetic = each["fma"]
    predicate = 2 * each["select"] - arithmetic
    one = "one warp, a chain of 128"
    return [
        measured("arithmetic_latency", np.stack([arithmetic, each["alu"]]), "cycles", f"{one}: fma, prmt"),
        measured("mufu_latency", each["mufu"], "cycles", f"{one} ex2"),
        measured("shuffle_latency", each["shuffle"], "cycles", f"{one} shfl"),
        measured("predicate_latency", predicate, "cycles", "a chain of compare and select, less the select"),
        measured("collective_latency", 2 * each["vote"] - predicate, "cycles", "compare and vote, less the compare"),
        measured("taken_branch_cycles", branch, "cycles", "a chain of fma in loops of 32 and of 128"),
    ]


CODE = (128, 512, 1024, 2048)  # instructions of 16 bytes in a loop; that of a kernel's tile has some 1600


def _fetches() -> Benchmark:
    return Benchmark(
        "instruction-fetch",
        "cycles per independent FMA of one warp a sub-partition in loops of 2 to 32 KB of code",
        tuple(
            Launch(
                Probe(
                    f"code_{count}",
                    "loops.loop",
                    32 * SUBPARTITIONS,
                    4 * SUBPARTITIONS,
                    settings=Block(lines(INSTRUCTIONS["fma"], count)),
                ),
                COUNT,
            )
            for count in CODE
        ),
        _fetches_of,
    )


def _fetches_of(results: Results) -> list[Measured]:
    each = {count: interval(results[f"code_{count}-1"], COUNT * count, SUBPARTITIONS) for count in CODE}
    about = "one warp a sub-partition, the branch included"
    return [measured(f"code_{count}_interval", each[count], "cycles", about, False) for count in CODE]
