"""A chip as data: the constants of its units, each with a range and a source, read from a TOML file.

A constant that nobody measured is `assumed`, and every picture draws it hatched. No constant is fitted to a number that
a prediction is judged by.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent / "chips"
CONFIDENCES = ("measured", "published", "inferred", "assumed")


class ChipError(ValueError):
    """A chip file that cannot be used; the message names the file, the constant and what is allowed."""


@dataclass(frozen=True)
class Constant:
    """One property of a unit. value: the best guess; low, high: it is between these. A switch is 0 or 1."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    source: str
    date: date
    confidence: str
    what: str = ""


@dataclass(frozen=True)
class Chip:
    """All constants of a chip. arch: of the PTX it runs, such as sm_90a."""

    name: str
    what: str
    arch: str
    num_sms: int
    constants: Mapping[str, Constant]

    def point(self) -> dict[str, float]:
        """Every constant at its value."""
        return {name: constant.value for name, constant in self.constants.items()}

    def draw(self, seed: int) -> dict[str, float]:
        """Every constant drawn from its range, independently; switches by a coin. The same seed, the same draw."""
        generator = np.random.default_rng(seed)
        return {name: _drawn(self.constants[name], generator) for name in sorted(self.constants)}


def names() -> tuple[str, ...]:
    """The chips that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read_chip(name: str) -> Chip:
    """Read a chip of the package by its name, or a file by its path.

    Raises: ChipError where there is none, or where the file does not say what a chip needs.
    """
    path = FOLDER / f"{name}.toml" if name in names() else Path(name)
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ChipError(f"chip {name!r}: no such chip and no such file; allowed: {', '.join(names())}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ChipError(f"chip {name!r}: {error}") from error
    return _chip(path, content)


def _chip(path: Path, content: dict[str, Any]) -> Chip:
    missing = [key for key in ("name", "what", "arch", "num_sms", "constants") if key not in content]
    if missing:
        raise ChipError(f"{path}: has no {', '.join(missing)}")
    constants = {name: _constant(path, name, entry) for name, entry in content["constants"].items()}
    return Chip(content["name"], content["what"], content["arch"], content["num_sms"], constants)


def _constant(path: Path, name: str, entry: dict[str, Any]) -> Constant:
    missing = [key for key in ("value", "range", "unit", "source", "date", "confidence") if key not in entry]
    if missing:
        raise ChipError(f"{path}: constant {name} has no {', '.join(missing)}")
    if entry["confidence"] not in CONFIDENCES:
        allowed = ", ".join(CONFIDENCES)
        raise ChipError(f"{path}: constant {name}: confidence is {entry['confidence']!r}; allowed: {allowed}")
    low, high = entry["range"]
    if not low <= entry["value"] <= high:
        raise ChipError(f"{path}: constant {name}: value {entry['value']} is outside its range [{low}, {high}]")
    about = {key: entry[key] for key in ("unit", "source", "date", "confidence")}
    return Constant(name, float(entry["value"]), float(low), float(high), what=entry.get("what", ""), **about)


def _drawn(constant: Constant, generator: np.random.Generator) -> float:
    drawn = float(generator.uniform(constant.low, constant.high))
    return float(drawn >= 0.5) if constant.unit == "switch" and constant.low != constant.high else drawn
