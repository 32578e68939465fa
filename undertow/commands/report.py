"""`undertow report`: everything that is known of the kernels as one HTML file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undertow import __version__
from undertow.bench.records import RecordError
from undertow.calibrate.recorded import RecordError as TraceRecordError
from undertow.cli import Outcome
from undertow.commands.predicted import Predicted, predict, traced
from undertow.pool import cores
from undertow.progress import Progress
from undertow.report import ablation, chips, errors, hazards, maps, throughput, timelines
from undertow.report.errors import ErrorsFileError
from undertow.report.page import Missing, Section, page
from undertow.timing.chip import ChipError, names, read_chip
from undertow.timing.constants import ConstantError

DESCRIPTION = """\
Write one HTML file with all that is known of the kernels: where tiles lie in tensor memory and in shared memory, the
hazards and what is found without a guard, a steady tile of every schedule, what each change is worth, throughput by
shape, how far the timing model is off, and the constants of the chips. Every number says whether it is emulated,
predicted, measured or published, and where it comes from. The file loads nothing and needs no network.

What is measured is read from files of other commands; a section whose file is not there says so.

Exit code 0: written. 1: written, and something in it is wrong (a hazard in a schedule, or none where one must be
found). 2: an option or file cannot be used.
"""
SECTIONS = {
    module.KEY: module for module in (maps, hazards, timelines, ablation, throughput, errors, chips)
}  # in the order of the page
PREDICTING = ("timelines", "ablation")  # without both, nothing is predicted for the throughput either
BENCH, VALIDATION = "results/hopper/bench.jsonl", "results/hopper/timeline.jsonl"
EVENTS = "results/hopper/events_dense.json.gz"


class ReportError(ValueError):
    """An option of the report that cannot be used; the message names it, its value and what is allowed."""


BAD_INPUT = (ReportError, RecordError, TraceRecordError, ErrorsFileError, ChipError, ConstantError)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow report`."""
    parser.add_argument("--output", required=True, metavar="FILE", help="the page to write")
    parser.add_argument("--chip", default="b200", metavar="NAME", help="to predict for: b200 or a chip file of sm_100a")
    parser.add_argument(
        "--draws", type=int, default=64, metavar="N", help="from the ranges of its constants (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--bench", default=BENCH, metavar="FILE", help="records of `undertow bench` (default: %(default)s)"
    )
    parser.add_argument(
        "--validation",
        default=VALIDATION,
        metavar="FILE",
        help="predicted beside measured cycles, of tools/timeline_validate.py (default: %(default)s)",
    )
    parser.add_argument(
        "--events",
        default=EVENTS,
        metavar="FILE",
        help="the SM90 kernel traced by run-iket, as JSON, perhaps gzipped (default: %(default)s)",
    )
    parser.add_argument(
        "--skip", action="append", choices=SECTIONS, default=[], help="leave a section out; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=cores(), metavar="N", help="processes (default: %(default)s)")


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Write the page.

    Raises: one of BAD_INPUT for an option or a file that cannot be used.
    """
    path = Path(arguments.output)
    _check(arguments, path)
    sections = _sections(arguments, progress.step)
    subtitle = f"undertow {__version__}: the backward pass of attention at head dim 64, for Blackwell and Hopper"
    content = page("What is known of the kernels", subtitle, sections)
    _write(path, content)
    return _outcome(path, content, sections)


def _check(arguments: argparse.Namespace, path: Path) -> None:
    for name, least in (("draws", 2), ("jobs", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise ReportError(f"--{name}={getattr(arguments, name)}: must be at least {least}")
    chip = read_chip(arguments.chip)
    if chip.arch != "sm_100a":
        raise ReportError(f"--chip={arguments.chip}: runs {chip.arch}; the schedules need sm_100a")
    if not path.parent.is_dir() or path.is_dir():  # better known before the work
        raise ReportError(f"--output={path}: cannot be written: no such folder, or a folder itself")


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"--output={path}: cannot be written: {error}") from error


def _sections(arguments: argparse.Namespace, step: Callable[[str], None]) -> list[Section]:
    """All sections, in order; one that is skipped says so."""
    wanted = [key for key in SECTIONS if key not in arguments.skip]
    predicted = predict(read_chip(arguments.chip), arguments, step) if set(PREDICTING) & set(wanted) else None
    makers: dict[str, Callable[[], Section]] = {
        "maps": maps.section,
        "hazards": lambda: hazards.section(arguments.jobs, step),
        "throughput": lambda: _throughput(Path(arguments.bench), predicted),
        "errors": lambda: errors.section(Path(arguments.validation)),
        "chips": lambda: chips.section(list(dict.fromkeys((*names(), arguments.chip)))),
    }
    if predicted is not None:
        makers["timelines"] = lambda: _timelines(predicted, arguments, step)
        makers["ablation"] = lambda: ablation.section(predicted.record)
    return [makers[key]() if key in wanted else _skipped(key) for key in SECTIONS]


def _timelines(predicted: Predicted, arguments: argparse.Namespace, step: Callable[[str], None]) -> Section:
    section = timelines.section(predicted.timelines, predicted.tiles, predicted.source)
    section.parts += traced(Path(arguments.events), arguments, step)
    return section


def _throughput(path: Path, predicted: Predicted | None) -> Section:
    if predicted is None:
        return throughput.section(path)
    return throughput.section(path, predicted.throughput, predicted.throughput_source)


def _skipped(key: str) -> Section:
    module = SECTIONS[key]
    return Section(key, module.TITLE, module.COMMAND, [Missing(f"this section, because of --skip {key}")])


def _outcome(path: Path, content: str, sections: list[Section]) -> Outcome:
    told: list[dict[str, Any]] = [
        {"key": section.key, "title": section.title, "missing": section.missing, "wrong": section.wrong}
        for section in sections
    ]
    wrong = [line for section in sections for line in section.wrong]
    lines = [f"{one['title']}: {'; '.join([*one['wrong'], *one['missing']]) or 'all there'}" for one in told]
    size = len(content.encode())
    report = {"ok": not wrong, "output": str(path), "bytes": size, "sections": told}
    return Outcome(not wrong, report, "\n".join([*lines, f"wrote {path}, {size / 1024:.0f} KiB"]))
