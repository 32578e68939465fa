"""The section of the timelines: a steady tile of every schedule, how busy the units are, and who waits for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from undertow.report.page import Figure, Part, Section, Source, Table
from undertow.timeline.picture import draw
from undertow.timing.results import Prediction, Timeline

KEY, TITLE = "timelines", "Timelines of a tile"
COMMAND = "undertow timeline"
SHOWN = 6  # half of the reasons to wait, and of the constants


def section(timelines: Sequence[Timeline], predictions: Mapping[str, Prediction], source: Source) -> Section:
    """predictions: of cycles per tile, by kernel.

    Raises: PictureError for a run without a whole tile.
    """
    pictures: list[Part] = [
        Figure(draw(timelines, predictions=predictions, brief=True), "All schedules on one scale.", source)
    ]
    pictures += [
        Figure(draw(timeline, predictions=predictions), f"`{timeline.kernel}`: every warp and engine.", source)
        for timeline in timelines
    ]
    tables = [_lengths(timelines, predictions, source), _units(timelines, source), _stalls(timelines, source)]
    return Section(KEY, TITLE, COMMAND, [*pictures, *tables, *_sensitive(predictions, source)])


def traced(measured: Timeline, replayed: tuple[Timeline, Source] | None, source: Source, how: str) -> Figure:
    """A kernel that was run and traced, below what is predicted for it if anything is. source: of the trace."""
    slower = "tracing slows a kernel down, so that it is to be compared who works when, not how long"
    if replayed is None:
        drawn = draw(measured, measured={measured.kernel: how})
        return Figure(drawn, f"The SM90 kernel as it was traced; {slower}.", source)
    timeline, by = replayed
    drawn = draw([timeline, measured], measured={measured.kernel: how})
    return Figure(drawn, f"The SM90 kernel as it was traced, below its prediction; {slower}.", by, (source,))


def _lengths(timelines: Sequence[Timeline], predictions: Mapping[str, Prediction], source: Source) -> Table:
    rows = []
    for timeline in timelines:
        known = predictions[timeline.kernel]
        low, high = known.band
        numbers = (known.point, known.median, low, high)
        rows.append((timeline.kernel, *(f"{number:.0f}" for number in numbers), str(len(timeline.assumed))))
    return Table(
        "Cycles of a steady tile: at the best guesses, and over draws from the ranges of all constants.",
        ("schedule", "best guesses", "median", "5th percentile", "95th percentile", "constants assumed"),
        (None, *[source] * 5),
        rows,
    )


def _units(timelines: Sequence[Timeline], source: Source) -> Table:
    units = list(dict.fromkeys(unit for timeline in timelines for unit in timeline.utilisation))
    return Table(
        "Share of the time in which a unit is busy in the steady state, at the best guesses.",
        ("unit", *(timeline.kernel for timeline in timelines)),
        (None, *[source] * len(timelines)),
        [(unit, *(_percent(timeline.utilisation.get(unit)) for timeline in timelines)) for unit in units],
    )


def _stalls(timelines: Sequence[Timeline], source: Source) -> Table:
    """The reasons that cost most in any schedule."""
    costs: dict[tuple[str, str], list[float]] = {}
    for place, timeline in enumerate(timelines):
        for role, reasons in timeline.stalls.items():
            for reason, cycles in reasons.items():
                costs.setdefault((role, reason), [0.0] * len(timelines))[place] = cycles
    shown = sorted(costs, key=lambda key: (-max(costs[key]), key))[: 2 * SHOWN]
    return Table(
        "What a warp waits for, cycles per tile, at the best guesses; the most expensive reasons.",
        ("role", "waits for", *(timeline.kernel for timeline in timelines)),
        (None, None, *[source] * len(timelines)),
        [(role, _reason(reason), *(f"{cycles:.0f}" for cycles in costs[role, reason])) for role, reason in shown],
    )


def _sensitive(predictions: Mapping[str, Prediction], source: Source) -> list[Part]:
    """The constants that some schedule's length depends on most."""
    found: dict[str, float] = {}
    for known in predictions.values():
        for name, correlation in known.sensitivity.items():
            found[name] = max(found.get(name, 0.0), abs(correlation))
    shown = sorted(found, key=lambda name: (-found[name], name))[: 2 * SHOWN]
    if not shown:
        return []
    columns = ("constant", *predictions)
    rows = [(f"`{name}`", *(_correlation(known, name) for known in predictions.values())) for name in shown]
    caption = "Constants that the length of a tile depends on most: rank correlation over the draws."
    return [Table(caption, columns, (None, *[source] * len(predictions)), rows)]


def _correlation(known: Prediction, name: str) -> str:
    return f"{known.sensitivity[name]:+.2f}" if name in known.sensitivity else "-"


def _reason(words: str) -> str:
    """Names of hand-overs and barriers are code, other reasons are words."""
    return words if " " in words else f"`{words}`"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
