"""Matrix instructions alone: how often one can start, and from issue until the result is there."""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import Benchmark, Launch, Measured, Results, between, cycles, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Mma
from undertow.calibrate.units.machines import MACHINES, K, Machine

COLUMNS = (128, 64)
GROUPS = (1, 4, 8)  # instructions of a group whose latency is measured
GROUP, COUNT, TRIPS = 32, 60, 56
ISSUED = 24  # instructions whose issue is timed, one by one


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """Of an architecture."""
    m = MACHINES[arch]
    kinds = [(a, n) for a in ("shared", m.elsewhere) for n in COLUMNS]
    latencies = tuple(_latency(m, Mma(n, a, group)) for a, n in kinds for group in GROUPS)
    one_by_one = tuple(_issue(m, Mma(n, a, ISSUED)) for a, n in kinds)
    return (
        Benchmark(
            "mma-interval",
            "cycles between matrix instructions, n = 64 and 128, operand a in shared memory or not",
            tuple(_interval(m, Mma(n, a, GROUP, m.issuers)) for a, n in kinds),
            lambda results: _intervals_of(m, kinds, results),
        ),
        Benchmark(
            "mma-latency",
            f"from the issue of {', '.join(map(str, GROUPS))} until they are done, fill and tail of one; issuing",
            (*latencies, *one_by_one),
            lambda results: _latencies_of(m, kinds, results),
        ),
    )


def _interval(m: Machine, s: Mma) -> Launch:
    name = f"mma_rate_{s.a}_n{s.n}"
    return Launch(Probe(name, f"{m.module}.interval", m.threads * s.issuers, 32, m.smem, s), COUNT)


def _latency(m: Machine, s: Mma) -> Launch:
    name = f"mma_latency_{s.a}_n{s.n}_x{s.group}"
    return Launch(Probe(name, f"{m.module}.latency", m.threads, 2 * TRIPS, m.smem, s), TRIPS)


def _issue(m: Machine, s: Mma) -> Launch:
    return Launch(Probe(f"mma_issue_{s.a}_n{s.n}", f"{m.module}.issue", m.threads, 1 + ISSUED, m.smem, s), 1)


def _intervals_of(m: Machine, kinds: list, results: Results) -> list[Measured]:
    found, rates = [], []
    for a, n in kinds:
        each = cycles(results[f"mma_rate_{a}_n{n}-1"]) / (COUNT * GROUP * m.issuers)
        found.append(measured(f"mma_interval_{a}_n{n}", each, "cycles", f"groups of {GROUP}", False))
        rates.append(m.rows * n * K / each)
    best = max(rates, key=np.median)
    return [*found, measured("mma_multiply_adds_per_cycle", best, "per cycle", "the fastest of n = 64 and 128")]


def _latencies_of(m: Machine, kinds: list, results: Results) -> list[Measured]:
    found: list[Measured] = []
    beyond: dict[str, list[float]] = {}
    for a, n in kinds:
        of = {group: _trips(results[f"mma_latency_{a}_n{n}_x{group}-1"]) for group in GROUPS}
        found += [
            measured(f"mma_latency_{a}_n{n}_x{group}", each, "cycles", "from issue until done", False)
            for group, each in of.items()
        ]
        first, last = (float(np.median(of[group])) for group in (GROUPS[0], GROUPS[-1]))
        beyond.setdefault(a, []).append(first - (last - first) / (GROUPS[-1] - GROUPS[0]))
    how = "from issue until done of one instruction, less its interval; n = 128 and 64"
    found += [between(f"mma_fill_and_tail_{a}", values, "cycles", how, False) for a, values in beyond.items()]
    return [*found, *_issue_of(m, kinds, results)]


def _trips(results: np.ndarray) -> np.ndarray:
    """Cycles of every trip but the first two."""
    trips = results.reshape(*results.shape[:2], TRIPS, 2)[:, :, 2:]
    return trips[..., 1] - trips[..., 0]


def _issue_of(m: Machine, kinds: list, results: Results) -> list[Measured]:
    """From the gaps between instructions that are issued in a row, the first of which find room."""
    rooms, free = [], []
    for a, n in kinds:
        clocks = results[f"mma_issue_{a}_n{n}-1"]
        gaps = np.median(clocks[..., 1:] - clocks[..., :-1], axis=(0, 1))
        waits = gaps > gaps[-4:].mean() / 2
        waits[0] = False  # before the first there is more to do
        rooms.append(int(np.argmax(waits)) if waits.any() else len(gaps))
        free.append(float(np.median(gaps[1 : max(rooms[-1], 2)])))
    how = f"the clock between instructions that one warp issues in a row; {', '.join(f'{a} n = {n}' for a, n in kinds)}"
    return [
        between(f"{m.module}_issue_interval", free, "cycles", f"{how}: those that do not wait"),
        between(
            f"{m.module}_in_flight", [float(max(room, 1)) for room in rooms], "instructions", f"{how}: before one waits"
        ),
    ]
