"""`undertow mutate`: take one synchronisation away at a time, and tell which of them nobody misses."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from undertow.cases import CaseError, Kernel
from undertow.cli import Outcome
from undertow.commands.targets import add_schedule, add_target, own_kernel, settings_of, shapes_of
from undertow.emulator import EmulatorError
from undertow.inputs import InputError, random_batch
from undertow.kernels.backward import schedules_of
from undertow.kernels.sm100.launch import LaunchInputError
from undertow.mutate import BY_RESULT, BY_RULE, FOLDER, Report, Row, mutate, read_reasons, reasons_for
from undertow.mutate.sites import KINDS
from undertow.mutate.survivors import CATEGORIES
from undertow.progress import Progress
from undertow.ptx import PtxSyntaxError


def _listed(words: dict[str, str]) -> str:
    return "\n".join(f"  {word:<14}{meaning}" for word, meaning in words.items())


DESCRIPTION = f"""\
Neutralise every synchronisation of a kernel, one at a time, in its PTX, and run each mutant as `undertow check` does,
until an observer reports something or a result is wrong. Without options: the main kernel of `split`.
Unless an extent is given, the kernel of sm90 has three problems: one does not show all that it does.

A mutant that nobody notices survives; the reason is kept as data, under {FOLDER.name}/ of this package or in the file
given with --survivors. Exit code 0: every survivor has one. 1: some have none, or a reason is stale. 2: bad input.

What is taken away:
{_listed(KINDS)}

Categories of reasons:
{_listed(CATEGORIES)}
"""
BAD_INPUT = (CaseError, InputError, LaunchInputError, EmulatorError, PtxSyntaxError)
HEADINGS = ("verdict", "role", "kind", "about", "place", "function", "by, or why not")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow mutate`."""
    add_schedule(parser, "the fastest")
    parser.add_argument("--kind", action="append", choices=KINDS, help="mutate only this kind; may be repeated")
    parser.add_argument(
        "--survivors", metavar="FILE", help="justifications, .toml (default for our kernels: those of this package)"
    )
    add_target(parser, seeds=2)


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Mutate what the command line asks for.

    Raises: one of BAD_INPUT for a kernel, file or option that cannot be used.
    """
    settings = settings_of(arguments)
    kernel = own_kernel(arguments)
    asked = [arguments.schedule] if arguments.schedule else None
    name = schedules_of(arguments.arch, asked)[-1] if kernel is None else kernel.name
    path = arguments.survivors or (FOLDER / f"{arguments.arch}.toml" if kernel is None else None)
    reasons = reasons_for(read_reasons(Path(path)) if path else [], name)
    problems = [kernel] if kernel else _problems(arguments, name, progress)
    kinds = set(arguments.kind or KINDS)
    step, jobs = progress.step, arguments.jobs
    report = mutate(problems, settings, reasons, lambda mutant: mutant.name.kind in kinds, jobs, step)
    return outcome(report, name)


def _problems(arguments: argparse.Namespace, schedule: str, progress: Progress) -> list[Kernel]:
    """The main kernel on every shape that is asked for, named by its query rows and keys."""
    from undertow.backward_case import batch_case, main_of

    progress.step(f"compiling {schedule}")
    seed = arguments.seed or 0
    cases = [
        (shape, main_of(batch_case(random_batch(shape, seed), schedule, arch=arguments.arch)))
        for shape in shapes_of(arguments)
    ]
    return [replace(case, name=f"main on {shape.seqlen_q} by {shape.seqlen_k}") for shape, case in cases]


def outcome(report: Report, name: str) -> Outcome:
    """Word a mutation run of the kernel called `name`."""
    record = {"schedule": name, **report.record}
    killed = len(report.rows) - len(report.survivors)
    explained = len(report.survivors) - len(report.unexplained)
    lines = [*_table(report.rows), ""]
    for row in report.survivors:
        lines += [_told(row), ""]
    for row in report.protocol_only:
        lines += [f"Orders nothing that others do not: {row.mutant.name}, PTX line {_lines(row)}", ""]
    lines += [f"STALE: {line}" for line in report.stale]
    lines.append(
        f"{name}: {len(report.rows)} mutants, {killed} killed, {explained} survivors explained, "
        f"{len(report.unexplained)} unexplained, {len(report.redundant)} redundant, "
        f"{len(report.protocol_only)} missed by protocol only; {report.seconds:.0f} s"
    )
    return Outcome(report.ok, record, "\n".join(lines))


def _told(row: Row) -> str:
    if row.reason is None:
        return f"UNEXPLAINED: {row.mutant.name}, PTX line {_lines(row)}: nothing noticed that it is gone"
    return f"Survived, {row.reason.category}: {row.mutant.name}, PTX line {_lines(row)}\n  {row.reason.because}"


def _lines(row: Row) -> str:
    return ", ".join(map(str, row.mutant.lines))


def _table(rows: tuple[Row, ...]) -> list[str]:
    cells = [HEADINGS, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]


def _cells(row: Row) -> tuple[str, ...]:
    name = row.mutant.name
    verdict = row.verdict
    rules = ", ".join(verdict.rules) + " (strict)" * verdict.strict + " (protocol only)" * verdict.protocol_only
    by = {BY_RULE: rules, BY_RESULT: verdict.shown.partition("\n")[0]}.get(verdict.how)
    if by is None:
        by = row.reason.category if row.reason else "UNEXPLAINED"
    about = f"{name.about or name.form} #{name.ordinal}" if name.ordinal > 1 else name.about or name.form
    return (verdict.how, name.role, name.kind, about, name.place, name.function, by)
