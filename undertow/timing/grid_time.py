"""How long a whole launch takes, from how long its CTAs take: CTAs start in the order of their numbers on free SMs.

A CTA takes a fixed time (launch, prologue, filling and draining its pipelines, epilogue) and a time for each of its
tiles; tiles that need a mask have a time of their own. One CTA fills an SM. CTAs of another kind stay, and claim one
key/value tile after another in the order of their numbers; between two of them nothing drains.

All SMs are taken to be busy all the time, which the constants of copies and reductions presuppose; the last CTAs of a
launch have the chip more and more to themselves, and may be faster than is said here.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from undertow.plan.grid import Grid
from undertow.plan.tiles import Tiling
from undertow.timing.constants import BOTH, ConstantSpec

LAUNCH_CONSTANTS: dict[str, ConstantSpec] = {
    "cta_turnover_cycles": ConstantSpec(
        "from the end of a CTA to the first instruction of the next on its SM", "cycles"
    ),
    "launch_cycles": ConstantSpec(
        "what a launch takes beyond its CTAs, as counters of the whole chip see it", "cycles"
    ),
    "sm_clock_ghz": ConstantSpec("SM clock while such a kernel runs", "GHz", BOTH, 0.1),
    "model_error": ConstantSpec("factor on all cycles of a CTA, for what is not modelled", "factor", BOTH, 0.1),
}
"""What a chip file has to say beyond what the engine reads of one CTA."""


class TileCounts(NamedTuple):
    """Tiles that a CTA works on, over all its query heads, and for how many key/value tiles."""

    unmasked: int
    masked: int
    items: int = 1

    @property
    def tiles(self) -> int:
        return self.unmasked + self.masked


@dataclass(frozen=True)
class CtaTime:
    """Cycles of a CTA: `fixed`, and one of the others for each tile.

    item: of a CTA that stays and takes one key/value tile after another, what each adds but the first; else None.
    """

    fixed: float
    unmasked: float
    masked: float
    item: float | None = None

    def cycles(self, counts: TileCounts) -> float:
        """Of a CTA with that many tiles; one without any only starts and ends."""
        more = (counts.items - 1) * (self.item or 0.0)
        return self.fixed + more + counts.unmasked * self.unmasked + counts.masked * self.masked


def solve(samples: Sequence[tuple[TileCounts, float]]) -> CtaTime:
    """The times of a CTA from the cycles of CTAs of different counts: exact for as many as there are unknowns.

    Where no sample has a masked tile, or all have equally many of them, masked tiles count as unmasked ones, and what
    they cost more is a part of the fixed time.
    """
    stays = len({counts.items for counts, _ in samples}) > 1
    masked = len({counts.masked / counts.items for counts, _ in samples}) > 1
    rows = [
        [1.0, *([counts.unmasked, counts.masked] if masked else [counts.tiles]), *[counts.items - 1.0] * stays]
        for counts, _ in samples
    ]
    assert len(rows) >= len(rows[0]), "as many samples as unknowns"
    found, _, rank, _ = np.linalg.lstsq(np.array(rows), np.array([cycles for _, cycles in samples]))
    assert rank == len(rows[0]), "the samples differ in what is asked"
    fixed, *tiles = found.tolist()
    item = tiles.pop() if stays else None
    return CtaTime(fixed, tiles[0], tiles[-1], item)


def tile_counts(tiling: Tiling, kv_tile: int, heads: int = 1) -> TileCounts:
    """What the CTA of a key/value tile has to do. heads: query heads that it goes through."""
    visited, unmasked = tiling.query_tiles(kv_tile).count, tiling.unmasked_query_tiles(kv_tile).count
    return TileCounts(unmasked * heads, (visited - unmasked) * heads)


@dataclass(frozen=True)
class Work:
    """What the CTAs of a launch do. order: for each CTA, in the order of their numbers, which of `kinds` it is."""

    kinds: tuple[TileCounts, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[TileCounts]) -> Work:
        """Of the work of one CTA after another."""
        kinds = tuple(dict.fromkeys(counts))
        number = {kind: place for place, kind in enumerate(kinds)}
        return cls(kinds, tuple(number[each] for each in counts))

    @cached_property
    def tiles(self) -> TileCounts:
        """Of all CTAs together."""
        times = np.bincount(np.array(self.order, int), minlength=len(self.kinds))
        unmasked, masked, _ = times @ np.array(self.kinds, int).reshape(-1, 3)
        return TileCounts(int(unmasked), int(masked), len(self.order))

    @property
    def masked_share(self) -> float:
        """Masked tiles of all tiles."""
        return self.tiles.masked / max(1, self.tiles.tiles)


def work_of(grid: Grid, tiling: Tiling, heads: int = 1) -> Work:
    """The work of every CTA of a launch."""
    of_tile = [tile_counts(tiling, tile, heads) for tile in range(grid.kv_tiles)]
    return Work.of([of_tile[grid.place(number).kv_tile] for number in range(grid.num_ctas)])


def launch_time(work: Work, cta: CtaTime, num_sms: int, constants: Mapping[str, float]) -> float:
    """Cycles of a launch: each CTA, or the work that those that stay take, goes to the SM that is free first.

    constants: those of LAUNCH_CONSTANTS.
    """
    between = constants["cta_turnover_cycles"] + cta.fixed if cta.item is None else cta.item
    cycles = [cta.cycles(counts) - cta.fixed + between for counts in work.kinds]
    if len(cycles) == 1:
        end = -(-len(work.order) // num_sms) * cycles[0]
    else:
        free = [0.0] * min(num_sms, len(work.order))
        for kind in work.order:
            heapq.heapreplace(free, free[0] + cycles[kind])
        end = max(free, default=between)
    return constants["launch_cycles"] + end - between + cta.fixed  # nothing lies before the first one
