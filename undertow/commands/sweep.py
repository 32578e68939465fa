"""`undertow sweep`: judge every configuration, one record each, and go on where an earlier sweep has stopped."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path

from undertow.cases import CaseError
from undertow.cli import Outcome
from undertow.commands.targets import add_schedule
from undertow.kernels.backward import schedules_of
from undertow.kernels.sm100.launch import LaunchInputError
from undertow.pool import cores
from undertow.progress import Progress
from undertow.record_file import RecordError
from undertow.sweep.matrix import CELLS, Cell
from undertow.sweep.records import Record, RecordFile
from undertow.sweep.run import Runner, Sweep, sweep

DESCRIPTION = """\
Judge the 124 configurations of the published sweep, scaled to a few tiles each, on all schedules of an architecture (no
two architectures have a schedule of the same name, so that one file holds the records of all): MHA, GQA and MQA;
dense, causal, local and packed sequences; bf16 and fp16; without and with the deterministic mode; lengths that stand
for 512 to 32k. undertow/sweep/matrix.py is the list, and says how it comes to 124.

A cell is ok if the gradients of the compiled kernels are within 1.25 times the error of an ideal 16-bit pipeline, if
no observer finds anything in any of the three kernels, and, if it is deterministic, if dQ, dK and dV have the same bits
in 5 orders of CTAs, warps and completions, and in all schedules.

Every cell is a line of JSON in the output file as soon as it is done. A second call does what is missing there: lines
of other sources, of other versions of what computes, or of other schedules do not count.

Exit code 0: all cells are ok. 1: some are not. 2: the options or the file cannot be used.
"""
BAD_INPUT = (CaseError, LaunchInputError, RecordError)
DEFAULT_OUTPUT = "sweep.jsonl"
SHOWN = 10  # cells in the table of the worst
COMPLAINTS = 3  # of a cell that is not ok; its record has them all
HEADINGS = ("cell", "tiles", "error dQ", "dK", "dV", "ideal dQ", "dK", "dV", "ratio")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow sweep`."""
    parser.add_argument(
        "--output", default=DEFAULT_OUTPUT, metavar="FILE", help="the records, JSON lines (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="only cells whose names match it, as file names do: 'gqa-*-fp16*'; may be repeated",
    )
    add_schedule(parser, "all; may be repeated", action="append")
    parser.add_argument("--fresh", action="store_true", help="throw away the records in the file")
    parser.add_argument("--jobs", type=int, default=cores(), metavar="N", help="processes (default: %(default)s)")


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Sweep what the command line asks for.

    Raises: CaseError for a pattern that no cell matches or less than one process; LaunchInputError for a schedule of
    another architecture; RecordError for the file.
    """
    if arguments.jobs < 1:
        raise CaseError(f"--jobs={arguments.jobs}: must be at least 1")
    cells = chosen(arguments.only)
    schedules = tuple(dict.fromkeys(schedules_of(arguments.arch, arguments.schedule)))
    file = RecordFile(Path(arguments.output), arguments.fresh)
    return outcome(sweep(cells, Runner(schedules, arguments.arch), file, arguments.jobs, progress.step), file.path)


def chosen(patterns: list[str] | None) -> list[Cell]:
    """The cells that one of the patterns matches, in the order of the matrix; all if there is none.

    Raises: CaseError for a pattern that matches nothing.
    """
    if patterns is None:
        return list(CELLS)
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in CELLS):
            raise CaseError(
                f"--only={pattern}: matches none of the {len(CELLS)} cells, which are called {CELLS[0].name}, "
                f"{CELLS[-1].name} and so on"
            )
    return [cell for cell in CELLS if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]


def outcome(done: Sweep, path: Path) -> Outcome:
    """Word a sweep whose records are in `path`."""
    worst = done.worst(SHOWN)
    ok = len(done.records) - len(done.wrong)
    report = {
        "cells": len(done.records),
        "ok": ok,
        "worst": {name: getattr(worst[0], name) for name in ("cell", "ratio", "errors", "ideal")} if worst else None,
        "findings": done.findings,
        "seconds": round(done.seconds, 3),
    }
    lines = [line for record in done.wrong for line in (*_complaints(record), "")]
    lines += ["Worst cells, by error over that of an ideal pipeline:", "", *_table(worst), ""] if worst else []
    known = f", {done.known} of them known before" if done.known else ""
    counts = f"{len(done.records)} cells: {ok} ok, {done.findings} findings"
    lines.append(f"{counts}, in {done.seconds:.0f} s{known}; records in {path}")
    return Outcome(ok == len(done.records), report, "\n".join(lines))


def _complaints(record: Record) -> list[str]:
    shown = [f"  {complaint}" for complaint in record.complaints[:COMPLAINTS]]
    more = len(record.complaints) - COMPLAINTS
    return [
        f"{'BROKEN' if record.broken else 'NOT OK'} {record.cell}:",
        *shown,
        *([f"  and {more} more, see its record"] if more > 0 else []),
    ]


def _table(records: list[Record]) -> list[str]:
    rows = [HEADINGS, *map(_cells, records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def _cells(record: Record) -> tuple[str, ...]:
    tiles = {told["tiles"] for told in record.schedules.values() if told["tiles"] is not None}
    errors = [*(record.errors or {}).values(), *(record.ideal or {}).values()]
    numbers = ("-" if error is None else f"{error:.2e}" for error in errors)
    return (record.cell, "/".join(map(str, sorted(tiles))), *numbers, f"{record.ratio:.3f}")
