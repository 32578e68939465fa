"""The picture of a run: spans of every row, and the barriers at which rows meet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from .results import Kind as SpanKind
from .results import Meeting, Span
from .run import Reason, Run
from .steady import Steady
from .trace import ENGINES, Trace
from .uops import Kind, Unit
from .usage import waited_for

TENSOR_ROW, LOAD_ROW, READ_ROW = "tensor", "tma", "bulk reduce"
SHORTEST_WAIT = 4.0  # cycles; a shorter one is part of the work around it
_WAITS = (Kind.WAIT, Kind.BARRIER_SYNC, Kind.WGMMA_WAIT, Kind.COPY_WAIT, Kind.TMEM_WAIT_LOAD, Kind.TMEM_WAIT_STORE)


def spans(trace: Trace, run: Run, steady: Steady) -> tuple[Span, ...]:
    """All spans, warps first."""
    found = [span for warp in range(trace.num_warps) for span in _of_warp(trace, run, steady, warp)]
    return (*found, *_of_tensor(trace, run), *_of_copies(trace, run, steady))


def meetings(trace: Trace, run: Run) -> tuple[Meeting, ...]:
    """Every completed round of a named barrier that warps of several rows take part in."""
    rows: dict[int, list[str]] = defaultdict(list)
    for warp, row in enumerate(trace.roles):
        part = trace.stream(warp)
        kind = trace.uops[trace.uop[part], 0]
        for token in trace.argument[part][np.isin(kind, (Kind.BARRIER_SYNC, Kind.BARRIER_ARRIVE))].tolist():
            if token >= 0 and row not in rows[token]:
                rows[token].append(row)
    return tuple(
        Meeting(trace.token_names[token], float(run.tokens[token]), tuple(met))
        for token, met in sorted(rows.items()) if len(met) > 1
    )  # fmt: skip


def _of_warp(trace: Trace, run: Run, steady: Steady, warp: int) -> Iterator[Span]:
    part, row = trace.stream(warp), trace.roles[warp]
    issued = run.issued[part]
    if not len(issued):
        return
    uops = trace.uops[trace.uop[part]]
    tile, names = _tiles(trace, run, steady, warp), _Work(uops)
    ended = issued + uops[:, 2]
    gap = np.append(0.0, issued[1:] - ended[:-1])
    reason = run.reason[part]
    waits = np.isin(uops[:, 0], _WAITS) | (reason == Reason.MMA_QUEUE)
    waits |= (uops[:, 0] == Kind.FENCE) & (reason == Reason.FENCE)
    begin = 0  # of the work
    for i in np.flatnonzero(waits & (gap >= SHORTEST_WAIT)).tolist():
        yield Span(row, names.of(begin, i), SpanKind.WORK, float(issued[begin]), float(ended[i - 1]), int(tile[begin]))
        name = waited_for(trace, part.start + i)
        yield Span(row, name, SpanKind.WAIT, float(issued[i] - gap[i]), float(issued[i]), int(tile[i]))
        begin = i
    end = len(issued)
    yield Span(row, names.of(begin, end), SpanKind.WORK, float(issued[begin]), float(ended[-1]), int(tile[begin]))
    yield from _of_arrivals(trace, warp, issued, tile)


def _of_arrivals(trace: Trace, warp: int, issued: np.ndarray, tile: np.ndarray) -> Iterator[Span]:
    """What a warp says to others: each arrival on an mbarrier, by the name of the side that it completes."""
    part, row = trace.stream(warp), trace.roles[warp]
    uops, tokens = trace.uops[trace.uop[part]], trace.argument[part]
    for i in np.flatnonzero((uops[:, 0] == Kind.ARRIVE) & (tokens >= 0)).tolist():
        end = float(issued[i] + uops[i, 2])
        yield Span(row, trace.token_names[tokens[i]], SpanKind.WORK, float(issued[i]), end, int(tile[i]))


class _Work:
    """Names pieces of a warp's work by the instructions in them."""

    def __init__(self, uops: np.ndarray):
        kind, unit = uops[:, 0], np.where(uops[:, 0] == Kind.ARITHMETIC, uops[:, 1], 0)
        marks = {
            "softmax": unit == Unit.MUFU, "issue": np.isin(kind, (Kind.WGMMA, Kind.MMA)), "dS": unit == Unit.CONVERT,
            "copy": kind == Kind.COPY, "store": kind == Kind.STORE,
        }  # fmt: skip
        self._counts = {name: np.append(0, np.cumsum(mark)) for name, mark in marks.items()}

    def of(self, begin: int, end: int) -> str:
        """The name of the work of instructions [begin, end)."""
        return next((name for name, count in self._counts.items() if count[end] > count[begin]), "work")


def _tiles(trace: Trace, run: Run, steady: Steady, warp: int) -> np.ndarray:
    """The query tile that each instruction of a warp belongs to.

    By a wait that the warp does once per tile; by time, where it has none.
    """
    part, tiles = trace.stream(warp), len(steady.begins)
    kind = trace.uops[trace.uop[part], 0]
    waits = np.flatnonzero((kind == Kind.WAIT) & (trace.argument[part] >= 0))
    names = [trace.token_names[token] for token in trace.argument[part][waits].tolist()]
    regular = [name for name, count in Counter(names).items() if count == tiles]
    if not regular:
        return np.searchsorted(steady.begins, run.issued[part], side="right") - 1
    marks = np.zeros(len(kind), int)
    marks[[place for place, name in zip(waits, names, strict=True) if name == regular[0]]] = 1
    return np.cumsum(marks) - 1


def _of_tensor(trace: Trace, run: Run) -> Iterator[Span]:
    """A span per GEMM: neighbouring MMAs of one GEMM and one issuing warp."""
    mmas = np.flatnonzero(np.isin(trace.operations[:, 0], (ENGINES.index("wgmma"), ENGINES.index("tensor"))))
    mmas = mmas[np.argsort(run.operations[mmas, 1], kind="stable")]
    seen: dict[tuple[int, str], int] = defaultdict(int)
    keys = trace.operations[mmas][:, [1, 6]]
    groups = np.split(mmas, np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1) if len(mmas) else []
    for group in groups:
        warp, gemm = trace.operations[group[0], [1, 6]].tolist()
        name = trace.gemms[gemm]
        begin, end = float(run.operations[group[0], 1]), float(run.operations[group[-1], 2])
        yield Span(TENSOR_ROW, name, SpanKind.WORK, begin, end, seen[warp, name])
        seen[warp, name] += 1


def _of_copies(trace: Trace, run: Run, steady: Steady) -> Iterator[Span]:
    for operation in range(len(trace.operations)):
        engine, token = ENGINES[trace.operations[operation, 0]], int(trace.operations[operation, 5])
        issued, begun, ended = (float(x) for x in run.operations[operation])
        if np.isnan(ended):
            continue
        if engine in ("tensor_load", "bulk_load"):
            name = trace.token_names[token] if token >= 0 else engine
            tile = trace.tile_tokens.index(token) if token in trace.tile_tokens else -1
            yield Span(LOAD_ROW, name, SpanKind.TRANSFER, issued, ended, tile)
        elif engine in ("bulk_reduce", "bulk_store"):
            tile = int(np.searchsorted(steady.begins, begun, side="right")) - 1
            yield Span(READ_ROW, engine.replace("_", " "), SpanKind.TRANSFER, begun, ended, tile)
