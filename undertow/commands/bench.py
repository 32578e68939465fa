"""`undertow bench`: time the backward pass on this GPU, beside the attention libraries that are installed."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from undertow.bench import charts, cycles, warm
from undertow.bench.cellrun import Bench
from undertow.bench.comparison import by_factor, geometric_mean, leads, table
from undertow.bench.machine import BenchError, CudaStopwatch, NvmlMonitor, examine, require_gpu, uuid_of_current
from undertow.bench.measure import Method
from undertow.bench.peers import PROVIDERS
from undertow.bench.providers import UNDERTOW, Provider
from undertow.bench.records import CYCLES, MEASURED, TIMES, WRONG, Record, RecordFile, write_csv
from undertow.bench.work import tensor_flops_per_cycle
from undertow.cases import CaseError
from undertow.cli import Outcome
from undertow.commands.sweep import chosen
from undertow.pool import cores
from undertow.progress import Progress
from undertow.record_file import RecordError
from undertow.sweep.matrix import Cell

DESCRIPTION = """\
Time the backward pass of this package and of the attention libraries that are installed, on this GPU, in one process
and in turns: 64k tokens, 32 query heads, head dim 64, the cells of `undertow sweep` at full size. Only the backward
pass is timed; it counts as 2.5 forward passes. docs/bench.md tells the method.

Before a time counts, gradients are compared with float64 (1.25 times the error of an ideal 16-bit pipeline). Who is
wrong has no time. Every cell is written to the output file as soon as it is done; a second call does what is missing.

