"""One cell from tensors to records: prepare everybody, judge everybody, then time those that are right, in turns."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from undertow.bench.gate import Gate, Gates, Verdict
from undertow.bench.machine import Machine
from undertow.bench.measure import Method, Monitor, Stopwatch, Timing, measure
from undertow.bench.providers import UNDERTOW, Participant, Provider, UnableError
from undertow.bench.records import BROKEN, MEASURED, TIMES, UNABLE, WRONG, Record
from undertow.bench.work import HEAD_DIM, backward_flops, peak_tflops
from undertow.bench.workload import TYPES, Workload, workload
from undertow.reference import Gradients
from undertow.sweep.matrix import Cell, Size

CEILING = "matmul"  # a participant that is no provider
CEILING_SIZE = 8192
Say = Callable[[str], None]


@dataclass(frozen=True)
class Judged:
    """A provider in one cell. participant: ready, unless the status says why not."""

    name: str
    status: str
    complaint: str | None = None
    participant: Participant | None = None
    verdict: Verdict | None = None
    compared_with: str | None = None


@dataclass(frozen=True)
class Bench:
    """What all cells share. size_of: at which of its sizes a cell is measured. ceiling: makes the matrix product."""

    providers: Sequence[Provider]
    method: Method
    stopwatch: Stopwatch
    monitor: Monitor
    machine: Machine
    device: str = "cuda"
    size_of: Callable[[Cell], Size] = lambda cell: cell.full
    ceiling_size: int = CEILING_SIZE
    gates: Gates = field(default_factory=Gates)

    def times(self, cell: Cell, say: Say = lambda text: None) -> list[Record]:
        """The records of one cell, one a provider."""
        loaded = workload(cell, self.size_of(cell), self.device)
        say(f"{cell.name}: float64")
        gate = self.gates.of(loaded)
        judged = judge(loaded, gate, self.providers, lambda text: say(f"{cell.name}: {text}"))
        ready = [one.participant for one in judged if one.participant is not None]
        timings: dict[str, Timing] = {}
        if ready:
            product = matrix_product(cell.dtype, self.device, self.ceiling_size)
            everybody = [product, *ready]
            timings = measure(
                everybody, self.method, self.stopwatch, self.monitor, lambda text: say(f"{cell.name}: {text}")
            )
        judged = [judged_again(one, gate) for one in judged]
        return [self._record(loaded, one, timings) for one in judged]

    def _record(self, loaded: Workload, judged: Judged, timings: dict[str, Timing]) -> Record:
        told = facts(loaded, judged, TIMES, self.machine)
        if judged.status != MEASURED:
            return Record(**told)
        timing, flops = timings[judged.name], told["flops"]
        ceiling = 2 * self.ceiling_size**3 / timings[CEILING].median_ms / 1e9
        tflops, peak = flops / timing.median_ms / 1e9, peak_tflops(self.machine.device)
        return Record(
            **told,
            method=asdict(self.method),
            **asdict(timing),
            tflops=tflops,
            share_of_peak=None if peak is None else tflops / peak,
            ceiling_tflops=ceiling,
            share_of_ceiling=tflops / ceiling,
        )


def judge(loaded: Workload, gate: Gate, providers: Sequence[Provider], say: Say = lambda text: None) -> list[Judged]:
    """Prepare every provider and judge one call of each, in the order given.

    Whole gradients are compared with those of the first provider that is right, a library before this package.
    """
    found: dict[str, Judged] = {}
    trusted: tuple[str, Gradients] | None = None
    for provider in sorted(providers, key=lambda provider: provider.name == UNDERTOW):
        say(f"{provider.name}: gradients")
        judged, gradients = _judged(loaded, gate, provider)
        if judged.participant is not None and gradients is not None:
            if trusted is None:
                trusted = provider.name, gradients
            else:
                why = gate.disagreement(gradients, trusted[1])
                judged = Judged(
                    judged.name,
                    WRONG if why else judged.status,
                    f"against {trusted[0]}: {why}" if why else None,
                    None if why else judged.participant,
                    judged.verdict,
                    trusted[0],
                )
        found[provider.name] = judged
    return [found[provider.name] for provider in providers]


def _judged(loaded: Workload, gate: Gate, provider: Provider) -> tuple[Judged, Gradients | None]:
    name = provider.name
    try:
        participant = provider.prepare(loaded)
        gradients = _called(participant)
        verdict = gate.verdict(gradients)
        complaint = verdict.complaint or participant.proof()
        if complaint is None and loaded.cell.deterministic:
            complaint = _other_bits(gradients, _called(participant))
    except (UnableError, NotImplementedError) as error:
        return Judged(name, UNABLE, str(error)), None
    except Exception as error:  # of a library, a compiler or a driver: told, and the others go on
        return Judged(name, BROKEN, f"{type(error).__name__}: {error}"), None
    if complaint:
        return Judged(name, WRONG, complaint, verdict=verdict), None
    return Judged(name, MEASURED, None, participant, verdict), gradients


def judged_again(judged: Judged, gate: Gate) -> Judged:
    """The same after the timed calls: still right, and still the code that was asked for."""
    if judged.participant is None:
        return judged
    verdict = gate.verdict(_called(judged.participant))
    complaint = verdict.complaint or judged.participant.proof()
    if complaint is None:
        return judged
    return Judged(judged.name, WRONG, f"after the timed calls: {complaint}", None, verdict, judged.compared_with)


def _called(participant: Participant) -> Gradients:
    with participant.around():
        return participant.gradients(participant.call())


def _other_bits(once: Gradients, again: Gradients) -> str | None:
    names = [name for name, x, y in zip(Gradients._fields, once, again) if not torch.equal(x, y)]
    return f"two calls gave other bits of {', '.join(names)}" if names else None


def matrix_product(dtype: str, device: str, extent: int) -> Participant:
    """A square product of normal random matrices by torch, the most that the tensor cores are seen to do."""
    a, b = (torch.randn(extent, extent, device=device, dtype=torch.float32).to(TYPES[dtype]) for _ in range(2))
    product = torch.empty_like(a)

    def gradients(raw: Any) -> Gradients:
        raise AssertionError("a matrix product is not judged")

    return Participant(CEILING, lambda: torch.mm(a, b, out=product), gradients)


def facts(loaded: Workload, judged: Judged, kind: str, machine: Machine) -> dict[str, Any]:
    """The fields of a record that do not come from a measurement."""
    cell, size, verdict = loaded.cell, loaded.size, judged.verdict
    shape = {
        "heads": list(size.heads),
        "lengths": list(size.lengths),
        "packed": size.packed,
        "window": list(size.window),
        "causal": cell.causal,
        "dtype": cell.dtype,
        "deterministic": cell.deterministic,
        "head_dim": HEAD_DIM,
    }
    return {
        "cell": cell.name,
        "provider": judged.name,
        "kind": kind,
        "status": judged.status,
        "device": machine.device,
        "driver": machine.driver,
        "sources": machine.sources,
        "revision": machine.revision,
        "versions": machine.versions,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "shape": shape,
        "flops": backward_flops(cell, size),
        "complaint": judged.complaint,
        "errors": None if verdict is None else {n: _finite(e) for n, e in zip(Gradients._fields, verdict.errors)},
        "ideal_budget": None if verdict is None else dict(zip(Gradients._fields, verdict.budget)),
        "compared_with": judged.compared_with,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
