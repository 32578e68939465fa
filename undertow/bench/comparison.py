"""What the records say of this package beside the others: cell by cell, and over all cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from undertow.bench.providers import UNDERTOW
from undertow.bench.records import CYCLES, MEASURED, TIMES, Record
from undertow.sweep.matrix import CELLS, Cell

_CELLS = {cell.name: cell for cell in CELLS}
_PLACES = {name: place for place, name in enumerate(_CELLS)}


@dataclass(frozen=True)
class Lead:
    """How many times faster this package is than the best other one in a cell; by times, or by cycles."""

    cell: str
    device: str
    best_peer: str
    ratio: float


def speed(record: Record) -> float | None:
    """Larger is faster: TFLOP/s, or passes in a million cycles; None without a measurement."""
    if record.status != MEASURED:
        return None
    if record.kind == CYCLES:
        return 1e6 / record.cycles if record.cycles else None
    return record.tflops


def leads(records: Iterable[Record], kind: str) -> list[Lead]:
    """One for each cell in which this package and somebody else are measured, in order."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        value = speed(record)
        if record.kind == kind and value is not None:
            cells.setdefault((record.cell, record.device), {})[record.provider] = value
    found = []
    for (cell, device), speeds in cells.items():
        ours = speeds.pop(UNDERTOW, None)
        if ours is not None and speeds:
            best = max(speeds, key=lambda name: speeds[name])
            found.append(Lead(cell, device, best, ours / speeds[best]))
    return found


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """None of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def by_factor(found: Iterable[Lead]) -> dict[str, dict[str, tuple[float, int]]]:
    """Geometric mean of the ratios, and how many cells, for each value of each factor of the sweep."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for lead in found:
        cell = _CELLS.get(lead.cell)
        if cell is not None:
            for factor, value in _factors(cell).items():
                ratios.setdefault(factor, {}).setdefault(value, []).append(lead.ratio)
    return {
        factor: {value: (geometric_mean(of_value) or math.nan, len(of_value)) for value, of_value in of_factor.items()}
        for factor, of_factor in ratios.items()
    }


def _factors(cell: Cell) -> dict[str, str]:
    return {
        "heads": cell.layout,
        "mask": {"plain": "causal" if cell.causal else "dense", "local": "window", "varlen": "packed"}[cell.kind],
        "length": str(cell.seqlen),
        "dtype": cell.dtype,
        "mode": "deterministic" if cell.deterministic else "any order",
    }


def table(records: Sequence[Record], kind: str) -> list[str]:
    """Lines, of each device a row a cell, a column a provider, the lead at the end; then who has no number, and why."""
    of_kind = [record for record in records if record.kind == kind]
    lines: list[str] = []
    for device in dict.fromkeys(record.device for record in of_kind):
        lines += [*_of_device([record for record in of_kind if record.device == device], device, kind), ""]
    return lines + [
        f"{r.status.upper()} {r.cell}, {r.provider}: {r.complaint}" for r in of_kind if r.status != MEASURED
    ]


def _of_device(of_kind: Sequence[Record], device: str, kind: str) -> list[str]:
    providers = list(dict.fromkeys(record.provider for record in of_kind))
    ratios = {lead.cell: lead.ratio for lead in leads(of_kind, kind)}
    rows = [[f"{device}, {'TFLOP/s' if kind == TIMES else 'million cycles'}", *providers]]
    rows[0] += ["matmul", "ours / best"] if kind == TIMES else ["ours / best"]
    cells = {(record.cell, record.provider): record for record in of_kind}
    for cell in sorted(dict.fromkeys(record.cell for record in of_kind), key=_place):
        told = [_told(cells.get((cell, provider))) for provider in providers]
        ceiling = next((r.ceiling_tflops for r in of_kind if r.cell == cell and r.ceiling_tflops), None)
        lead = f"{ratios[cell]:.3f}" if cell in ratios else "-"
        product = ["-" if ceiling is None else f"{ceiling:.0f}"] if kind == TIMES else []
        rows.append([cell, *told, *product, lead])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(word.rjust(width) if column else word.ljust(width) for column, (word, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths)) for row in rows)
    ]


def _place(cell: str) -> int:
    """Of a cell in the matrix, whatever order they were measured in; behind it, if it is none of it."""
    return _PLACES.get(cell, len(_PLACES))


def _told(record: Record | None) -> str:
    if record is None:
        return "-"
    if record.status != MEASURED:
        return record.status
    if record.kind == CYCLES:
        assert record.cycles is not None
        return f"{record.cycles / 1e6:.3f}"
    assert record.tflops is not None and record.median_ms and record.p20_ms is not None and record.p80_ms is not None
    spread = (record.p80_ms - record.p20_ms) / record.median_ms / 2
    return f"{record.tflops:.0f} +-{spread:.1%}"
