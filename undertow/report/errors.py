"""The section of the model's errors: predicted beside measured cycles, where the GPU is at hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undertow.report.page import Label, Missing, Part, Prose, Section, Source, Table

KEY, TITLE = "errors", "How far the model is off"
COMMAND = "python tools/timeline_validate.py results/hopper/cycles.jsonl"


class ErrorsFileError(ValueError):
    """A file that does not hold predicted and measured cycles; the message names it and the line."""


def section(path: Path) -> Section:
    """A row for each measurement, and what they come to. path: what `tools/timeline_validate.py --output` wrote.

    Raises: ErrorsFileError.
    """
    made = f"{COMMAND} --output {path}"
    if not path.exists():
        parts: list[Part] = [Missing(f"the errors of the model, because there is no file `{path}`", made)]
        return Section(KEY, TITLE, COMMAND, parts)
    records = read(path)
    if not records:
        missing = Missing(f"the errors of the model, because `{path}` has no records", made)
        return Section(KEY, TITLE, COMMAND, [missing])
    gpus = ", ".join(dict.fromkeys(record["gpu"] for record in records))
    measured = Source(Label.MEASURED, f"`{path}`, {gpus}, cycles of the main kernel")
    predicted = Source(Label.PREDICTED, f"`{path}`, from constants that know nothing of these measurements", COMMAND)
    rows = [_row(record) for record in records]
    table = Table(
        "Cycles of a launch of the main kernel, in millions.",
        (
            "kernel",
            "shape",
            "measured",
            "predicted median",
            "5th percentile",
            "95th percentile",
            "error",
            "in the band",
        ),
        (None, None, measured, *[predicted] * 5),
        rows,
    )
    return Section(KEY, TITLE, COMMAND, [Prose(_sum(records), predicted), table])


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file.

    Raises: ErrorsFileError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ErrorsFileError(f"{path}: cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            numbers = [record["measured"], record["predicted"]["median"], *record["predicted"]["band"]]
            words = [record[name] for name in ("kernel", "shape", "gpu")]
        except (ValueError, KeyError, TypeError) as error:
            raise ErrorsFileError(f"{path}: line {number} is no record of a validation: {error!r}") from error
        if not all(isinstance(x, int | float) and x > 0 for x in numbers) or not all(isinstance(x, str) for x in words):
            raise ErrorsFileError(f"{path}: line {number}: cycles must be above 0, and names text")
        records.append(record)
    return records


def error(record: dict[str, Any]) -> float:
    """Of the median, relative to what was measured."""
    return record["predicted"]["median"] / record["measured"] - 1


def inside(record: dict[str, Any]) -> bool:
    low, high = record["predicted"]["band"]
    return low <= record["measured"] <= high


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    low, high = record["predicted"]["band"]
    numbers = (record["measured"], record["predicted"]["median"], low, high)
    millions = (f"{number / 1e6:.2f}" for number in numbers)
    return record["kernel"], record["shape"], *millions, f"{error(record):+.1%}", "yes" if inside(record) else "no"


def _sum(records: Sequence[dict[str, Any]]) -> str:
    errors = [abs(error(record)) for record in records]
    count = sum(map(inside, records))
    mean = sum(errors) / len(errors)
    return (
        f"Mean absolute error {mean:.1%}, worst {max(errors):.1%}; {count} of {len(records)} measurements lie in the "
        f"band of 5th to 95th percentile."
    )
