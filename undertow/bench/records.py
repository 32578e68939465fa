"""The file of a benchmark: one JSON line for each cell and provider, written as soon as the cell is done.

A provider that is wrong, unable or broken has a line as well, and no time in it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from undertow.record_file import RecordError, RecordLines

TIMES, CYCLES = "times", "cycles"  # kinds
MEASURED, UNABLE, WRONG, BROKEN = "measured", "unable", "wrong", "broken"  # statuses


@dataclass(frozen=True)
class Record:
    """What is known of one provider in one cell: the fields are the keys of its line.

    kind: TIMES or CYCLES. status: MEASURED; UNABLE (does not compute it), WRONG (gradients), BROKEN (an exception);
    complaint says why. shape: heads, lengths, packed, window, causal, dtype, deterministic, head_dim.
    flops: counted for one backward pass. errors, ideal_budget: relative to float64, by gradient; whole: how far the
    whole gradients were compared with, by name of the other provider.
    TIMES: calls, median_ms, p20_ms, p80_ms, blocks_ms, tflops (of the median), share_of_peak (data sheet),
    ceiling_tflops (8192^3 matrix product, in the same rounds), share_of_ceiling, clock_mhz, power_w, throttle_reasons.
    CYCLES: main_kernel, cycles (of it), share_of_rate (of the tensor cores' operations per cycle), kernels (all of one
    backward pass, in order, name and cycles).
    when: UTC. The rest says what was measured with.
    """

    cell: str
    provider: str
    kind: str
    status: str
    device: str
    driver: str | None
    sources: str
    revision: str | None
    versions: dict[str, str]
    when: str
    shape: dict[str, Any]
    flops: float
    complaint: str | None = None
    errors: dict[str, float | None] | None = None
    ideal_budget: dict[str, float] | None = None
    compared_with: str | None = None
    method: dict[str, Any] | None = None
    calls: int | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    blocks_ms: list[float] | None = None
    tflops: float | None = None
    share_of_peak: float | None = None
    ceiling_tflops: float | None = None
    share_of_ceiling: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    throttle_reasons: int | None = None
    main_kernel: str | None = None
    cycles: float | None = None
    share_of_rate: float | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)


class RecordFile(RecordLines[Record]):
    """The records of a file, and the place for new ones; see `RecordLines`."""

    def __init__(self, path: Path, fresh: bool = False):
        super().__init__(path, "a benchmark", lambda values: Record(**values), fresh)

    def done(self, kind: str, device: str, sources: str, providers: Iterable[str]) -> set[str]:
        """Cells in which each of `providers` has a record of that kind, device and sources."""
        found: dict[str, set[str]] = {}
        for record in self.records:
            if (record.kind, record.device, record.sources) == (kind, device, sources):
                found.setdefault(record.cell, set()).add(record.provider)
        wanted = set(providers)
        return {cell for cell, names in found.items() if wanted <= names}

    def append(self, new: Sequence[Record]) -> None:
        """Write the records of a cell, so that nothing that comes later can lose them."""
        self.write(asdict(record) for record in new)
        self.records += new

    def latest(self) -> list[Record]:
        """The last record of each cell, provider, kind and device, in the order of the file."""
        found: dict[tuple[str, ...], Record] = {}
        for record in self.records:
            key = (record.cell, record.provider, record.kind, record.device)
            found.pop(key, None)
            found[key] = record
        return list(found.values())


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """One row a record; what is nested is JSON in its column.

    Raises: RecordError.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(column.name for column in fields(Record))
            for record in records:
                writer.writerow(_flat(value) for value in asdict(record).values())
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error}") from error


def _flat(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value
