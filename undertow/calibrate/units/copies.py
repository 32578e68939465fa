"""Bulk copies: TMA loads, stores, and reductions, by one SM and by all."""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import ALL, Benchmark, Launch, Measured, Results, between, cycles, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Copy

TILE = 16384  # bytes: 128 rows of 64 16-bit values
HALF, SHORT = 8192, 512
TRIPS = 56
COUNT = 512
TILES = 4  # of a CTA
SHARED_TILES = 16  # of all CTAs together
FRONT = 1024  # bytes of shared memory before the stages
KINDS = ("load", "store", "reduce")
STREAMS = {  # name: copies, CTAs
    "load_depth1": (Copy("load", TILE, 1), 1),
    "load_depth2": (Copy("load", TILE, 2), 1),
    "load_depth4": (Copy("load", TILE, 4), 1),
    "load_depth4_wide": (Copy("load", TILE, 4, 64), 1),
    "load_depth2_all": (Copy("load", TILE, 2), ALL),
    "load_depth4_all": (Copy("load", TILE, 4), ALL),
    "load_depth4_wide_all": (Copy("load", TILE, 4, 12), ALL),
    "load_together_all": (Copy("load", TILE, 2, SHARED_TILES, True), ALL),
    "reduce": (Copy("reduce", TILE, 2), 1),
    "reduce_all": (Copy("reduce", TILE, 2), ALL),
    "reduce_together_all": (Copy("reduce", TILE, 2, SHARED_TILES, True), ALL),
    "reduce_one_tile_all": (Copy("reduce", TILE, 2, 1, True), ALL),
    "store": (Copy("store", TILE, 2), 1),
    "store_all": (Copy("store", TILE, 2), ALL),
}
SINGLES = {f"{kind}_{size}": Copy(kind, size, 1) for kind in KINDS for size in (TILE, HALF, SHORT)}


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """The same for all architectures."""
    del arch
    idle = tuple(_single(name, s, 1) for name, s in SINGLES.items())
    loaded = tuple(_single(name, SINGLES[name], ALL) for name in (f"load_{TILE}", f"reduce_{TILE}"))
    streams = {name: _stream(name, *of) for name, of in STREAMS.items()}
    return (
        Benchmark(
            "copy-latency",
            "one bulk load, store or reduction of 16 KB, 8 KB and 512 B; by one SM and by all at once; issuing",
            (*idle, *loaded),
            _latencies_of,
        ),
        Benchmark(
            "load-rate",
            "bytes per cycle and SM of TMA loads from L2, by one SM and by all, of tiles of their own or the same",
            tuple(launch for name, launch in streams.items() if name.startswith("load")),
            lambda results: _rates_of(results, "load"),
        ),
        Benchmark(
            "reduce-rate",
            "bytes per cycle and SM of bulk reductions: one SM, all, all on the same tiles, all on one tile",
            tuple(launch for name, launch in streams.items() if name.startswith("reduce")),
            lambda results: _rates_of(results, "reduce"),
        ),
        Benchmark(
            "store-rate",
            "bytes per cycle and SM of bulk stores, by one SM and by all",
            tuple(launch for name, launch in streams.items() if name.startswith("store")),
            lambda results: _rates_of(results, "store"),
        ),
    )


def _single(name: str, s: Copy, ctas: int) -> Launch:
    return Launch(Probe(f"copy_{name}", "copies.single", 32, 3 * TRIPS, FRONT + s.size, s), TRIPS, ctas, _floats(s))


def _stream(name: str, s: Copy, ctas: int) -> Launch:
    smem = FRONT + s.depth * s.size
    return Launch(Probe(f"stream_{name}", "copies.stream", 32, 4, smem, s), COUNT, ctas, _floats(s))


def _floats(s: Copy) -> int:
    """Of a CTA; the tiles of all together lie in those of the first four."""
    return max(TILES, s.tiles if not s.together else SHARED_TILES) * s.size // 4


def times(results: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cycles to issue, and until it is done, of every trip but the first eight."""
    trips = results.reshape(*results.shape[:2], TRIPS, 3)[:, :, 8:]
    return trips[..., 1] - trips[..., 0], trips[..., 2] - trips[..., 0]


def _latencies_of(results: Results) -> list[Measured]:
    found = []
    medians: dict[str, float] = {}
    for name in SINGLES:
        issue, done = times(results[f"copy_{name}-1"])
        medians[name] = float(np.median(done))
        found.append(measured(f"copy_{name}_done", done, "cycles", "one SM, from issue until there or read", False))
        if name == f"load_{TILE}":
            found.append(measured("tma_issue_cycles", issue, "cycles", "expect_tx and load, to the next instruction"))
    for name in (f"load_{TILE}", f"reduce_{TILE}"):
        _, done = times(results[f"copy_{name}-all"])
        found.append(
            measured(f"copy_{name}_done_all", done, "cycles", "all SMs, from issue until there or read", False)
        )
    how = f"one SM, from the times of {SHORT} B, {HALF} B and {TILE} B"
    for kind, latency, rate in (
        ("load", "tma_load_latency", "tma_load_burst_bytes_per_cycle"),
        ("reduce", "bulk_reduce_latency", ""),
        ("store", "bulk_store_latency", ""),
    ):
        short, half, whole = (medians[f"{kind}_{size}"] for size in (SHORT, HALF, TILE))
        rates = [(TILE - SHORT) / (whole - short), (TILE - HALF) / (whole - half), (HALF - SHORT) / (half - short)]
        begins = [whole - TILE / rates[0], short - SHORT / rates[0], half - HALF / rates[0]]
        found.append(between(latency, begins, "cycles", f"{how}: what remains of no bytes"))
        if rate:
            found.append(between(rate, rates, "bytes/cycle", f"{how}: the slope"))
    return found


RATES = {  # stream by all SMs, per SM -> constant
    "load_depth4_all": "tma_load_bytes_per_cycle",
    "reduce_all": "bulk_reduce_bytes_per_cycle",
    "store_all": "bulk_store_bytes_per_cycle",
}


def _rates_of(results: Results, kind: str) -> list[Measured]:
    found = []
    for name, (s, ctas) in STREAMS.items():
        if name.startswith(kind):
            each = COUNT * s.size / cycles(results[f"stream_{name}-{'all' if ctas == ALL else ctas}"])
            how = f"{s.depth} copies of 16 KB in flight, {'all SMs' if ctas == ALL else 'one SM'}"
            found.append(measured(f"{name}_bytes_per_cycle", each, "bytes/cycle", how, False))
            if name in RATES:
                found.append(measured(RATES[name], each, "bytes/cycle", how))
    return found
