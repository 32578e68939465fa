"""What a tracer saw of a kernel with spans (`kernels.events`), as the timeline that predictions are drawn from.

Reads the decoded JSON of `run-iket`. Its times are nanoseconds in steps of 32, so single spans are rough; a clock rate
turns them into cycles.
"""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.plan.schema import Plan
from undertow.timing.results import Kind, Span, Timeline

PACE = "softmax"  # the span that every compute warp has once a tile


class RecordError(ValueError):
    """A trace that cannot be read, or does not hold the kernel; the message names the file and what it has."""


@dataclass(frozen=True)
class Source:
    """What the trace does not say. gigahertz: of the SMs meanwhile. chip: name of the GPU."""

    plan: Plan
    gigahertz: float
    chip: str


def read_timeline(path: Path, source: Source, cta: int | None = None) -> Timeline:
    """The last launch of the plan's kernel in a trace, which may be gzipped. cta: the first that was recorded if None.

    Raises: RecordError.
    """
    try:
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        return timeline_of(trace, source, cta)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: {error}") from error


def timeline_of(trace: Mapping[str, Any], source: Source, cta: int | None = None) -> Timeline:
    """The same from decoded JSON.

    Raises: RecordError for a trace without the kernel or the CTA.
    """
    launch = _launch(trace)
    locations, strings = trace["locationTable"], trace["stringTable"]
    recorded = sorted({locations[life["locIdx"]]["ctaId"][0] for life in launch["warpLifetimes"]})
    wanted = cta if cta is not None else recorded[0]
    if wanted not in recorded:
        raise RecordError(f"CTA {wanted} was not recorded; the trace has {recorded[:8]}")
    start = min(life["startTs"] for life in launch["warpLifetimes"] if _is_of(locations[life["locIdx"]], wanted))
    spans = []
    for found in launch["ranges"]:
        where = locations[found["warpLocIdxs"][0]]
        if _is_of(where, wanted):
            begin, end = ((found[side] - start) * source.gigahertz for side in ("startTs", "endTs"))
            name = strings[found["rangeNameIdx"]]
            spans.append(Span(_row(source.plan, where["warpId"]), name, _kind(source.plan, name), begin, end))
    return _timeline(source, launch["kernelName"], numbered(spans))


def _launch(trace: Mapping[str, Any]) -> Mapping[str, Any]:
    launches = [launch for launch in trace["launches"] if launch["ranges"]]
    if not launches:
        names = [launch["kernelName"] for launch in trace["launches"]]
        raise RecordError(f"no kernel in it has spans; launches: {', '.join(names) or 'none'}")
    return launches[-1]


def _is_of(location: Mapping[str, Any], cta: int) -> bool:
    return location["ctaId"][0] == cta


def _row(plan: Plan, warp: int) -> str:
    role = next(role.name for role in plan.roles if warp in role.warps)
    return f"{role} warp {warp}"


def _kind(plan: Plan, name: str) -> Kind:
    barriers = {barrier.name.rstrip("01") for barrier in plan.barriers}
    return Kind.WAIT if "." in name or name in barriers else Kind.WORK


def numbered(spans: Iterable[Span]) -> tuple[Span, ...]:
    """In order of time, each with the tile that its row is at: how often it has begun `PACE` before, or -1."""
    counts: dict[str, int] = {}
    out = []
    for span in sorted(spans, key=lambda span: span.begin):
        counts[span.row] = counts.get(span.row, -1) + (span.name == PACE)
        out.append(Span(span.row, span.name, span.kind, span.begin, span.end, counts[span.row]))
    return tuple(out)


def _timeline(source: Source, kernel: str, spans: tuple[Span, ...]) -> Timeline:
    paced = next((span.row for span in spans if span.name == PACE), "")
    begins = tuple(span.begin for span in spans if span.row == paced and span.name == PACE)
    steps = [after - before for before, after in itertools.pairwise(begins)]
    return Timeline(
        kernel=kernel,
        chip=source.chip,
        cycles=max((span.end for span in spans), default=0.0),
        cycles_per_tile=statistics.median(steps) if steps else 0.0,
        tile_begins=begins,
        spans=spans,
        meetings=(),
        utilisation={},
        stalls=_stalls(source.plan, spans, len(begins)),
        critical_path=(),
    )


def _stalls(plan: Plan, spans: tuple[Span, ...], tiles: int) -> dict[str, dict[str, float]]:
    """Role -> what is waited for -> cycles per tile and warp."""
    found: dict[str, dict[str, float]] = {}
    for span in spans:
        if span.kind is Kind.WAIT and tiles:
            role = span.row.split(" ")[0]
            of_role = found.setdefault(role, {})
            share = (span.end - span.begin) / (tiles * len(plan.role(role).warps))
            of_role[span.name] = of_role.get(span.name, 0.0) + share
    return found
