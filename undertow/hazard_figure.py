"""A picture of one finding in tensor memory: which warp read and which wrote which lanes and columns.

Everything in it was executed: the finding names the two accesses, and the footprint has the cells that these two
instructions touched in the same run, by all warps. No line numbers: the picture is part of the documents, and changes
only if the kernel does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from undertow.emulator import Finding
from undertow.emulator.events import TmemAccess
from undertow.emulator.observers.base import Access
from undertow.plan.drawing import ALARM, GRID, MUTED, Drawing

LEFT, RIGHT, TOP = 186, 24, 96  # pixels
WIDTH = 896  # pixels for all columns shown
STRIP, GAP = 30, 18  # pixels: height of one instruction's strip in a quarter of the lanes, space between quarters
QUARTER = 32  # lanes
TICK_COLUMNS = 16
FILLS = {"read": "#d7e7fb", "write": "#fdebc8"}
VERBS = {"reads": "read", "writes": "write"}


@dataclass(frozen=True)
class Cells:
    """Lanes [lane, lane + num_lanes) by columns [column, column + num_columns) of tensor memory."""

    lane: int
    num_lanes: int
    column: int
    num_columns: int

    def meets(self, other: Cells) -> range:
        """The columns that both cover, if they share a lane."""
        if self.lane + self.num_lanes <= other.lane or other.lane + other.num_lanes <= self.lane:
            return range(0)
        end = min(self.column + self.num_columns, other.column + other.num_columns)
        return range(max(self.column, other.column), end)


class Footprint:
    """Observes the cells that every instruction touches, by warp."""

    subscriptions: ClassVar[tuple[type, ...]] = (TmemAccess,)

    def __init__(self) -> None:
        self.cells: defaultdict[tuple[int, str], dict[int, Cells]] = defaultdict(dict)  # (PTX line, kind): by warp

    def start(self, program: Any, launch: Any) -> None:
        """Nothing to prepare."""

    def observe(self, event: TmemAccess) -> None:
        if event.operation is None:
            cells = Cells(event.row, event.num_rows, event.column, event.num_columns)
            self.cells[event.decoded.instruction.line, event.kind][event.warp] = cells

    def finish(self) -> list[Finding]:
        return []

    def of(self, access: Access) -> dict[int, Cells]:
        """What all warps touched by the instruction of `access`."""
        return self.cells[access.line, VERBS[access.verb]]


def sides(finding: Finding) -> tuple[Access, Access] | None:
    """The read and the write of tensor memory by two warps that a finding is about, None if it is not about that."""
    if sorted(access.verb for access in finding.accesses) != ["reads", "writes"]:
        return None
    reader, writer = sorted(finding.accesses, key=lambda access: access.verb)
    tmem = all(access.buffer.startswith("TMEM") and not access.engine for access in (reader, writer))
    return (reader, writer) if tmem else None


def hazard_figure(finding: Finding, footprint: Footprint) -> str:
    """SVG of a finding of the run that `footprint` has watched.

    Raises: ValueError if the finding has no `sides`.
    """
    pair = sides(finding)
    if pair is None:
        raise ValueError(f"finding {finding.rule}: not a read and a write of tensor memory by two warps")
    names = tuple(_region(access) for access in pair)
    cells = [cells for access in pair for cells in footprint.of(access).values()]
    first = min(c.column for c in cells) // TICK_COLUMNS * TICK_COLUMNS
    last = -(-max(c.column + c.num_columns for c in cells) // TICK_COLUMNS) * TICK_COLUMNS
    scale = WIDTH / (last - first)
    height = TOP + 4 * (2 * STRIP + GAP) + 58
    drawing = Drawing(LEFT + WIDTH + RIGHT, height, f"{finding.rule} in tensor memory: {names[1]} over {names[0]}")
    reader, writer = pair
    drawing.text(24, 28, f"**{finding.rule}: {names[1]} over {names[0]}**", ink=ALARM)
    who = f"warp {writer.warp} ({writer.role}) writes what warp {reader.warp} ({reader.role}) reads"
    drawing.text(24, 50, f"{who}, and nothing orders the two", ink=MUTED)
    _columns(drawing, range(first, last, TICK_COLUMNS), first, scale)
    strips = list(_strips(pair, names, footprint))
    for strip in strips:
        _draw_boxes(drawing, strip, first, scale)
    _draw_conflict(drawing, pair, footprint, first, scale)
    for strip in strips:
        _draw_names(drawing, strip, first, scale)
    drawing.text(24, TOP + 4 * (2 * STRIP + GAP) + 34, f"missing: {finding.missing}", ink=MUTED)
    return drawing.svg()


@dataclass(frozen=True)
class _Strip:
    """What one instruction touched in one quarter of the lanes, by warp."""

    quarter: int
    row: int  # 0 for the read, 1 for the write
    name: str
    kind: str
    warps: tuple[tuple[int, Cells], ...]

    @property
    def top(self) -> int:
        return TOP + self.quarter * (2 * STRIP + GAP) + self.row * STRIP


def _region(access: Access) -> str:
    """What the finding calls the cells: `TMEM columns 16..31 (S)` are S."""
    return access.buffer.rpartition("(")[2].rstrip(")").removeprefix("TMEM ")


def _strips(pair: tuple[Access, ...], names: tuple[str, ...], footprint: Footprint) -> Iterator[_Strip]:
    for quarter in range(4):
        for row, (access, name) in enumerate(zip(pair, names)):
            touched = footprint.of(access).items()
            warps = tuple((w, c) for w, c in sorted(touched) if c.lane // QUARTER == quarter)
            yield _Strip(quarter, row, name, VERBS[access.verb], warps)


def _columns(drawing: Drawing, ticks: range, first: int, scale: float) -> None:
    bottom = TOP + 4 * (2 * STRIP + GAP) - GAP
    for column in (*ticks, ticks.stop):
        x = LEFT + (column - first) * scale
        drawing.line((x, TOP - 6), (x, bottom), GRID, dashes="2 3")
        drawing.text(x, TOP - 11, str(column), size=13, anchor="middle", ink=MUTED)
    drawing.text(24, TOP - 11, "lanes", size=13, ink=MUTED)
    drawing.text(LEFT - 10, TOP - 11, "columns", size=13, anchor="end", ink=MUTED)
    for quarter in range(4):
        y = TOP + quarter * (2 * STRIP + GAP) + STRIP + 5
        lanes = f"[{quarter * QUARTER}, {(quarter + 1) * QUARTER})"
        drawing.text(24, y, lanes, size=14, ink=MUTED)


def _draw_boxes(drawing: Drawing, strip: _Strip, first: int, scale: float) -> None:
    for _, cells in strip.warps:
        drawing.box(
            LEFT + (cells.column - first) * scale, strip.top, cells.num_columns * scale, STRIP, FILLS[strip.kind]
        )


def _draw_names(drawing: Drawing, strip: _Strip, first: int, scale: float) -> None:
    verb = "load" if strip.kind == "read" else "store"
    drawing.text(LEFT - 10, strip.top + STRIP / 2 + 5, f"{verb} {strip.name}", size=13, anchor="end")
    for warp, cells in strip.warps:
        drawing.text(LEFT + (cells.column - first) * scale + 10, strip.top + STRIP / 2 + 5, f"warp {warp}", size=13)


def _draw_conflict(drawing: Drawing, pair: tuple[Access, ...], footprint: Footprint, first: int, scale: float) -> None:
    reader, writer = (footprint.of(access)[access.warp] for access in pair)
    shared = reader.meets(writer)
    x, width = LEFT + (shared.start - first) * scale, len(shared) * scale
    top = TOP + reader.lane // QUARTER * (2 * STRIP + GAP)
    drawing.hatch(x, top, width, 2 * STRIP)
    for side in (x, x + width):
        drawing.line((side, top), (side, top + 2 * STRIP), ALARM)
    for edge in (top, top + 2 * STRIP):
        drawing.line((x, edge), (x + width, edge), ALARM)
