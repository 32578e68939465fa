"""A machine, a clock and providers that need no GPU, for tests of everything around them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

from undertow.bench.cellrun import Bench
from undertow.bench.machine import Machine
from undertow.bench.measure import Method, Sample
from undertow.bench.providers import Participant, UnableError, as_rows
from undertow.bench.records import MEASURED, TIMES, Record
from undertow.bench.workload import Workload
from undertow.reference import Gradients, Scoring, Sequences, attention_forward, ideal_backward, round_to, row_stats
from undertow.sweep.matrix import CELLS, Cell

H200 = Machine(
    device="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    uuid="GPU-0",
    driver="580.1",
    versions={"torch": "2.11.0"},
    sources="0123456789abcdef",
    revision="abc",
)


def cell_named(name: str) -> Cell:
    (found,) = (cell for cell in CELLS if cell.name == name)
    return found


def whole_scoring(workload: Workload) -> Scoring:
    """The mask over all rows of a workload, packed sequences included."""
    packing = Sequences(workload.offsets, workload.offsets) if workload.size.packed else None
    return replace(workload.scoring, sequences=packing)


def ideal_gradients(workload: Workload, scoring: Scoring | None = None) -> Gradients:
    """What a provider with the best 16-bit pipeline gives; with another scoring, what a wrong one gives."""
    scoring = scoring or whole_scoring(workload)
    q, k, v, dout = (workload.shaped(x) for x in (workload.q, workload.k, workload.v, workload.dout))
    forward = attention_forward(q, k, v, scoring)
    stats = row_stats(round_to(forward.out, q.dtype), dout, forward.lse.float())
    return as_rows(workload, ideal_backward(q, k, v, dout, stats, scoring))


class Ideal:
    """A provider that is right. spoil: makes it wrong, given the gradients and how many calls there have been."""

    def __init__(self, name: str = "ideal", spoil: Callable[[Gradients, int], Any] | None = None):
        self.name, self.calls, self._spoil = name, 0, spoil

    def missing(self) -> str | None:
        return None

    def compiles(self, cell: Cell) -> Hashable:
        return cell.dtype

    def prepare(self, workload: Workload) -> Participant:
        right = ideal_gradients(workload)

        def call() -> Gradients:
            self.calls += 1
            gradients = Gradients(*(x.clone() for x in right))
            if self._spoil is not None:
                self._spoil(gradients, self.calls)
            return gradients

        return Participant(self.name, call, lambda raw: raw)


class Unable(Ideal):
    """A provider that has no such thing."""

    def prepare(self, workload: Workload) -> Participant:
        raise UnableError(f"no {workload.cell.kind} here")


class FakeStopwatch:
    """Makes every call once and says how long calls take. seconds_of: by what is called, in order of the blocks."""

    def __init__(self, seconds_of: Callable[[Callable[[], Any], int], float]):
        self._seconds_of, self.blocks = seconds_of, Counter()

    def seconds(self, work: Callable[[], Any], calls: int) -> list[float]:
        work()
        self.blocks[work] += 1
        return [self._seconds_of(work, self.blocks[work])] * calls


class FakeMonitor:
    """Every block is seen once, at a clock that falls from block to block. Who looks away sees nothing."""

    def __init__(self, sees: bool = True):
        self.watched, self._sees = 0, sees

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Sample]]:
        samples: list[Sample] = []
        yield samples
        self.watched += 1
        if self._sees:
            samples.append(Sample(2000.0 - 100 * self.watched, 600.0, 1 << self.watched))


def bench_of(*providers: Any, seconds: float = 0.1, rounds: int = 2) -> Bench:
    """A bench of scaled cells on the CPU, where every call takes as long."""
    method = Method(rounds=rounds, block_seconds=0.25)
    stopwatch = FakeStopwatch(lambda work, block: seconds)
    return Bench(providers, method, stopwatch, FakeMonitor(), H200, "cpu", lambda cell: cell.scaled, ceiling_size=64)


def record(cell: str, provider: str, tflops: float | None = None, **more: Any) -> Record:
    """A record as a file has it; measured, if there is a number."""
    told: dict[str, Any] = {
        "kind": TIMES,
        "status": MEASURED if tflops is not None or "cycles" in more else "wrong",
        "device": H200.device,
        "driver": H200.driver,
        "sources": H200.sources,
        "revision": None,
        "versions": {},
        "when": "2026-11-30T00:00:00+00:00",
        "shape": {"dtype": "bf16"},
        "flops": 1e12,
    }
    if tflops is not None:
        ms = 1e3 / tflops
        told |= {"tflops": tflops, "median_ms": ms, "p20_ms": ms * 0.99, "p80_ms": ms * 1.02}
    return Record(cell=cell, provider=provider, **told | more)
