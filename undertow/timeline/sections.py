"""What the warps of the backward kernel are at, read off what they wait for and what they say, by the plan's names.

A replay names a piece of work by its instructions, and knows no sections. Rows of other kernels stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from undertow.timeline.rows import Row
from undertow.timing.results import Kind, Span

LOAD_S, SOFTMAX, SIGNAL_P, DS, SIGNAL_DS = "load S", "softmax", "signal P", "dS", "signal dS"
SIDES = (".full", ".empty")  # of a pipeline: work with such a name is an arrival
S_FULL = "mma_compute_s.full"  # begins a tile
DP_FULL = "mma_compute_dp.full"
S_RELEASE = "mma_compute_s.empty"  # S is in registers; without a slot for P, P is written as well
TILE_END = "compute_mma_ds.full"


def arrives(span: Span) -> bool:
    """Whether a span is a warp's arrival on an mbarrier, not a piece of work."""
    return span.kind is Kind.WORK and span.name.endswith(SIDES)


def sectioned(row: Row) -> Row:
    """A compute warp's row whose pieces of work have the names of sections, another row unchanged."""
    if row.role != "compute" or not any(span.name == S_FULL for span in row.spans):
        return row
    return replace(row, spans=tuple(_named(list(_cut(row.spans)))))


def _cut(spans: Sequence[Span]) -> Iterator[Span]:
    """Pieces of work end with an arrival and go on behind it; in the order in which they begin."""
    ends = [span.end for span in spans if arrives(span)]
    pieces = []
    for span in spans:
        within = [] if span.kind is Kind.WAIT or arrives(span) else [end for end in ends if span.begin < end < span.end]
        bounds = [span.begin, *within, span.end]
        pieces += [replace(span, begin=begin, end=end) for begin, end in pairwise(bounds)]
    yield from sorted(pieces, key=lambda span: (span.begin, -span.end))


def _named(spans: Sequence[Span]) -> Iterator[Span]:
    section = ""
    for index, span in enumerate(spans):
        if span.kind is Kind.WAIT:
            section = {S_FULL: LOAD_S, DP_FULL: DS}.get(span.name, section)
            yield span
        elif arrives(span) or not section:
            ends = {TILE_END: "", S_RELEASE: SOFTMAX if section == LOAD_S else section}
            section = ends.get(span.name, section)
            yield span
        else:
            if span.name == SOFTMAX or (section == SOFTMAX and _more_of(SOFTMAX, spans[index:])):
                section = SOFTMAX
            elif section == SOFTMAX:
                section = SIGNAL_P
            elif section == DS and not _more_of(DS, spans[index:]):
                section = SIGNAL_DS
            yield replace(span, name=section)


def _more_of(name: str, spans: Sequence[Span]) -> bool:
    """Whether work of that name is still to come before the tile's last signal."""
    for span in spans:
        if arrives(span) and span.name == TILE_END:
            return False
        if span.kind is Kind.WORK and span.name == name:
            return True
    return False
