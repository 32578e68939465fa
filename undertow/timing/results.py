"""What a timing run says, as data: spans on rows, waits, the shares of units, and predictions with their bands.

Rows, pipelines and barriers have the names of the plan. Times are SM cycles from the start of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a span of a row is."""

    WORK = "work"  # a warp issues, or an engine is busy
    WAIT = "wait"  # a warp waits for a pipeline, a barrier or a unit
    TRANSFER = "transfer"  # a copy or a reduction is under way


@dataclass(frozen=True)
class Span:
    """An interval of a row. row: `compute warp 4`, `tensor`, `tma`. name: `QK`, `softmax`, `load_mma_q.full`.

    tile: which query tile of the CTA it belongs to, from 0; -1 where that is not known.
    """

    row: str
    name: str
    kind: Kind
    begin: float
    end: float
    tile: int = -1


@dataclass(frozen=True)
class Meeting:
    """A barrier at which warps of several rows meet, at the moment the last one arrives."""

    name: str
    at: float
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """A step of the critical path: why `row` could not go on earlier. cycles: what this link adds to a tile."""

    row: str
    name: str
    reason: str
    cycles: float


@dataclass(frozen=True)
class Phases:
    """What a CTA costs in cycles: prologue + per_tile[kind] for each of its tiles + epilogue.

    per_tile: kind of tile (unmasked, masked) -> cycles. prologue and epilogue include the filling and draining.
    """

    prologue: float
    per_tile: Mapping[str, float]
    epilogue: float


@dataclass(frozen=True)
class Timeline:
    """One replay of one CTA with one set of constants.

    tile_begins: when each tile began, on the row that paces the kernel. utilisation: share of time in which a unit was
    busy in the steady state. stalls: role -> reason -> cycles per tile and warp, mean over its warps. assumed: the
    names of the constants used here that are marked assumed. phases: what the parts of the CTA cost.
    assumptions: what the recording took for granted about control flow that depends on time.
    """

    kernel: str
    chip: str
    cycles: float
    cycles_per_tile: float
    tile_begins: tuple[float, ...]
    spans: tuple[Span, ...]
    meetings: tuple[Meeting, ...]
    utilisation: Mapping[str, float]
    stalls: Mapping[str, Mapping[str, float]]
    critical_path: tuple[Link, ...]
    assumed: tuple[str, ...] = ()
    phases: Phases | None = None
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """A number with what is known of it: at the best guesses, and over draws from all ranges.

    band: 5th and 95th percentile. sensitivity: constant -> rank correlation with the number over the draws.
    """

    point: float
    median: float
    band: tuple[float, float]
    draws: tuple[float, ...]
    sensitivity: Mapping[str, float]
