"""A sweep: every cell once, what is known is not done again, and nothing that happens to a cell happens to another."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from tests.sweep.judgements import CELL, DETERMINISTIC, Kernels
from undertow import pool
from undertow.sweep import run
from undertow.sweep.matrix import CELLS, Cell
from undertow.sweep.records import Record, RecordFile
from undertow.sweep.run import Runner, sweep

FIVE = CELLS[:5]


@dataclass(frozen=True)
class Counted(Kernels):
    """Counts its cells in a list."""

    done: list[str] | None = None

    def __call__(self, cell: Cell) -> Record:
        assert self.done is not None
        self.done.append(cell.name)
        return super().__call__(cell)


@dataclass(frozen=True)
class Dying(Kernels):
    """Takes the process with it at some cells; never the one of the test."""

    deadly: tuple[str, ...] = ()
    parent: int = 0

    def __call__(self, cell: Cell) -> Record:
        time.sleep(0.05)
        if cell.name in self.deadly and os.getpid() != self.parent:
            os._exit(9)
        return super().__call__(cell)


def test_records_come_in_the_order_of_the_cells_and_are_on_disk(tmp_path):
    path = tmp_path / "sweep.jsonl"
    done = sweep(FIVE, Kernels(), RecordFile(path))
    assert [record.cell for record in done.records] == [cell.name for cell in FIVE]
    assert done.known == 0 and not done.wrong and done.findings == 0
    assert {record.cell for record in RecordFile(path).records} == {cell.name for cell in FIVE}


def test_a_sweep_goes_on_where_another_has_stopped(tmp_path):
    path, names = tmp_path / "sweep.jsonl", []
    sweep(FIVE[1:3], Kernels(), RecordFile(path))
    done = sweep(FIVE, Counted(done=names), RecordFile(path))
    assert sorted(names) == sorted(cell.name for cell in (FIVE[0], *FIVE[3:]))
    assert len(done.records) == 5 and done.known == 2
    again = sweep(FIVE, Counted(done=names), RecordFile(path))
    assert len(names) == 3 and again.records == done.records and again.known == 5


def test_what_was_done_before_an_interrupt_is_kept(tmp_path):
    path, names = tmp_path / "sweep.jsonl", []

    class Interrupted(Counted):
        def __call__(self, cell: Cell) -> Record:
            if len(names) == 2:
                raise KeyboardInterrupt
            return super().__call__(cell)

    with pytest.raises(KeyboardInterrupt):
        sweep(FIVE, Interrupted(done=names), RecordFile(path))
    assert [record.cell for record in RecordFile(path).records] == names and len(names) == 2


def test_a_broken_cell_keeps_the_others(tmp_path, monkeypatch):
    def judge(cell: Cell, schedules, arch) -> None:
        raise ZeroDivisionError(f"of {cell.name}")

    monkeypatch.setattr(run, "judge", judge)
    record = Runner(("split",))(CELL)
    assert record.broken and record.complaints == [f"ZeroDivisionError: of {CELL.name} (in judge)"]
    assert record.seconds.keys() == {"elapsed", "processor"}

    names = []
    runner = Counted(broken=(FIVE[2].name,), done=names)
    done = sweep(FIVE, runner, RecordFile(tmp_path / "sweep.jsonl"))
    assert [r.cell for r in done.wrong] == [FIVE[2].name] and len(done.records) == 5
    sweep(FIVE, runner, RecordFile(tmp_path / "sweep.jsonl"))
    assert names[5:] == [FIVE[2].name], "the broken one, and only that, is tried again"


def test_a_process_that_dies_takes_its_own_cell_only(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "WORTH_SECONDS", 0.0)
    cells = CELLS[:5]  # of about the same length: the first that other processes get is the last but one
    deadly = (cells[3].name,)
    done = sweep(cells, Dying(deadly=deadly, parent=os.getpid()), RecordFile(tmp_path / "sweep.jsonl"), jobs=2)
    assert [(r.cell, r.complaints) for r in done.wrong] == [(*deadly, ["the process that ran it has died"])]
    assert len(done.records) == 5


def test_the_longest_cells_do_not_come_last(tmp_path):
    names = []
    sweep(CELLS, Counted(done=names), RecordFile(tmp_path / "sweep.jsonl"))
    by_name = {cell.name: run.work(cell) for cell in CELLS}
    works = [by_name[name] for name in names]
    assert works[0] == min(works) and works[1:] == sorted(works[1:], reverse=True)


def test_progress_is_told(tmp_path):
    steps = []
    sweep([CELL, DETERMINISTIC], Kernels(wrong=(CELL.name,)), RecordFile(tmp_path / "sweep.jsonl"), step=steps.append)
    assert steps[0] == f"[{'.' * 24}] 0 of 2 cells"
    assert steps[-1] == f"[{'#' * 24}] 2 of 2 cells, 1 not ok"
