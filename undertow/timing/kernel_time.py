"""A kernel as a few recorded CTAs: from their replays, how long any of its CTAs takes.

The recorded CTAs differ in how many tiles they have and how many of these need a mask, so that the fixed part of a CTA
and the time of either kind of tile follow from their cycles. CTAs of groups of query heads go through one loop of
tiles, whatever the head: they need no recording of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from undertow.plan.grid import Grid
from undertow.plan.tiles import Band, Tiling
from undertow.timing.chip import Chip
from undertow.timing.grid_time import CtaTime, TileCounts, solve, tile_counts
from undertow.timing.replay import replay
from undertow.timing.results import Timeline
from undertow.timing.run import run
from undertow.timing.steady import DRAIN_TILES, FILL_TILES
from undertow.timing.trace import Trace

TILE = 128
LONG, SHORT = 16, 8  # query tiles of the recorded CTAs: both fill every pipeline, and eight tiles lie between them


class SampleShape(NamedTuple):
    """One sequence of one head, of which the first CTA is recorded. items: key/value tiles that it takes."""

    seqlen_q: int
    seqlen_k: int
    window: tuple[int | None, int | None]
    items: int = 1


def sample_shapes(band: Band) -> tuple[SampleShape, ...]:
    """Shapes whose first CTAs tell all that there is to know about CTAs under masks with these bounds, longest first.

    Only which bounds exist matters here; where they are is told to a kernel when it runs.
    """
    long, short, middle = LONG * TILE, SHORT * TILE, (LONG + SHORT) // 2 * TILE
    if band.left is None and band.right is None:
        return SampleShape(long, TILE, (None, None)), SampleShape(short, TILE, (None, None))
    if band.left is None:  # the diagonal cuts one tile; half a tile off it, two
        return (
            SampleShape(long, long, (None, 0)),
            SampleShape(short, short, (None, 0)),
            SampleShape(middle, middle - TILE // 2, (None, 0)),
        )
    if band.right is None:  # CTAs begin with the last keys, whose last tile the bound cuts
        return (
            SampleShape(long, long, (0, None)),
            SampleShape(short, short, (0, None)),
            SampleShape(middle, middle, (TILE, None)),
        )
    return (  # cut on both sides, and once on the left in two tiles
        SampleShape(long, long, ((LONG - 1) * TILE, 0)),
        SampleShape(long, long, ((SHORT - 1) * TILE, 0)),
        SampleShape(long, long, (middle - TILE // 2, 0)),
    )


def shapes_of_items(band: Band) -> tuple[SampleShape, ...]:
    """The same for CTAs that stay: another one of them takes three key/value tiles."""
    shapes = sample_shapes(band)
    *_, (rows, keys, window, _) = shapes if band != Band() else [SampleShape(SHORT * TILE, 3 * TILE, (None, None))]
    return (*shapes, SampleShape(rows, keys, window, 3))


def first_cta(shape: SampleShape, descending: bool) -> TileCounts:
    """The work of the CTA that is recorded. descending: whether CTAs take the last key/value tile first."""
    grid = Grid(-(-shape.seqlen_k // TILE), 1, 1, descending=descending)
    tiling = Tiling(shape.seqlen_q, shape.seqlen_k, Band(*shape.window))
    each = [tile_counts(tiling, grid.place(number).kv_tile) for number in range(shape.items)]
    return TileCounts(sum(x.unmasked for x in each), sum(x.masked for x in each), shape.items)


@dataclass(frozen=True)
class Recorded:
    """A CTA that was executed, and its work."""

    counts: TileCounts
    trace: Trace


class Replayed(NamedTuple):
    """What one draw says of a kernel. cycles, per_tile: of the longest recorded CTA, all and in its steady state."""

    cta: CtaTime
    cycles: float
    per_tile: float
    utilisation: Mapping[str, float]

    def tile(self, masked_share: float) -> float:
        """Cycles of a tile where so many of all need a mask."""
        return (1 - masked_share) * self.cta.unmasked + masked_share * self.cta.masked


@dataclass(frozen=True)
class Kernels:
    """Kernels by name, each with its recorded CTAs, the longest first. Callable: what replays say of each."""

    recorded: Mapping[str, tuple[Recorded, ...]]

    def __call__(self, constants: Mapping[str, float], seed: int) -> dict[str, Replayed]:
        return {name: self._replayed(ctas, constants, seed) for name, ctas in self.recorded.items()}

    def timeline(self, name: str, constants: Mapping[str, float], seed: int, chip: Chip) -> Timeline:
        """The longest recorded CTA of a kernel, whole."""
        return replay(self.recorded[name][0].trace, constants, seed, chip=chip.name, assumed=assumed_of(chip))

    @staticmethod
    def _replayed(ctas: tuple[Recorded, ...], constants: Mapping[str, float], seed: int) -> Replayed:
        longest, *others = ctas
        timeline = replay(longest.trace, constants, seed, with_spans=False)
        error = constants["model_error"]
        samples = [(longest.counts, error * timeline.cycles)]
        samples += [(cta.counts, error * run(cta.trace, constants, seed).cycles) for cta in others]
        times = solve(samples) if others else CtaTime(samples[0][1], 0.0, 0.0)  # one alone says only what it took
        return Replayed(times, samples[0][1], error * timeline.cycles_per_tile, timeline.utilisation)


@dataclass(frozen=True)
class CtaAlone:
    """A CTA that has no tiles to speak of. Callable: its cycles."""

    trace: Trace

    def __call__(self, constants: Mapping[str, float], seed: int) -> dict[str, float]:
        return {"cycles": constants["model_error"] * run(self.trace, constants, seed).cycles}


def has_steady_state(trace: Trace) -> bool:
    """Whether a CTA goes through enough tiles for their time to be told from that of its beginning and end."""
    return len(trace.tile_tokens) >= FILL_TILES + DRAIN_TILES + 2


def assumed_of(chip: Chip) -> tuple[str, ...]:
    """The constants that nobody has measured or published."""
    return tuple(name for name, constant in chip.constants.items() if constant.confidence == "assumed")
