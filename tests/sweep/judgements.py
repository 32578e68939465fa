"""Cells judged by hand, for tests of what is made of a judgement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from undertow.sweep import records
from undertow.sweep.cell import Judged, Measured
from undertow.sweep.matrix import CELLS, Cell
from undertow.sweep.records import Record

BY_NAME = {cell.name: cell for cell in CELLS}
CELL = BY_NAME["mha-dense-512-bf16"]
DETERMINISTIC = BY_NAME["mha-dense-512-bf16-deterministic"]
SECONDS = {"elapsed": 2.0, "processor": 1.5}
RIGHT = Measured(
    schedule="split",
    backend="compiled",
    errors=(1e-3, 2e-3, 3e-3),
    complaint="",
    tiles=4,
    compute_barriers_per_tile=0.0,
    instructions={"mma": 160.0},
    in_loops={"mma": 120.0},
    setting="fixed order, eager",
    findings=[],
    bits=None,
)
FINDING = {"kernel": "main", "rule": "race", "message": "two warps, one cell"}


def judged(*measured: Measured) -> Judged:
    return Judged((1e-3, 2e-3, 2e-3), (1e-7, 1e-7, 1e-7), list(measured))


def measured(**changes: Any) -> Measured:
    return replace(RIGHT, **changes)


def record_of(*parts: Measured, cell: Cell = CELL) -> Record:
    return records.record(cell, judged(*parts), SECONDS)


@dataclass(frozen=True)
class Kernels:
    """A runner that runs nothing: every cell is right, but for those whose names are in `wrong` or `broken`."""

    schedules: tuple[str, ...] = ("split",)
    wrong: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    def __call__(self, cell: Cell) -> Record:
        if cell.name in self.broken:
            return records.broken(cell, "ZeroDivisionError: division by zero", SECONDS)
        findings = [FINDING] if cell.name in self.wrong else []
        return record_of(*(measured(schedule=name, findings=findings) for name in self.schedules), cell=cell)
