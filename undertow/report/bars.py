"""Bars in groups, with bands: numbers of several sources beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from undertow.plan.drawing import GRID, INK, MUTED, Drawing
from undertow.timeline.window import ticks

LEFT, RIGHT, TOP, PLOT, FOOT = 66, 24, 58, 270, 74  # pixels: numbers, margin, heading, plot, names below
LEGEND = 30  # pixels of a line of the legend
BAR, GAP = 30, 26  # pixels: the widest bar, between groups
CHARACTER = 7.2  # pixels of one at size 13, at most


@dataclass(frozen=True)
class Look:
    """How a series is drawn. hatched: a prediction that rests on assumed constants."""

    fill: str
    hatched: bool = False


@dataclass(frozen=True)
class Bar:
    """A number of a series in a group. band: from where to where it is said to be. told: below the value's hint."""

    group: str
    series: str
    value: float
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class Axis:
    """unit: written at the axis. base: where bars begin. line: a value to be marked across, and its name."""

    unit: str
    base: float = 0.0
    digits: int = 0
    line: tuple[float, str] | None = None


def bars(title: str, axis: Axis, looks: Mapping[str, Look], given: Sequence[Bar], width: int = 1080) -> str:
    """SVG of the bars, groups and series in the order of `given` and `looks`."""
    assert given, "a chart without bars says nothing"
    groups = list(dict.fromkeys(bar.group for bar in given))
    series = [name for name in looks if any(bar.series == name for bar in given)]
    lines = _legend_lines(series, width)
    height = TOP + LEGEND * len(lines) + PLOT + FOOT
    drawing = Drawing(width, height, title, _described(given, axis))
    drawing.text(20, 30, f"**{title}**", size=16)
    for index, names in enumerate(lines):
        _legend(drawing, names, looks, TOP + LEGEND * index)
    scale = _Scale(axis, given, TOP + LEGEND * len(lines) + PLOT)
    _grid(drawing, axis, scale, width)
    room = (width - LEFT - RIGHT) / len(groups)
    thick = min(BAR, (room - GAP) / len(series))
    for place, group in enumerate(groups):
        middle = LEFT + room * (place + 0.5)
        for line, text in enumerate(group.split("\n")):
            drawing.text(middle, scale.bottom + 20 + 17 * line, text, size=13, anchor="middle", ink=INK)
        present = [name for name in series if any((b.group, b.series) == (group, name) for b in given)]
        for number, name in enumerate(present):
            x = middle + (number - len(present) / 2) * thick
            bar = next(b for b in given if (b.group, b.series) == (group, name))
            _bar(drawing, (x, thick - 2), bar, scale, looks[name])
    return drawing.svg()


class _Scale:
    """Values to pixels. bottom: y of the lowest value."""

    def __init__(self, axis: Axis, given: Sequence[Bar], bottom: float):
        ends = [end for bar in given for end in (bar.value, *(bar.band or ()))] + [axis.base]
        ends += [axis.line[0]] if axis.line else []
        self.axis, self.bottom = axis, bottom
        room = (max(ends) - min(ends)) * 0.08 or 1.0
        self.low = axis.base if min(ends) >= axis.base else min(ends) - room
        self.high = max(ends) + room

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * PLOT

    def marks(self) -> list[float]:
        """Round values from the lowest to the highest."""
        thousandths = ticks((self.high - self.low) * 1000, most=9)
        step = thousandths[1] / 1000
        first = -(-self.low // step) * step
        return [first + step * index for index in range(int((self.high - first) // step) + 1)]


def _grid(drawing: Drawing, axis: Axis, scale: _Scale, width: int) -> None:
    for mark in scale.marks():
        drawing.line((LEFT, scale.y(mark)), (width - RIGHT, scale.y(mark)), GRID)
        drawing.text(LEFT - 8, scale.y(mark) + 4, f"{mark:.{axis.digits}f}", size=13, anchor="end", ink=MUTED)
    drawing.text(LEFT, scale.y(scale.high) - 6, axis.unit, size=13, ink=MUTED)
    drawing.line((LEFT, scale.y(axis.base)), (width - RIGHT, scale.y(axis.base)), INK)
    if axis.line:
        value, name = axis.line
        drawing.line((LEFT, scale.y(value)), (width - RIGHT, scale.y(value)), MUTED, dashes="6 4")
        drawing.text(width - RIGHT, scale.y(value) - 5, name, size=13, anchor="end", ink=MUTED)


def _bar(drawing: Drawing, place: tuple[float, float], bar: Bar, scale: _Scale, look: Look) -> None:
    x, thick = place
    digits = scale.axis.digits
    top, base = sorted((scale.y(bar.value), scale.y(scale.axis.base)))
    drawing.bar(x, top, thick, max(1.0, base - top), look.fill, hint=_told(bar, digits))
    if look.hatched:
        drawing.hatch(x, top, thick, max(1.0, base - top), opacity=0.55)
    above = top
    if bar.band is not None:
        low, high = (scale.y(end) for end in bar.band)
        middle = x + thick / 2
        drawing.line((middle, low), (middle, high), INK)
        for end in (low, high):
            drawing.line((middle - 5, end), (middle + 5, end), INK)
        above = min(above, high)
    drawing.text(x + thick / 2, above - 5, f"{bar.value:.{digits}f}", size=11, anchor="middle", ink=INK)


def _told(bar: Bar, digits: int) -> str:
    band = f", {bar.band[0]:.{digits}f} to {bar.band[1]:.{digits}f}" if bar.band else ""
    return f"{' '.join(bar.group.split())}, {bar.series}: {bar.value:.{digits}f}{band}"


def _described(given: Sequence[Bar], axis: Axis) -> str:
    return f"{axis.unit}. " + "; ".join(_told(bar, axis.digits) for bar in given)


def _legend_lines(series: Sequence[str], width: int) -> list[list[str]]:
    """Names of series in as many lines as they need."""
    lines: list[list[str]] = [[]]
    x = float(LEFT)
    for name in series:
        wide = 46 + len(name) * CHARACTER
        if lines[-1] and x + wide > width - RIGHT:
            lines.append([])
            x = LEFT
        lines[-1].append(name)
        x += wide
    return lines


def _legend(drawing: Drawing, names: Sequence[str], looks: Mapping[str, Look], y: float) -> None:
    x = float(LEFT)
    for name in names:
        drawing.bar(x, y - 11, 20, 13, looks[name].fill)
        if looks[name].hatched:
            drawing.hatch(x, y - 11, 20, 13, opacity=0.55)
        drawing.text(x + 26, y, name, size=13, ink=MUTED)
        x += 46 + len(name) * CHARACTER
