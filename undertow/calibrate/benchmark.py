"""What a benchmark is: which probes it launches, and what their results say about a chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from undertow.calibrate.probe import Probe

ALL = 0  # as many CTAs as there are SMs
SUBPARTITIONS = 4  # of an SM; each issues one warp instruction per cycle
BAND = (5, 95)  # percentiles that a range lies between


@dataclass(frozen=True)
class Launch:
    """One probe as it is launched. count: iterations. ctas: how many, or ALL. floats: of the buffer, per CTA."""

    probe: Probe
    count: int
    ctas: int = 1
    floats: int = 32

    @property
    def name(self) -> str:
        return f"{self.probe.name}-{'all' if self.ctas == ALL else self.ctas}"


@dataclass(frozen=True)
class Measured:
    """A constant as it was measured. low, high: what the repetitions, or the ways to measure it, lie between.

    how: the measurement in words. is_constant: the timing model reads it; the others are for people.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    how: str
    is_constant: bool = True


Results = Mapping[str, np.ndarray]
"""Name of a launch -> 64-bit results (repetitions, CTAs, slots)."""


@dataclass(frozen=True)
class Benchmark:
    """name: as `--only` says it. what: for `--list`. evaluate: from the results of all launches."""

    name: str
    what: str
    launches: tuple[Launch, ...]
    evaluate: Callable[[Results], list[Measured]]


def measured(name: str, samples: np.ndarray | list, unit: str, how: str, is_constant: bool = True) -> Measured:
    """The median, and the 5th and 95th percentile."""
    values = np.asarray(samples, dtype=np.float64).ravel()
    low, high = np.percentile(values, BAND)
    return Measured(name, float(np.median(values)), float(low), float(high), unit, how, is_constant)


def between(name: str, values: list[float], unit: str, how: str, is_constant: bool = True) -> Measured:
    """The first of several values, and the range of all of them."""
    return Measured(name, float(values[0]), float(min(values)), float(max(values)), unit, how, is_constant)


def cycles(results: np.ndarray) -> np.ndarray:
    """From the first warp's begin to the last warp's end, of every repetition and CTA of `loops.loop`.

    Warps that have written nothing do not count.
    """
    begin, end = results[..., 0::4], results[..., 2::4]
    return end.max(-1) - np.where(begin == 0, np.iinfo(np.int64).max, begin).min(-1)
