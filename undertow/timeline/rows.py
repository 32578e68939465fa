"""The rows of a timeline, in the order in which they are shown: who feeds whom, from the top."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from undertow.timing.results import Span, Timeline

ORDER = ("tensor", "mma", "compute", "load", "tma", "reduce")  # others follow, by name


@dataclass(frozen=True)
class Row:
    """A warp of a role, or an engine, which has no warp."""

    name: str
    spans: tuple[Span, ...]

    @cached_property
    def role(self) -> str:
        """`compute` of `compute warp 4`, `warp` of a warp without a role; an engine's own name."""
        return re.sub(r" (warp )?\d+$", "", self.name) if self.warp is not None else self.name

    @cached_property
    def warp(self) -> int | None:
        found = re.search(r"\bwarp (\d+)$", self.name)
        return int(found[1]) if found else None


def rows_of(timeline: Timeline) -> tuple[Row, ...]:
    """Every row with its spans by their beginning: the tensor pipe, then the roles, warps by their number."""
    spans: dict[str, list[Span]] = {}
    for span in timeline.spans:
        spans.setdefault(span.row, []).append(span)
    for meeting in timeline.meetings:
        for name in meeting.rows:
            spans.setdefault(name, [])
    rows = (Row(name, _sorted(of_row)) for name, of_row in spans.items())
    return tuple(sorted(rows, key=_place))


def _sorted(spans: Iterable[Span]) -> tuple[Span, ...]:
    """An outer span before those inside it."""
    return tuple(sorted(spans, key=lambda span: (span.begin, -span.end, span.name)))


def _place(row: Row) -> tuple[int, str, int]:
    place = next((index for index, word in enumerate(ORDER) if row.role.startswith(word)), len(ORDER))
    return place, row.role, -1 if row.warp is None else row.warp


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few tracks as need be so that on each of them two are apart or one lies within the other."""
    found: list[list[Span]] = []
    stacks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        place = next((index for index, stack in enumerate(stacks) if _fits(span, stack)), len(found))
        if place == len(found):
            found.append([])
            stacks.append([])
        found[place].append(span)
        stacks[place].append(span)
    return found


def _fits(span: Span, stack: list[Span]) -> bool:
    """Whether a span lies within the innermost open one of a lane; those that have ended are taken away."""
    while stack and stack[-1].end <= span.begin:
        stack.pop()
    return not stack or span.end <= stack[-1].end
