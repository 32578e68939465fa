"""The file of a sweep: one JSON object a line, one line a cell, written as soon as the cell is done.

A line can be used again by a later sweep if the sources and the versions of everything that computes are the same.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import undertow
from undertow.record_file import RecordLines
from undertow.reference import Gradients
from undertow.sweep.cell import Judged, Measured
from undertow.sweep.matrix import Cell, Size

PACKAGE = Path(undertow.__file__).parent
SOURCES = (".py", ".cpp", ".hpp")
COMPUTES = ("nvidia-cutlass-dsl", "numpy", "torch")


@dataclass(frozen=True)
class Record:
    """What a sweep knows of one cell: the fields are the keys of its line.

    cell: its name. ok: gradients within their budgets, nothing found, and if deterministic always the same bits.
    complaints: why it is not; broken: because it could not be judged. size, watched: heads, lengths, window as it was
    run, and under the observers.
    ideal, errors: relative Frobenius errors of the ideal pipeline, and the largest of any schedule.
    ratio: the largest error over its ideal, of those whose ideal is above float32 noise.
    findings: of the observers, with schedule, kernel, rule, message and setting.
    schedules: by name, errors, ratio, tiles (trips of the tile loop), per tile compute_barriers and of each role the
    warp instructions, all and those in_loops; back end, setting of the observed run, and the bits under each order.
    seconds: elapsed, and of the processor. sources: fingerprint.
    """

    cell: str
    ok: bool
    complaints: list[str]
    sources: str
    versions: dict[str, str]
    seconds: dict[str, float]
    broken: bool = False
    size: dict[str, Any] | None = None
    watched: dict[str, Any] | None = None
    ideal: dict[str, float | None] | None = None
    errors: dict[str, float | None] | None = None
    ratio: float | None = None
    findings: list[dict[str, str]] = field(default_factory=list)
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)


def record(cell: Cell, judged: Judged, seconds: dict[str, float]) -> Record:
    """The verdict on a cell."""
    complaints = [f"{m.schedule}: {m.complaint}" for m in judged.measured if m.complaint]
    findings = [
        {"schedule": m.schedule, **finding, "setting": m.setting} for m in judged.measured for finding in m.findings
    ]
    complaints += [f"{f['schedule']}, {f['kernel']}: {f['rule']}: {f['message']}" for f in findings]
    complaints += _bit_complaints(judged.measured)
    errors = [m.errors for m in judged.measured if m.errors is not None]
    ratios = [ratio for m in judged.measured if (ratio := _ratio(judged, m)) is not None]
    return Record(
        cell.name,
        not complaints,
        complaints,
        fingerprint(),
        versions(),
        seconds,
        size=_described(cell.scaled),
        watched=_described(cell.watched),
        ideal=_named(judged.ideal),
        errors=_named([_largest(column) for column in zip(*errors)]) if errors else None,
        ratio=max(ratios, default=None),
        findings=findings,
        schedules={m.schedule: _told(judged, m) for m in judged.measured},
    )


def broken(cell: Cell, why: str, seconds: dict[str, float]) -> Record:
    """The record of a cell that could not be judged."""
    return Record(cell.name, False, [why], fingerprint(), versions(), seconds, broken=True)


def _bit_complaints(measured: Iterable[Measured]) -> list[str]:
    having = [m for m in measured if m.bits]
    complaints = []
    for m in having:
        assert m.bits
        others = [str(order) for order, bits in enumerate(m.bits) if bits != m.bits[0]]
        if others:
            complaints.append(f"{m.schedule}: bits in CTA order {', '.join(others)} are not those of order 0")
    for m in having[1:]:
        if m.bits and having[0].bits and m.bits[0] != having[0].bits[0]:
            complaints.append(f"{m.schedule}: bits are not those of {having[0].schedule}")
    return complaints


def _ratio(judged: Judged, measured: Measured) -> float | None:
    if measured.errors is None:
        return None
    ratios = [e / i for e, i, noise in zip(measured.errors, judged.ideal, judged.floor) if i > noise]
    return _finite(_largest(ratios)) if ratios else None


def _told(judged: Judged, measured: Measured) -> dict[str, Any]:
    return {
        "errors": None if measured.errors is None else _named(measured.errors),
        "ratio": _ratio(judged, measured),
        "tiles": measured.tiles,
        "compute_barriers": measured.compute_barriers_per_tile,
        "instructions": measured.instructions,
        "in_loops": measured.in_loops,
        "backend": measured.backend,
        "setting": measured.setting,
        "bits": measured.bits,
    }


def _described(size: Size) -> dict[str, Any]:
    lengths, window = list(size.lengths), list(size.window)
    return {"heads": size.heads._asdict(), "lengths": lengths, "packed": size.packed, "window": window}


def _largest(values: Iterable[float]) -> float:
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def _named(values: Iterable[float]) -> dict[str, float | None]:
    return dict(zip(Gradients._fields, map(_finite, values)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@functools.cache
def fingerprint() -> str:
    """Digest of all sources of this package and of `versions`."""
    sha = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in SOURCES):
        sha.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:16]


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what computes."""
    packages = {name: importlib.metadata.version(name) for name in COMPUTES}
    return {"undertow": undertow.__version__, "python": platform.python_version(), **packages}


class RecordFile(RecordLines[Record]):
    """The records of a file that are of the same sources, and the place for new ones; see `RecordLines`."""

    def __init__(self, path: Path, fresh: bool = False):
        super().__init__(path, "a sweep", _of_these_sources, fresh)

    def usable(self, cells: Iterable[Cell], schedules: Iterable[str]) -> dict[str, Record]:
        """By name, the records of `cells` that a run of the same sources on the same schedules has judged."""
        names, wanted = {cell.name for cell in cells}, set(schedules)
        return {
            known.cell: known
            for known in self.records
            if known.cell in names and not known.broken and known.schedules.keys() == wanted
        }

    def append(self, new: Record) -> None:
        """Write a record, so that nothing that comes later can lose it."""
        self.write([asdict(new)])


def _of_these_sources(values: dict[str, Any]) -> Record | None:
    return Record(**values) if values["sources"] == fingerprint() else None
