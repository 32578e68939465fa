"""The section of the chips: every constant of a model with its range, where it comes from, and how sure we are."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.report.page import Cell, Label, Missing, Part, Section, Source, Table
from undertow.timing.chip import Chip, Constant, read_chip
from undertow.timing.constants import CONSTANTS
from undertow.timing.grid_time import LAUNCH_CONSTANTS

KEY, TITLE = "chips", "Constants of the chips"
COMMAND = "undertow calibrate"
MEANINGS = CONSTANTS | LAUNCH_CONSTANTS


def section(names: Sequence[str]) -> Section:
    """A table for each chip. Raises: ChipError for one that cannot be read."""
    parts: list[Part] = [_table(read_chip(name)) for name in names]
    if not parts:
        parts.append(Missing("the constants of a chip, because the package has no chip file", COMMAND))
    return Section(KEY, TITLE, COMMAND, parts)


def _table(chip: Chip) -> Table:
    counts = [
        f"{count} {confidence}"
        for confidence in ("measured", "published", "inferred", "assumed")
        if (count := sum(one.confidence == confidence for one in chip.constants.values()))
    ]
    columns = ("constant", "value", "from", "to", "unit", "how sure", "source", "what it is")
    return Table(
        f"`{chip.name}` ({chip.arch}): {chip.what.rstrip('.')}. {len(chip.constants)} constants: {', '.join(counts)}.",
        columns,
        (None,) * len(columns),
        [_row(constant) for constant in chip.constants.values()],
    )


def _row(constant: Constant) -> tuple[str | Cell, ...]:
    source = Source(Label(constant.confidence), f"{constant.source}, {constant.date.isoformat()}")
    numbers = [Cell(_short(number), source) for number in (constant.value, constant.low, constant.high)]
    sure = Cell(constant.confidence, source)
    return f"`{constant.name}`", *numbers, constant.unit, sure, Cell(source.text, source), _what(constant)


def _what(constant: Constant) -> str:
    """What the file says that it is, else what the model reads it as."""
    spec = MEANINGS.get(constant.name)
    return constant.what or (spec.what if spec else "")


def _short(number: float) -> str:
    return f"{number:.6g}"