Exit code 0: the kernels of this package were right and measured in every cell (if they are not asked for: everybody
was right). 1: they were not. 2: the options, the file or the machine cannot be used; without a GPU only --report works.
"""
BAD_INPUT = (BenchError, CaseError, RecordError)
DEFAULT_OUTPUT = "bench.jsonl"


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    cells: list[Cell]
    providers: list[Provider]
    absent: dict[str, str]  # not asked for by name, and not on this machine -> why


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow bench`."""
    method = Method()
    parser.add_argument(
        "--output", default=DEFAULT_OUTPUT, metavar="FILE", help="the records, JSON lines (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="only cells whose names match it, as file names do: 'mha-causal-*-bf16'; may be repeated (default: all)",
    )
    parser.add_argument(
        "--provider",
        action="append",
        choices=PROVIDERS,
        help="only this one; may be repeated (default: all that are installed)",
    )
    parser.add_argument("--rounds", type=int, default=method.rounds, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--block-seconds",
        type=float,
        default=method.block_seconds,
        metavar="S",
        help="calls of one provider before the next one's turn (default: %(default)g)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(cores(), warm.MOST_JOBS),
        metavar="N",
        help="processes that compile for all cells, before any is timed; 1: compile in turn (default: %(default)s)",
    )
    parser.add_argument("--cycles", action="store_true", help="count cycles of kernels under ncu instead of timing")
    parser.add_argument("--ncu", metavar="PATH", help="Nsight Compute's program (default: ncu on the PATH)")
    parser.add_argument("--fresh", action="store_true", help="throw away the records in the file")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: tell, list and draw what is in the file"
    )
    parser.add_argument("--csv", metavar="FILE", help="write all records of the file as a table, too")
    parser.add_argument("--plots", metavar="DIR", help="draw the times of the file, too (SVG and PNG)")
    parser.add_argument("--revision", metavar="NAME", help="of the sources, for the records (default: what git says)")


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure what the command line asks for.

    Raises: BenchError without a GPU, or for a number or provider that cannot be used; CaseError for a pattern that no
    cell matches; RecordError for the files.
    """
    method = _method(arguments)
    cells = chosen(arguments.only)
    kind = CYCLES if arguments.cycles else TIMES
    if arguments.report:
        if arguments.fresh:
            raise BenchError("--report --fresh: there would be nothing to report")
        if not Path(arguments.output).exists():
            raise RecordError(f"{arguments.output}: cannot be read: there is no such file")
        return _outcome(arguments, RecordFile(Path(arguments.output)), cells, {})
    require_gpu()
    options = Options(cells, *_providers(arguments.provider))
    ncu = cycles.find_ncu(arguments.ncu) if arguments.cycles else ""
    monitor = NvmlMonitor(uuid_of_current())
    if monitor.complaint:
        warnings.warn(monitor.complaint, stacklevel=1)
    machine = examine(arguments.revision, monitor)
    file = RecordFile(Path(arguments.output), arguments.fresh)
    names = [provider.name for provider in options.providers]
    known = file.done(kind, machine.device, machine.sources, names)
    missing = [cell for cell in cells if cell.name not in known]
    if kind == CYCLES:
        progress.step(f"counting {len(missing)} cells under {ncu}")
        if missing:
            file.append(count(ncu, missing, names, arguments.revision, machine))
    else:
        for complaint in warm.warm(warm.tasks(missing, options.providers), arguments.jobs, progress.step):
            warnings.warn(complaint, stacklevel=1)
        bench = Bench(options.providers, method, CudaStopwatch(), monitor, machine)
        for cell in missing:
            file.append(bench.times(cell, progress.step))
    return _outcome(arguments, file, cells, options.absent)


def _method(arguments: argparse.Namespace) -> Method:
    if arguments.rounds < 1:
        raise BenchError(f"--rounds={arguments.rounds}: must be at least 1")
    if not 0 < arguments.block_seconds < 60:
        raise BenchError(f"--block-seconds={arguments.block_seconds}: must be above 0 and below 60")
    if arguments.jobs < 1:
        raise BenchError(f"--jobs={arguments.jobs}: must be at least 1")
    return Method(arguments.rounds, arguments.block_seconds)


def _providers(asked: list[str] | None) -> tuple[list[Provider], dict[str, str]]:
    """Those to be measured, and those that are not here with the reason."""
    present, absent = [], {}
    for name in dict.fromkeys(asked or PROVIDERS):
        why = PROVIDERS[name].missing()
        if why and asked:
            raise BenchError(f"--provider={name}: {why}")
        if why:
            absent[name] = why
        else:
            present.append(PROVIDERS[name])
    return present, absent


def count(ncu: str, cells: Sequence[Cell], names: Sequence[str], revision: str | None, machine: Any) -> list[Record]:
    """Records of kind CYCLES from one run of ncu.

    Raises: cycles.CountError.
    """
    request = {
        "cells": [cell.name for cell in cells],
        "providers": list(names),
        "calls": cycles.CALLS,
        "revision": revision,
    }
    told, text = cycles.run_counted(ncu, request)
    measured = [one for one in told if one["status"] == MEASURED]
    groups = cycles.split(cycles.launches(text), cycles.CALLS * len(measured)) if measured else []
    rate = tensor_flops_per_cycle(machine.capability, machine.multiprocessors)
    records = []
    for one in told:
        extra: dict[str, Any] = {}
        if one["status"] == MEASURED:
            found = cycles.counted([groups.pop(0) for _ in range(cycles.CALLS)])
            extra = {
                "calls": cycles.CALLS,
                "main_kernel": found.main.kernel,
                "cycles": found.main.cycles,
                "share_of_rate": None if rate is None else one["flops"] / (rate * found.main.cycles),
                "kernels": [{"kernel": launch.kernel, "cycles": launch.cycles} for launch in found.kernels],
            }
        records.append(Record(**one, **extra))
    return records


def _outcome(arguments: argparse.Namespace, file: RecordFile, cells: list[Cell], absent: dict[str, str]) -> Outcome:
    names = {cell.name for cell in cells}
    records = [record for record in file.latest() if record.cell in names]
    if arguments.csv:
        write_csv(Path(arguments.csv), file.latest())
    drawn = charts.draw(Path(arguments.plots), file.latest()) if arguments.plots else []
    kinds = [TIMES, CYCLES] if arguments.report else [CYCLES if arguments.cycles else TIMES]
    records = [record for record in records if record.kind in kinds]
    ours = [record for record in records if record.provider == UNDERTOW]
    wrong = [record for record in records if record.status == WRONG]
    ok = all(record.status == MEASURED for record in ours) if ours else bool(records) and not wrong
    report: dict[str, Any] = {
        "ok": ok,
        "records": len(records),
        "wrong": [{name: getattr(r, name) for name in ("cell", "provider", "kind", "complaint")} for r in wrong],
        "output": str(file.path),
        "absent": absent,
    }
    lines: list[str] = []
    for kind in kinds:
        found = leads(records, kind)
        factors = by_factor(found)
        worst = min(found, key=lambda lead: lead.ratio, default=None)
        report[kind] = {
            "cells": len(found),
            "geometric_mean_over_best_peer": geometric_mean([lead.ratio for lead in found]),
            "by_factor": {
                factor: {value: {"geometric_mean": mean, "cells": cells} for value, (mean, cells) in values.items()}
                for factor, values in factors.items()
            },
            "worst": None if worst is None else {f.name: getattr(worst, f.name) for f in fields(worst)},
        }
        lines += table(records, kind)
        if worst is not None:
            mean = report[kind]["geometric_mean_over_best_peer"]
            lines += [
                "",
                f"{mean:.3f} x the best of the others (geometric mean, cells by {kind}: {len(found)}), worst "
                f"{worst.ratio:.3f} x {worst.best_peer} in {worst.cell}",
                *(
                    f"  by {factor}: " + ", ".join(f"{value} {mean:.3f} ({n})" for value, (mean, n) in values.items())
                    for factor, values in factors.items()
                ),
                "",
            ]
    lines += [f"not here: {name}: {why}" for name, why in absent.items()]
    lines += [f"drawn: {path}" for path in drawn]
    report["plots"] = [str(path) for path in drawn]
    return Outcome(ok, report, "\n".join([*lines, f"{len(records)} records in {file.path}"]))
