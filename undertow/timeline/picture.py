"""One steady tile as a picture: the tensor pipe's GEMMs above, below them every warp, barriers as red dashed lines.

Several are drawn below each other on one scale. What is drawn is predicted, if nobody says that it was measured: times
are a replay's, and boxes whose length rests on constants that nobody has measured are hatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from undertow.plan.drawing import ALARM, GRID, INK, MUTED, PAPER, Drawing, fill_of
from undertow.timeline.looks import FILLS, RELEASE, WAIT_FILL, Look, guessed, hint, look_of, releases_s
from undertow.timeline.rows import Row, lanes, rows_of
from undertow.timeline.sections import arrives, sectioned
from undertow.timeline.window import PictureError, Window, joined, steady, ticks
from undertow.timing.results import Kind, Prediction, Span, Timeline

__all__ = ["PictureError", "draw"]

LEFT, WIDTH, RIGHT = 148, 960, 24  # pixels: names of rows, the longest window, margin
HEAD, AXIS, FOOT = 62, 46, 58  # pixels above the rows of a panel, below them, below all panels
TALL, ROW, GAP, BLOCK = 36, 20, 3, 9  # pixels: the tensor pipe's row, another's, between rows, between roles
BRIEF = ("tensor", "compute")
CHARACTER = 6.6  # pixels of one at size 12, at most
LETTER = 10.5  # pixels of one at size 18 in bold, at most
LEGIBLE = 15  # pixels: the lowest box with a name in it
FAINT = 0.55  # opacity of the hatching, so that names stay readable


@dataclass(frozen=True)
class _Panel:
    """A schedule in the picture. top: pixels; scale: pixels per cycle."""

    timeline: Timeline
    window: Window
    rows: tuple[Row, ...]
    top: float
    scale: float
    hints: bool

    def hint(self, span: Span) -> str:
        return hint(span) if self.hints else ""

    def x(self, cycle: float) -> float:
        return LEFT + cycle * self.scale

    @cached_property
    def places(self) -> dict[str, tuple[float, float]]:
        """Row -> y and height, pixels."""
        places: dict[str, tuple[float, float]] = {}
        y, role = self.top + HEAD, self.rows[0].role
        for row in self.rows:
            y += BLOCK if row.role != role else 0
            role = row.role
            height = max(TALL if role == "tensor" else ROW, LEGIBLE * len(self.tracks(row)))
            places[row.name] = (y, height)
            y += height + GAP
        return places

    def tracks(self, row: Row) -> list[list[Span]]:
        """What is drawn of a row, in one track, or in several where copies overlap."""
        pieces = list(self.window.clipped(joined([span for span in row.spans if not arrives(span)])))
        return lanes(pieces) if row.warp is None else [pieces]

    @property
    def bottom(self) -> float:
        y, height = self.places[self.rows[-1].name]
        return y + height


def draw(
    timelines: Timeline | Sequence[Timeline],
    *,
    tiles: int = 1,
    predictions: Mapping[str, Prediction] | None = None,
    brief: bool = False,
    hints: bool = True,
    measured: Mapping[str, str] | None = None,
) -> str:
    """SVG of `tiles` steady tiles of every timeline, all on one scale.

    predictions: of cycles per tile, by kernel, for the band in the heading. brief: only the tensor pipe and the compute
    warps, as the published figures have them. hints: what a box is, under the pointer; it makes the file larger.
    measured: kernel -> how, of those that were run and traced.
    Raises: PictureError without timelines, or for one with fewer tiles.
    """
    several = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not several:
        raise PictureError("timelines: there is none to draw")
    how = measured or {}
    panels = _panels(several, tiles, brief, hints)
    names = ", ".join(panel.timeline.kernel for panel in panels)
    chips = ", ".join(sorted({timeline.chip for timeline in several}))
    drawing = Drawing(
        LEFT + WIDTH + RIGHT,
        int(panels[-1].bottom + AXIS + FOOT),
        f"{_kinds(several, how)} timeline of {names} on {chips}, {_count(tiles)}",
        _description(panels, predictions or {}),
    )
    for panel in panels:
        known = (predictions or {}).get(panel.timeline.kernel)
        _heading(drawing, panel, known, how.get(panel.timeline.kernel))
        _axis(drawing, panel)
        for row in panel.rows:
            _row(drawing, panel, row)
        _meetings(drawing, panel)
    replayed = any(timeline.kernel not in how for timeline in several)
    _legend(drawing, panels, panels[-1].bottom + AXIS + 18, replayed)
    return drawing.svg()


def _panels(timelines: Sequence[Timeline], tiles: int, brief: bool, hints: bool) -> list[_Panel]:
    windows = [steady(timeline, tiles) for timeline in timelines]
    scale = WIDTH / max(window.cycles for window in windows)
    panels, top = [], 8.0
    for timeline, window in zip(timelines, windows, strict=True):
        rows = [sectioned(row) for row in rows_of(timeline) if not brief or row.role in BRIEF]
        panel = _Panel(timeline, window, _busy(rows, window), top, scale, hints)
        if not panel.rows:
            raise PictureError(f"{timeline.kernel}: nothing happens in cycles {window.begin:.0f} to {window.end:.0f}")
        panels.append(panel)
        top = panel.bottom + AXIS
    return panels


def _busy(rows: Sequence[Row], window: Window) -> tuple[Row, ...]:
    """The rows on which something happens within the window."""
    return tuple(row for row in rows if any(True for _ in window.clipped(row.spans)))


def _kinds(timelines: Sequence[Timeline], measured: Mapping[str, str]) -> str:
    words = [
        word
        for word in ("Predicted", "Measured")
        if any((t.kernel in measured) == (word == "Measured") for t in timelines)
    ]
    return " and ".join(words).capitalize()


def _count(tiles: int) -> str:
    return "one steady tile" if tiles == 1 else f"{tiles} steady tiles"


def _cycles(timeline: Timeline, prediction: Prediction | None) -> str:
    """`2980 cycles per tile`, and what is known of the number."""
    if prediction is None:
        return f"{timeline.cycles_per_tile:.0f} cycles per tile"
    low, high = prediction.band
    told = f"{prediction.point:.0f} cycles per tile"
    return f"{told} at the best guesses; over the ranges {prediction.median:.0f}, 90% in {low:.0f} to {high:.0f}"


def _description(panels: Sequence[_Panel], predictions: Mapping[str, Prediction]) -> str:
    """What the picture says, for who does not see it."""
    sentences = []
    for panel in panels:
        timeline = panel.timeline
        meets = len(list(_wide(panel)))
        spans = [span for row in panel.rows if row.role == "tensor" for span in panel.window.clipped(row.spans)]
        order = ", ".join(look_of(span, panel.window.tile).text for span in joined(spans))
        told = _cycles(timeline, predictions.get(timeline.kernel))
        tensor = f"; the tensor pipe computes {order}" if order else ""
        sentences.append(f"{timeline.kernel}: {told}{tensor}; {meets} barriers of all compute warps.")
    return " ".join(sentences)


def _heading(drawing: Drawing, panel: _Panel, prediction: Prediction | None, measured: str | None) -> None:
    drawing.text(20, panel.top + 26, f"**{panel.timeline.kernel}**", size=18)
    assumed = len(panel.timeline.assumed)
    known = f"{assumed} of its constants assumed" if assumed else "no constant of it assumed"
    line = f"predicted for {panel.timeline.chip} ({known}): {_cycles(panel.timeline, prediction)}"
    if measured is not None:
        line = f"measured on {panel.timeline.chip} ({measured}): {_cycles(panel.timeline, None)}"
    drawing.text(max(LEFT, 40 + LETTER * len(panel.timeline.kernel)), panel.top + 26, line, size=14, ink=MUTED)


def _axis(drawing: Drawing, panel: _Panel) -> None:
    top, bottom = panel.top + HEAD - 8, panel.bottom + 6
    for cycle in ticks(panel.window.cycles):
        x = panel.x(cycle)
        drawing.line((x, top), (x, bottom), GRID, dashes="2 3")
        drawing.text(x, bottom + 14, f"{cycle:.0f}", size=12, anchor="middle", ink=MUTED)
    end = panel.x(panel.window.cycles)
    drawing.line((end, top), (end, bottom), INK)
    drawing.text(LEFT - 12, bottom + 14, "SM cycles", size=12, anchor="end", ink=MUTED)


def _row(drawing: Drawing, panel: _Panel, row: Row) -> None:
    y, height = panel.places[row.name]
    name = "tensor pipe" if row.role == "tensor" else row.name.replace(" warp ", " ")
    drawing.text(LEFT - 12, y + height / 2 + 4, name, size=12, anchor="end", ink=INK)
    tracks = panel.tracks(row)
    for number, track in enumerate(tracks):
        place = (y + height / len(tracks) * number, height / len(tracks))
        for span in sorted(track, key=lambda span: span.kind is not Kind.WAIT):
            _span(drawing, panel, span, place)
    for span in panel.window.clipped([span for span in row.spans if releases_s(span)]):
        drawing.bar(panel.x(span.end) - 1.5, y - 1, 3, height + 2, RELEASE, hint=panel.hint(span))


def _span(drawing: Drawing, panel: _Panel, span: Span, place: tuple[float, float]) -> None:
    y, height = place
    if span.kind is Kind.WAIT:  # light and low: nothing happens
        y, height = y + height * 0.32, height * 0.36
    x, end = panel.x(span.begin), panel.x(span.end)
    look: Look = look_of(span, panel.window.tile)
    drawing.bar(x, y, max(0.8, end - x), height, look.fill, hint=panel.hint(span))
    if guessed(span, panel.timeline.assumed) and end - x > 2:
        drawing.hatch(x, y, end - x, height, opacity=FAINT)
    if look.text and len(look.text) * CHARACTER + 4 <= end - x and height >= LEGIBLE:
        drawing.text((x + end) / 2, y + height / 2 + 4, look.text, size=12, anchor="middle")


def _wide(panel: _Panel) -> list[tuple[float, str]]:
    """Barriers of all compute warps within the window: when the last one arrives, and the name."""
    compute = {row.name for row in panel.rows if row.role == "compute"}
    window = panel.window
    return [
        (meeting.at - window.begin, meeting.name)
        for meeting in panel.timeline.meetings
        if len(compute) > 1 and compute <= set(meeting.rows) and window.begin <= meeting.at < window.end
    ]


def _meetings(drawing: Drawing, panel: _Panel) -> None:
    places = [panel.places[row.name] for row in panel.rows if row.role == "compute"]
    for at, _ in _wide(panel):
        x = panel.x(at)
        top, (y, height) = places[0][0], places[-1]
        drawing.line((x, top - 7), (x, y + height + 6), ALARM, dashes="6 4")


def _legend(drawing: Drawing, panels: Sequence[_Panel], y: float, replayed: bool) -> None:
    x = float(LEFT)
    spans = [(p.timeline, span) for p in panels for row in p.rows for span in p.window.clipped(row.spans)]
    shown = {look_of(span, 0).fill for _, span in spans}
    for name, fill in (*FILLS.items(), ("dQ", fill_of("dQ"))):
        if fill in shown:
            x = _entry(drawing, x, y, fill, name)
    x = _entry(drawing, x, y, WAIT_FILL, "waits")
    if any(releases_s(span) for _, span in spans):
        x = _entry(drawing, x, y, RELEASE, "S is handed back", width=4)
    if any(_wide(panel) for panel in panels):
        drawing.line((x, y - 5), (x + 22, y - 5), ALARM, dashes="6 4")
        drawing.text(x + 28, y, "barrier of all compute warps, at the last arrival", size=12, ink=MUTED)
    line = "Predicted: by a replay of executed instructions, nothing in it is measured." if replayed else ""
    hatched = any(guessed(span, timeline.assumed) for timeline, span in spans)
    if hatched:
        drawing.bar(LEFT, y + 14, 22, 12, PAPER)
        drawing.hatch(LEFT, y + 14, 22, 12, opacity=FAINT)
        line = f"Length rests on assumed constants. {line}"
    drawing.text(LEFT + (28 if hatched else 0), y + 24, line, size=12, ink=MUTED)


def _entry(drawing: Drawing, x: float, y: float, fill: str, name: str, width: float = 22) -> float:
    drawing.bar(x, y - 11, width, 13, fill)
    drawing.text(x + width + 6, y, name, size=12, ink=MUTED)
    return x + width + 6 + len(name) * CHARACTER + 14
