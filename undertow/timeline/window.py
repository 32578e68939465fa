"""Which part of a timeline is shown: whole tiles of the steady state, one that is as long as the typical one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from undertow.timing.results import Span, Timeline


class PictureError(ValueError):
    """A timeline that cannot be shown as asked; the message says what it has."""


@dataclass(frozen=True)
class Window:
    """Cycles [begin, end) of a run; `tile` is the number of the first tile in it."""

    begin: float
    end: float
    tile: int

    @property
    def cycles(self) -> float:
        return self.end - self.begin

    def clipped(self, spans: Sequence[Span]) -> Iterator[Span]:
        """The parts of spans that lie inside, with times from the window's beginning."""
        for span in spans:
            begin, end = max(span.begin, self.begin), min(span.end, self.end)
            if begin < end:
                yield replace(span, begin=begin - self.begin, end=end - self.begin)


def steady(timeline: Timeline, tiles: int = 1) -> Window:
    """The window of `tiles` tiles of the second half whose length is nearest to the steady state's.

    Raises: PictureError if the run has not so many.
    """
    if tiles < 1:
        raise PictureError(f"tiles={tiles}: must be at least 1")
    begins = timeline.tile_begins
    last = len(begins) - 1 - tiles  # the last tile has no beginning after it
    if last < 0:
        raise PictureError(f"tiles={tiles}: this run of {timeline.kernel} has {max(0, len(begins) - 1)} whole tiles")
    first = max(0, min(len(begins) // 2, last))
    wanted = timeline.cycles_per_tile * tiles
    tile = min(range(first, last + 1), key=lambda k: (abs(begins[k + tiles] - begins[k] - wanted), k))
    return Window(begins[tile], begins[tile + tiles], tile)


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans of a row in which equal neighbours are one: a section of many instructions is one box."""
    found: list[Span] = []
    for span in spans:
        before = found[-1] if found else None
        if before is not None and _same(before, span) and span.begin <= before.end + 1:
            found[-1] = replace(before, end=max(before.end, span.end))
        else:
            found.append(span)
    return found


def _same(one: Span, other: Span) -> bool:
    return (one.name, one.kind, one.tile) == (other.name, other.kind, other.tile)


def ticks(cycles: float, most: int = 12) -> list[float]:
    """Round numbers from 0 up to `cycles`, at most `most` of them."""
    steps = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    step = next(step for step in steps if cycles / step < most)
    return [index * float(step) for index in range(int(cycles // step) + 1)]
