"""What others have published of their kernel on a B200, for comparison only: no constant is fitted to it."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().with_name("published.toml")


@dataclass(frozen=True)
class Throughput:
    """A pair of bars of Figure 6, TFLOP/s: the baseline, and with slots and per-warp signals."""

    figure: int
    batch: int
    seqlen: int
    heads: tuple[int, int]
    mask: str
    dtype: str
    deterministic: bool
    before_tflops: float
    after_tflops: float
    speedup: float


@dataclass(frozen=True)
class Gain:
    """A bar of Figure 7: speed-up of a schedule over the baseline, by sustained throughput."""

    figure: int
    schedule: str
    mask: str
    speedup: tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """A traced tile: by which part of the baseline's cycles it is shorter."""

    figure: int
    schedule: str
    mask: str
    shorter: float
    tiles: int | None = None

    @property
    def speedup(self) -> float:
        """Ratio of cycles, baseline over this."""
        return 1 / (1 - self.shorter)


@dataclass(frozen=True)
class Published:
    """All of it, with where it stands and how it was measured."""

    title: str
    code: str
    gpu: str
    method: str
    peak_tflops: float
    throughput: tuple[Throughput, ...]
    gains: tuple[Gain, ...]
    traces: tuple[Trace, ...]

    def gain(self, schedule: str, mask: str) -> Gain | None:
        return next((gain for gain in self.gains if (gain.schedule, gain.mask) == (schedule, mask)), None)

    def trace(self, schedule: str, mask: str) -> Trace | None:
        return next((trace for trace in self.traces if (trace.schedule, trace.mask) == (schedule, mask)), None)


@functools.cache
def published() -> Published:
    """Read the file of the package."""
    content = tomllib.loads(FILE.read_text())
    return Published(
        title=content["title"],
        code=content["code"],
        gpu=content["gpu"],
        method=content["method"],
        peak_tflops=content["peak_tflops"],
        throughput=tuple(Throughput(**{**one, "heads": tuple(one["heads"])}) for one in content["throughput"]),
        gains=tuple(Gain(**{**one, "speedup": tuple(one["speedup"])}) for one in content["gain"]),
        traces=tuple(Trace(**one) for one in content["trace"]),
    )
