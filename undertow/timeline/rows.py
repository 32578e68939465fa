"""The rows of a timeline, in the order in which they are shown: who feeds whom, from the top."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
        """`compute` of `compute warp 4`; an engine's own name."""
        return re.sub(r" warp \d+$", "", self.name)

    @cached_property
    def warp(self) -> int | None:
        found = re.search(r" warp (\d+)$", self.name)
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
