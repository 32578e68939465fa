"""The critical path: from the beginning of a tile backwards along whatever came last, until the tile before began."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .results import Link
from .run import Reason, Run
from .spans import LOAD_ROW, READ_ROW, TENSOR_ROW
from .steady import Steady, tile_waits
from .trace import ENGINES, Trace
from .uops import Kind
from .usage import waited_for, why

_MMAS = (ENGINES.index("wgmma"), ENGINES.index("tensor"))
NO_CAUSE = -1


@dataclass(frozen=True)
class _Step:
    """A piece of the path; it ends where the one after it begins."""

    row: str
    name: str
    reason: str
    begin: float
    end: float


def critical_path(trace: Trace, run: Run, steady: Steady) -> tuple[Link, ...]:
    """The links of the steady state, in order of time; their cycles are those of one tile."""
    begin, end = steady.window
    waits = tile_waits(trace)[steady.last]
    start = int(waits[np.argmin(run.issued[waits])])
    merged: list[_Step] = []
    for step in _steps(trace, run, start, begin):
        last = merged[-1] if merged else None
        if last and (last.row, last.name, last.reason) == (step.row, step.name, step.reason):
            merged[-1] = _Step(last.row, last.name, last.reason, step.begin, last.end)
        else:
            merged.append(step)
    sums: dict[tuple[str, str, str], float] = {}
    for step in reversed(merged):
        cycles = min(step.end, end) - max(step.begin, begin)
        key = (step.row.partition(" warp ")[0], step.name, step.reason)
        sums[key] = sums.get(key, 0.0) + max(cycles, 0.0)
    tiles = steady.last - steady.first
    return tuple(Link(*key, cycles / tiles) for key, cycles in sums.items() if cycles / tiles >= 1.0)


def _steps(trace: Trace, run: Run, entry: int, until: float) -> Iterator[_Step]:
    """Backwards from an instruction; a place is an instruction, or -2 - operation."""
    warp_of = np.repeat(np.arange(trace.num_warps), np.diff(trace.begins))
    by_end = _enders(trace, run)
    place, time = entry, float(run.issued[entry])
    while time > until:
        if place >= 0:
            step, place = _before_instruction(trace, run, place, int(warp_of[place]))
        else:
            step, place = _before_operation(trace, run, -2 - place, by_end)
        if step is None:
            return
        yield _Step(step.row, step.name, step.reason, step.begin, time)
        time = step.begin


def _before_instruction(trace: Trace, run: Run, entry: int, warp: int) -> tuple[_Step | None, int]:
    row, cause, now = trace.roles[warp], int(run.cause[entry]), float(run.issued[entry])
    reason = Reason(int(run.reason[entry]))
    follows = reason in (Reason.MBARRIER, Reason.BARRIER, Reason.MMA, Reason.COPY, Reason.MMA_QUEUE)
    if follows and cause < NO_CAUSE:
        end = float(run.operations[-2 - cause, 2])
        return _Step(row, waited_for(trace, entry), "hand-off", min(end, now), now), cause
    if follows and cause >= 0 and cause != entry:
        return _Step(row, waited_for(trace, entry), "hand-off", min(float(run.issued[cause]), now), now), cause
    if entry == int(trace.begins[warp]):
        return None, entry
    if reason is Reason.DATA and 0 <= cause < entry:
        return _Step(row, "", why(trace, run, entry), float(run.issued[cause]), now), cause
    gap = now - float(run.issued[entry - 1]) - int(trace.uops[trace.uop[entry - 1], 2])
    text = why(trace, run, entry) if gap > 1.0 else "issue"
    if text == "issue" and int(trace.uops[trace.uop[entry], 0]) == Kind.WGMMA:
        text = "issue of MMAs"
    return _Step(row, "", text, float(run.issued[entry - 1]), now), entry - 1


def _enders(trace: Trace, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The MMAs in the order in which they end, and when."""
    mmas = np.flatnonzero(np.isin(trace.operations[:, 0], _MMAS))
    mmas = mmas[np.argsort(run.operations[mmas, 2], kind="stable")]
    return mmas, run.operations[mmas, 2]


def _before_operation(
    trace: Trace, run: Run, operation: int, by_end: tuple[np.ndarray, np.ndarray]
) -> tuple[_Step | None, int]:
    engine = ENGINES[trace.operations[operation, 0]]
    issued, begun, ended = (float(x) for x in run.operations[operation])
    gemm = trace.gemms[trace.operations[operation, 6]]
    if engine in ("wgmma", "tensor", "commit"):
        mmas, ends = by_end
        before = int(np.searchsorted(ends, begun + 0.01)) - 1
        follows = before >= 0 and ends[before] >= max(issued, begun - 1.0) and mmas[before] != operation
        name = gemm or "commit"
        if follows:
            return _Step(TENSOR_ROW, name, "runs" if gemm else "completes", begun, ended), -2 - int(mmas[before])
        return _Step(TENSOR_ROW, name, "fills and runs" if gemm else "completes", issued, ended), int(
            run.issuer[operation]
        )
    row = READ_ROW if engine in ("bulk_reduce", "bulk_store") else LOAD_ROW
    token = int(trace.operations[operation, 5])
    name = trace.token_names[token] if token >= 0 else engine.replace("_", " ")
    return _Step(row, name, "copies", issued, ended), int(run.issuer[operation])
