"""A timeline as a Perfetto trace, laid out as NVIDIA's in-kernel event tracer (run-iket) lays out what it measured.

Tracks as in a trace of nvidia-cutlass-dsl 4.8.1 on an H200, from the root: `Grid1` with a slice for the kernel, GPC,
`TPC|VSM`, `CTA(0, 0, 0)`, `Warp00` with the slice `Warp Life Time`; below a warp `StackedRanges` with ranges that nest,
and `Marker` with instants, here the barriers at which warps met. So a predicted and a real trace can be opened beside
each other. What the tracer does not see follows below the warps of the CTA: the tensor pipe, copies, reductions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undertow.timeline.rows import Row, lanes, rows_of
from undertow.timing.results import Kind, Span, Timeline

CATEGORY = "predicted"
LIFE = "Warp Life Time"
STACK, MARKER = "StackedRanges", "Marker"
HARDWARE = ("GPC(ID not available)", "TPC(ID not available)|VSM(ID not available)")  # as where the tracer has none
STACK_RANK, MARKER_RANK = 100, 200  # below the ranges that do not nest
SEQUENCE = 1  # all packets are of one writer


class TraceError(ValueError):
    """A trace that cannot be written; the message says why."""


@dataclass
class _Trace:
    """Packets under construction. nanoseconds: per cycle."""

    builder: Any
    nanoseconds: float
    tracks: int = 0
    children: dict[int, int] = field(default_factory=dict)

    def track(self, name: str, parent: int = 0, *, rank: int | None = None, description: str = "") -> int:
        """A new track below `parent`, at `rank` or behind those that are there; its uuid."""
        self.tracks += 1
        described = self._packet().track_descriptor
        described.uuid, described.name = self.tracks, name
        described.child_ordering = described.EXPLICIT
        if parent:
            described.parent_uuid = parent
            described.sibling_order_rank = self.children.get(parent, 0) if rank is None else rank
            self.children[parent] = described.sibling_order_rank + 1
        if description:
            described.description = description
        return self.tracks

    def event(self, track: int, edge: str, cycle: float, name: str = "", **told: Any) -> None:
        """edge: SLICE_BEGIN, SLICE_END or INSTANT. told: shown with it."""
        packet = self._packet()
        packet.timestamp = round(cycle * self.nanoseconds)
        event = packet.track_event
        event.type, event.track_uuid = getattr(event, f"TYPE_{edge}"), track
        if name:
            event.name = name
            event.categories.append(CATEGORY)
        for key, value in told.items():
            annotation = event.debug_annotations.add()
            annotation.name = key
            setattr(annotation, {int: "int_value", float: "double_value", str: "string_value"}[type(value)], value)

    def _packet(self) -> Any:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        if len(self.builder.trace.packet) == 1:
            packet.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
        return packet


def write_trace(timelines: Timeline | Sequence[Timeline], path: Path, clock_mhz: float | None = None) -> None:
    """Write timelines, each as a grid of one CTA, for ui.perfetto.dev.

    clock_mhz: of the SM, to turn cycles into time; without it the viewer's nanosecond is one cycle.
    Raises: TraceError if perfetto is not installed, the clock is not positive, or the file cannot be written.
    """
    content = trace([timelines] if isinstance(timelines, Timeline) else timelines, clock_mhz)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error}") from error


def trace(timelines: Sequence[Timeline], clock_mhz: float | None = None) -> bytes:
    """The content of the file: see write_trace."""
    if clock_mhz is not None and not clock_mhz > 0:
        raise TraceError(f"clock_mhz={clock_mhz}: must be above 0")
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError as error:
        raise TraceError(f"a trace needs perfetto, which cannot be imported: {error}") from error
    written = _Trace(TraceProtoBuilder(), 1 if clock_mhz is None else 1e3 / clock_mhz)
    root = written.track("Root")
    for number, timeline in enumerate(timelines, start=1):
        _grid(written, root, timeline, number)
    return written.builder.serialize()


def _grid(written: _Trace, root: int, timeline: Timeline, number: int) -> None:
    scale = "1 ns is one SM cycle" if written.nanoseconds == 1 else f"one SM cycle is {written.nanoseconds:.6g} ns"
    assumed = ", ".join(timeline.assumed) or "none"
    told = f"Predicted for {timeline.chip}, nothing is measured; {scale}. Assumed constants: {assumed}."
    grid = written.track(f"Grid{number}", root, description=told)
    written.event(
        grid, "SLICE_BEGIN", 0.0, f"kernel:{timeline.kernel}, gridId: {number}", chip=timeline.chip, told=told
    )
    written.event(grid, "SLICE_END", timeline.cycles)
    cta = grid
    for name in (*HARDWARE, "CTA(0, 0, 0)"):
        cta = written.track(name, cta)
    rows = rows_of(timeline)
    for row in sorted((row for row in rows if row.warp is not None), key=lambda row: row.warp or 0):
        _warp(written, cta, row, timeline)
    for row in rows:
        if row.warp is None:
            name = "tensor pipe" if row.role == "tensor" else row.name
            for lane in lanes(row.spans):
                _slices(written, written.track(name, cta), lane)


def _warp(written: _Trace, cta: int, row: Row, timeline: Timeline) -> None:
    track = written.track(f"Warp{row.warp:02d}", cta, description=row.role)
    end = max([span.end for span in row.spans], default=timeline.cycles)
    written.event(track, "SLICE_BEGIN", 0.0, LIFE, role=row.role)
    written.event(track, "SLICE_END", end)
    for lane in lanes(row.spans):
        _slices(written, written.track(STACK, track, rank=max(STACK_RANK, written.children.get(track, 0))), lane)
    met = [meeting for meeting in timeline.meetings if row.name in meeting.rows]
    if met:
        markers = written.track(MARKER, track, rank=MARKER_RANK)
        for meeting in met:
            written.event(markers, "INSTANT", meeting.at, meeting.name, warps=len(meeting.rows))


def _slices(written: _Trace, track: int, spans: Sequence[Span]) -> None:
    """Spans that nest, as begins and ends in the order of a stack."""
    for cycle, span in _edges(spans):
        if span is None:
            written.event(track, "SLICE_END", cycle)
        else:
            told: dict[str, Any] = {"kind": span.kind.value, "cycles": float(span.end - span.begin)}
            if span.tile >= 0:
                told["tile"] = span.tile
            name = f"wait {span.name}" if span.kind is Kind.WAIT else span.name
            written.event(track, "SLICE_BEGIN", cycle, name, **told)


def _edges(spans: Sequence[Span]) -> Iterator[tuple[float, Span | None]]:
    """Moments at which a span begins, or (None) the innermost one ends."""
    open_: list[Span] = []
    for span in spans:
        while open_ and open_[-1].end <= span.begin:
            yield open_.pop().end, None
        yield span.begin, span
        open_.append(span)
    while open_:
        yield open_.pop().end, None
