"""`undertow check`: run kernels under all observers, and tell what is not ordered that has to be."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from undertow import launch_file
from undertow.campaign import Campaign, Covered, Found, campaign, kernel_name, picture
from undertow.cases import CaseError, Kernel
from undertow.cli import Outcome
from undertow.commands.attention import add_attention, random_batch_of
from undertow.commands.targets import DEFAULT_SHAPES, add_schedule, add_target, own_kernel, settings_of
from undertow.emulator import LaunchError, UnsupportedPtx
from undertow.hazard_figure import sides
from undertow.inputs import InputError
from undertow.kernels.backward import schedules_of
from undertow.kernels.sm100.launch import LaunchInputError
from undertow.progress import Progress
from undertow.ptx import PtxSyntaxError
from undertow.reference import ProblemError

DESCRIPTION = f"""\
Execute kernels on the emulator under all observers, with several scheduler seeds and moments of asynchronous
completion, and report every race, missing fence or wait, broken barrier protocol, bad lifetime and deadlock. Without
options: the three kernels of all four sm100 schedules on a batch with three query tiles and two key tiles.

Exit code 0: clean. 1: findings. 2: the input cannot be run.

Any other kernel: --ptx FILE --launch FILE. A launch description is

{launch_file.FORMAT}"""
BAD_INPUT = (CaseError, InputError, ProblemError, LaunchInputError, LaunchError, UnsupportedPtx, PtxSyntaxError)
SHOWN = 10  # lines of what was not executed; --json has them all


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow check`."""
    add_schedule(parser, "all; may be repeated", action="append")
    parser.add_argument("--strict", action="store_true", help="take the ISA by its letter, and give advice as well")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the first finding about two warps in tensor memory, as SVG"
    )
    add_attention(parser)
    add_target(parser, seeds=3)


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Check what the command line asks for.

    Raises: one of BAD_INPUT for a kernel, file or option that cannot be used.
    """
    settings = settings_of(arguments)
    cases = _cases(arguments, progress)
    done = campaign(cases, settings, arguments.strict, arguments.jobs, progress.step)
    if arguments.picture:
        _draw(Path(arguments.picture), cases, done)
    return outcome(done)


def _draw(path: Path, cases: dict[str, tuple[Kernel, ...]], done: Campaign) -> None:
    drawable = next((found for found in done.findings if sides(found.finding)), None)
    if drawable is None:
        print("--picture: nothing was found about two warps in tensor memory, so there is nothing to draw")
        return
    try:
        path.write_text(picture(cases, drawable), encoding="utf-8")
    except OSError as error:
        raise CaseError(f"--picture={path}: cannot be written: {error}") from error


def _cases(arguments: argparse.Namespace, progress: Progress) -> dict[str, tuple[Kernel, ...]]:
    kernel = own_kernel(arguments)
    if kernel is not None:
        return {kernel.name: (kernel,)}
    from undertow.backward_case import batch_case

    cases = {}
    for schedule in schedules_of(arguments.arch, arguments.schedule):
        progress.step(f"compiling {schedule}")
        batch = random_batch_of(arguments, DEFAULT_SHAPES[arguments.arch])
        cases[schedule] = batch_case(batch, schedule, arguments.deterministic, arguments.arch)
    return cases


def outcome(done: Campaign) -> Outcome:
    """Word what a campaign found."""
    report = {
        "findings": [_record(found) for found in done.findings],
        "runs": done.runs,
        "coverage": {name: asdict(covered) for name, covered in done.coverage.items()},
        "seconds": round(done.seconds, 3),
    }
    lines = [line for found in done.findings for line in (*_told(found), "")]
    for case, runs in done.runs_of_case.items():
        count = sum(found.case == case for found in done.errors)
        advice = sum(found.case == case for found in done.findings) - count
        verdict = f"{count} findings" if count else "clean"
        lines.append(f"{case}: {verdict}{f', {advice} of advice' if advice else ''} in {runs} runs")
    lines += ["", *_coverage_lines(done.coverage), f"{done.runs} runs in {done.seconds:.1f} s"]
    return Outcome(not done.errors, report, "\n".join(lines))


def _record(found: Found) -> dict[str, object]:
    return {**asdict(found.finding), "case": found.case, "kernel": found.kernel, "settings": found.settings}


def _told(found: Found) -> list[str]:
    times = f"{len(found.settings)} runs" if len(found.settings) > 1 else "one run"
    return [f"{kernel_name(found.case, found.kernel)}, in {times}, first {found.settings[0]}:", str(found.finding)]


def _coverage_lines(coverage: dict[str, Covered]) -> list[str]:
    words = {"forms": "instruction forms", "branches": "branches both ways", "synchronisations": "synchronisations"}
    counts = ", ".join(f"{c.executed} of {c.total} {words[name]}" for name, c in coverage.items())
    missing = [line for covered in coverage.values() for line in covered.missing]
    lines = [f"Executed: {counts}"]
    lines += [f"  not: {line}" for line in missing[:SHOWN]]
    if len(missing) > SHOWN:
        lines.append(f"  and {len(missing) - SHOWN} more, see --json")
    return lines
