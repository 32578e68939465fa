"""Many cells over the cores, each done once: what is known already is read, what is new is written at once."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol

import torch

from undertow.pool import apart, each
from undertow.sweep.cell import judge
from undertow.sweep.matrix import Cell
from undertow.sweep.records import Record, RecordFile, broken, record

BAR = 24  # characters of the progress bar


@dataclass(frozen=True)
class Sweep:
    """The records of all cells asked for, in their order; how many of them were known before; seconds elapsed."""

    records: list[Record]
    known: int
    seconds: float

    @property
    def wrong(self) -> list[Record]:
        """Those that are not ok, the broken ones first."""
        return sorted((r for r in self.records if not r.ok), key=lambda r: not r.broken)

    @property
    def findings(self) -> int:
        """Findings of the observers."""
        return sum(len(r.findings) for r in self.records)

    def worst(self, count: int) -> list[Record]:
        """Those with the largest ratios to the ideal pipeline."""
        having = [r for r in self.records if r.ratio is not None]
        return sorted(having, key=lambda r: -(r.ratio or 0.0))[:count]


class Runs(Protocol):
    """Makes the record of a cell, whatever happens, on some schedules; can be pickled for other processes."""

    @property
    def schedules(self) -> tuple[str, ...]: ...
    def __call__(self, cell: Cell, /) -> Record: ...


@dataclass(frozen=True)
class Runner:
    """The one of the kernels of this package. schedules: of the architecture."""

    schedules: tuple[str, ...]
    arch: str = "sm100"

    def __call__(self, cell: Cell) -> Record:
        torch.set_num_threads(1)  # there is a process for every core
        elapsed, processor = time.perf_counter(), time.process_time()

        def seconds() -> dict[str, float]:
            return {
                "elapsed": round(time.perf_counter() - elapsed, 3),
                "processor": round(time.process_time() - processor, 3),
            }

        try:
            return record(cell, judge(cell, self.schedules, self.arch), seconds())
        except Exception as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            return broken(cell, f"{type(error).__name__}: {error} (in {last.name})", seconds())


def sweep(
    cells: Sequence[Cell],
    runner: Runs,
    file: RecordFile,
    jobs: int = 1,
    step: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Have `runner` judge `cells`, but for those that `file` has a usable record of.

    Raises: RecordError if a record cannot be written.
    """
    begin = time.perf_counter()
    records = file.usable(cells, runner.schedules)
    known = len(records)
    todo = _well_ordered([cell for cell in cells if cell.name not in records])
    step(_progress(known, len(cells), records))
    for new in _records(runner, todo, jobs):
        file.append(new)
        records[new.cell] = new
        step(_progress(len(records), len(cells), records))
    return Sweep([records[cell.name] for cell in cells], known, time.perf_counter() - begin)


def work(cell: Cell) -> int:
    """Tiles that a cell would have without a mask: what its time is about proportional to."""
    size = cell.watched
    return size.heads.q * sum((-(-length // 128)) ** 2 for length in size.lengths)


def _well_ordered(cells: Sequence[Cell]) -> list[Cell]:
    """A short one first, by which the pool sees what a cell takes, then the longest, so that none of them is the last.

    Twins without and with the deterministic mode, which need other kernels, come next to each other: two processes
    that need the same kernel at the same time would both compile it.
    """
    falling = sorted(cells, key=lambda cell: -work(cell))
    return falling[-1:] + falling[:-1]


def _records(runner: Runs, cells: Sequence[Cell], jobs: int) -> Iterator[Record]:
    """Records as they get done. A process that dies, of lack of memory say, takes no cell with it but its own."""
    left = list(cells)
    while left:
        done = set()
        try:
            for position, new in each(runner, left, jobs):
                done.add(position)
                yield new
            return
        except BrokenProcessPool:
            left = [cell for position, cell in enumerate(left) if position not in done]
            # processes take cells in order: the one that died had one of the first `jobs` of those that are left
            for cell in left[:jobs]:
                yield _apart(runner, cell)
            left = left[jobs:]


def _apart(runner: Runs, cell: Cell) -> Record:
    begin = time.perf_counter()
    try:
        return apart(runner, cell)
    except BrokenProcessPool:
        return broken(cell, "the process that ran it has died", {"elapsed": round(time.perf_counter() - begin, 3)})


def _progress(done: int, total: int, records: dict[str, Record]) -> str:
    filled = BAR * done // max(1, total)
    wrong = sum(not r.ok for r in records.values())
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {done} of {total} cells{f', {wrong} not ok' if wrong else ''}"
