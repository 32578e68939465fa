"""Sustained times in turns: a block of calls of each participant, all participants in a round, the next round reversed.

A GPU under load is held by its power limit, so that what ran before and the temperature change its clock. Turns give
everybody the same conditions; blocks are long enough to be throttled like a training step; clock and power are sampled
while a block runs. The value of a participant is the median of all its calls.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from undertow.bench.providers import Participant


@dataclass(frozen=True)
class Method:
    """rounds: of blocks. block_seconds, fewest_calls: a block is at least so long. warm_calls: before each block."""

    rounds: int = 3
    block_seconds: float = 0.25
    fewest_calls: int = 3
    warm_calls: int = 2


class Sample(NamedTuple):
    """clock_mhz: of the multiprocessors. power_w: of the board. reasons: NVML's bits, why the clock is no higher."""

    clock_mhz: float
    power_w: float
    reasons: int


class Stopwatch(Protocol):
    def seconds(self, work: Callable[[], Any], calls: int) -> list[float]:
        """Time of each of `calls` calls of `work` on the device, one enqueued behind the other; waits for them."""
        ...


class Monitor(Protocol):
    def watch(self) -> AbstractContextManager[list[Sample]]:
        """Samples are added to the list while the block runs; none if the device cannot be asked."""
        ...


@dataclass(frozen=True)
class Block:
    """Consecutive calls of one participant."""

    name: str
    seconds: list[float]
    samples: list[Sample]


@dataclass(frozen=True)
class Timing:
    """Of one participant over all rounds. Milliseconds of a call: median, 20th and 80th percentile.

    blocks_ms: median of each block, in the order of rounds. clock_mhz, power_w: mean of all samples, None without.
    throttle_reasons: all bits seen (0x4 is the software power cap), None without samples.
    """

    calls: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    blocks_ms: list[float]
    clock_mhz: float | None
    power_w: float | None
    throttle_reasons: int | None


def turn(names: Sequence[str], round_index: int) -> list[str]:
    """The order of one round: as given, and reversed in every second one."""
    return list(names) if round_index % 2 == 0 else list(reversed(names))


def measure(
    participants: Sequence[Participant],
    method: Method,
    stopwatch: Stopwatch,
    monitor: Monitor,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Timing]:
    """Time all participants in turns; by name."""
    by_name = {participant.name: participant for participant in participants}
    assert len(by_name) == len(participants), "participants have names of their own"
    blocks: list[Block] = []
    for round_index in range(method.rounds):
        for name in turn(list(by_name), round_index):
            say(f"round {round_index + 1} of {method.rounds}, {name}")
            blocks.append(_block(by_name[name], method, stopwatch, monitor))
    return {name: summary([block for block in blocks if block.name == name]) for name in by_name}


def _block(participant: Participant, method: Method, stopwatch: Stopwatch, monitor: Monitor) -> Block:
    with participant.around():
        warm = stopwatch.seconds(participant.call, method.warm_calls)
        calls = max(method.fewest_calls, math.ceil(method.block_seconds / min(warm)))
        with monitor.watch() as samples:
            seconds = stopwatch.seconds(participant.call, calls)
    return Block(participant.name, seconds, list(samples))


def summary(blocks: Sequence[Block]) -> Timing:
    """What is told of the blocks of one participant."""
    calls = [second * 1e3 for block in blocks for second in block.seconds]
    samples = [sample for block in blocks for sample in block.samples]
    p20, p80 = percentile(calls, 20), percentile(calls, 80)
    reasons = 0
    for sample in samples:
        reasons |= sample.reasons
    return Timing(
        len(calls),
        statistics.median(calls),
        p20,
        p80,
        [statistics.median(block.seconds) * 1e3 for block in blocks],
        statistics.fmean(sample.clock_mhz for sample in samples) if samples else None,
        statistics.fmean(sample.power_w for sample in samples) if samples else None,
        reasons if samples else None,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of all lie, linear between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
