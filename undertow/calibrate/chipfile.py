"""From measurements to a chip file: what was measured, and what of the package's chip still has to be believed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from undertow.calibrate.benchmark import Measured
from undertow.timing.chip import Chip, Constant, names, read_chip

DIGITS = 4  # behind the point
# Only sums of two constants can be seen from outside: measured sum -> the one that is believed, the one that remains
SUMS = {
    "mbarrier_hand_off_one_to_one": ("mbarrier_arrive_latency", "mbarrier_wake_latency"),
    "mma_fill_and_tail_shared": ("{mma}_tail", "{mma}_fill_shared"),
    "mma_fill_and_tail_registers": ("{mma}_tail", "{mma}_fill_register"),
    "mma_fill_and_tail_tensor": ("{mma}_tail", "{mma}_fill_tmem"),
}
MMA = {"sm_90a": "wgmma", "sm_100a": "tcgen05"}


class CalibrationError(ValueError):
    """A measurement that cannot be right, or a chip that cannot be written; the message names it."""


@dataclass(frozen=True)
class About:
    """Where, with what and when constants were measured; every one of them says so."""

    name: str
    gpu: str
    num_sms: int
    arch: str
    driver: str
    command: str
    day: date


def package_chip(arch: str) -> Chip | None:
    """The chip of that architecture that comes with the package, if there is one."""
    chips = [read_chip(name) for name in names()]
    return next((chip for chip in chips if chip.arch == arch), None)


def chip_of(about: About, found: Iterable[Measured], base: Chip | None) -> Chip:
    """A chip with what was measured; constants that were not are those of `base`, and keep their confidence.

    Raises: CalibrationError for a measurement that is no number.
    """
    measured = {each.name: each for each in found}
    for each in measured.values():
        if not all(map(math.isfinite, (each.value, each.low, each.high))):
            raise CalibrationError(f"{each.name} was measured as {each.value}, between {each.low} and {each.high}")
    constants = {} if base is None else dict(base.constants)
    constants |= {name: _constant(about, each) for name, each in measured.items() if each.is_constant}
    for name, each in measured.items():
        if name in SUMS:
            believed, remains = (part.format(mma=MMA[about.arch]) for part in SUMS[name])
            if believed in constants:
                constants[remains] = _remainder(about, each, constants[believed], remains)
    what = f"{about.gpu} ({about.num_sms} SMs, driver {about.driver}), calibrated on {about.day}"
    what += "" if base is None else f"; what was not measured is the package's {base.name}"
    return Chip(about.name, what, about.arch, about.num_sms, constants)


def _constant(about: About, each: Measured) -> Constant:
    return Constant(
        each.name, each.value, each.low, each.high, each.unit, _source(about, each.how), about.day, "measured"
    )


def _remainder(about: About, each: Measured, believed: Constant, name: str) -> Constant:
    """What is left of a measured sum without its other part, at least nothing."""
    how = f"{each.name} of {each.value:.1f} ({each.how}), less {believed.name} of {believed.value:.1f}"
    value, low, high = (
        max(0.0, number) for number in (each.value - believed.value, each.low - believed.high, each.high - believed.low)
    )
    return Constant(name, value, low, high, each.unit, _source(about, how), about.day, "inferred")


def _source(about: About, how: str) -> str:
    return f"{about.command} on {about.gpu}, driver {about.driver}: {how}"


def to_toml(chip: Chip) -> str:
    """The text of a chip file that `read_chip` reads.

    Raises: CalibrationError for a chip without constants.
    """
    if not chip.constants:
        raise CalibrationError(f"chip {chip.name}: nothing was measured, and the package has no chip of {chip.arch}")
    head = {"name": chip.name, "what": chip.what, "arch": chip.arch, "num_sms": chip.num_sms}
    lines = [f"{key} = {json.dumps(value)}" for key, value in head.items()]
    for name, constant in chip.constants.items():
        lines += ["", f"[constants.{name}]", *_entry(constant)]
    return "\n".join(lines) + "\n"


def _entry(constant: Constant) -> list[str]:
    of = replace(
        constant,
        value=round(constant.value, DIGITS),
        low=round(constant.low, DIGITS),
        high=round(constant.high, DIGITS),
    )
    texts = {"unit": of.unit, "confidence": of.confidence, "source": of.source, "what": of.what}
    numbers = [f"value = {of.value}", f"range = [{of.low}, {of.high}]", f"date = {of.date}"]
    return numbers + [f"{key} = {json.dumps(text)}" for key, text in texts.items() if text]


def from_records(path: Path, name: str | None) -> tuple[About, list[Measured]]:
    """Measurements that `records` has told, perhaps of another machine. name: of the chip, that of the GPU if None.

    Raises: CalibrationError for a file that cannot be read, or that holds more than one machine or day.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found = [_of_record(row) for row in rows]
        where = {(row["gpu"], row["num_sms"], row["arch"], row["driver"], row["date"]) for row in rows}
        command = rows[0]["command"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CalibrationError(f"{path}: no records of measurements: {type(error).__name__}: {error}") from error
    if len(where) > 1:
        raise CalibrationError(f"{path}: holds {len(where)} machines or days; a chip file is of one")
    gpu, num_sms, arch, driver, day = where.pop()
    return About(name or short_name(gpu), gpu, num_sms, arch, driver, command, date.fromisoformat(day)), found


def _of_record(row: Mapping[str, Any]) -> Measured:
    low, high = row["range"]
    return Measured(row["name"], row["value"], low, high, row["unit"], row["how"], row["kind"] == "constant")


def short_name(gpu: str) -> str:
    """`NVIDIA H200` is h200."""
    return gpu.lower().removeprefix("nvidia ").replace(" ", "-")


def records(about: About, found: Iterable[Measured]) -> list[Mapping[str, object]]:
    """One record a measurement, also of those that are no constants."""
    where: dict[str, object] = {"gpu": about.gpu, "num_sms": about.num_sms, "arch": about.arch}
    where |= {"driver": about.driver, "date": str(about.day), "command": about.command}
    return [
        {
            "kind": "constant" if each.is_constant else "measurement",
            "name": each.name,
            "value": round(each.value, DIGITS),
            "range": [round(each.low, DIGITS), round(each.high, DIGITS)],
            "unit": each.unit,
            "how": each.how,
            **where,
        }
        for each in found
    ]
