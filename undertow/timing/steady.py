"""The steady state of a run: when tiles begin, cycles per tile by kind, and what prologue and epilogue add."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from .errors import TimingError
from .results import Phases
from .run import Run
from .trace import Trace
from .uops import Kind, Unit

FILL_TILES = 4
DRAIN_TILES = 2
UNMASKED, MASKED = "unmasked", "masked"


@dataclass(frozen=True)
class Steady:
    """begins: of each tile. kinds: of each tile. first, last: tiles between whose beginnings the run is steady."""

    begins: np.ndarray
    kinds: tuple[str, ...]
    first: int
    last: int

    @property
    def window(self) -> tuple[float, float]:
        return float(self.begins[self.first]), float(self.begins[self.last])

    @property
    def cycles_per_tile(self) -> float:
        begin, end = self.window
        return (end - begin) / (self.last - self.first)


def tile_waits(trace: Trace) -> list[np.ndarray]:
    """For each query tile, the instructions that wait for it."""
    waits = np.flatnonzero(trace.uops[trace.uop, 0] == Kind.WAIT)
    token = trace.argument[waits]
    return [waits[token == tile] for tile in trace.tile_tokens]


def tile_kinds(trace: Trace) -> tuple[str, ...]:
    """Whether each tile runs masked or unmasked code, by the code with the exponentials of one compute warp.

    The code that runs most often counts as unmasked, any with more instructions as masked.
    """
    num_tiles = len(trace.tile_tokens)
    unit = np.where(trace.uops[:, 0] == Kind.ARITHMETIC, trace.uops[:, 1], 0)[trace.uop]
    counts = [int((unit[trace.stream(warp)] == Unit.MUFU).sum()) for warp in range(trace.num_warps)]
    warp = int(np.argmax(counts))
    per_tile = counts[warp] // num_tiles if num_tiles else 0
    if not per_tile or counts[warp] % num_tiles:
        return (UNMASKED,) * num_tiles
    pieces, is_mufu = trace.segment[trace.stream(warp)], unit[trace.stream(warp)] == Unit.MUFU
    tile = np.maximum(np.cumsum(is_mufu) - 1, 0) // per_tile
    codes = [tuple(np.unique(pieces[is_mufu & (tile == t)]).tolist()) for t in range(num_tiles)]
    size = {code: int(np.isin(pieces, code).sum() / codes.count(code)) for code in set(codes)}
    plain = Counter(codes).most_common(1)[0][0]
    return tuple(UNMASKED if code == plain or size[code] <= size[plain] else MASKED for code in codes)


def steady_state(trace: Trace, run: Run) -> Steady:
    """Find the steady state of a run; of one with few tiles, all of it counts as steady.

    Raises: TimingError for a recording with less than two tiles.
    """
    begins = np.array([run.issued[waits].min() for waits in tile_waits(trace) if len(waits)])
    if len(begins) < 2:
        raise TimingError(f"{trace.kernel}: {len(begins)} query tiles; cycles per tile need at least 2")
    kinds = tile_kinds(trace)[: len(begins)]
    if len(begins) < FILL_TILES + DRAIN_TILES + 2:
        return Steady(begins, kinds, 0, len(begins) - 1)
    usual = Counter(kinds[FILL_TILES : len(begins) - DRAIN_TILES]).most_common(1)[0][0]
    best = (FILL_TILES, FILL_TILES + 1)
    begin = None
    for tile in range(FILL_TILES, len(begins) - DRAIN_TILES + 1):
        if tile < len(begins) - DRAIN_TILES and kinds[tile] == usual:
            begin = tile if begin is None else begin
            best = max(best, (begin, tile), key=lambda pair: pair[1] - pair[0])
        else:
            begin = None
    first, last = best
    return Steady(begins, kinds, first, last if (last - first) % 2 == 0 or last - first < 2 else last - 1)


def phases(run: Run, steady: Steady) -> Phases:
    """What each tile costs by its kind, and what a CTA costs besides: their sum is the run."""
    spacing = np.diff(steady.begins)
    per_tile = {}
    usual = steady.kinds[steady.first]
    for kind in dict.fromkeys(steady.kinds):
        mine = [t for t in range(FILL_TILES, len(spacing) - 1) if steady.kinds[t] == kind] or [
            t for t in range(len(spacing)) if steady.kinds[t] == kind
        ]
        per_tile[kind] = float(np.median(spacing[mine])) if mine else steady.cycles_per_tile
    per_tile[usual] = steady.cycles_per_tile
    begin, end = steady.window
    prologue = begin - sum(per_tile[kind] for kind in steady.kinds[: steady.first])
    epilogue = run.cycles - end - sum(per_tile[kind] for kind in steady.kinds[steady.last :])
    return Phases(prologue, per_tile, epilogue)
