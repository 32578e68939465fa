"""`undertow calibrate`: measure the constants of a chip on the GPU at hand, and write them as a chip file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from undertow.calibrate.benchmark import Benchmark, Measured
from undertow.calibrate.chipfile import (
    About,
    CalibrationError,
    chip_of,
    from_records,
    package_chip,
    records,
    short_name,
    to_toml,
)
from undertow.calibrate.probe import TARGETS, compile_probe
from undertow.calibrate.units import benchmarks
from undertow.cli import Outcome
from undertow.progress import Progress
from undertow.timing.chip import ChipError

DESCRIPTION = """\
Run microbenchmarks on this GPU and write a chip file: every constant with its value, the range that the repetitions lie
between, and its source. Constants that cannot be measured are taken from the package's chip of the same architecture
and keep their confidence. docs/calibrate.md tells what is measured and how.

Exit code 2 without a GPU that the benchmarks run on; --list, --compile-only and --from-records work anywhere.
"""
BAD_INPUT = (CalibrationError, ChipError)
DEFAULT_OUTPUT = "chip.toml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow calibrate`."""
    parser.add_argument(
        "--output", default=DEFAULT_OUTPUT, metavar="FILE", help="the chip file, TOML (default: %(default)s)"
    )
    parser.add_argument("--records", metavar="FILE", help="add every measurement to this file, too, as JSON lines")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only this benchmark; may be repeated (default: all)"
    )
    parser.add_argument("--name", help="of the chip (default: that of the GPU)")
    parser.add_argument(
        "--repetitions", type=int, default=7, metavar="N", help="of every launch (default: %(default)s)"
    )
    parser.add_argument("--from-records", metavar="FILE", help="measure nothing: the chip file of these records")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and measure nothing")
    parser.add_argument("--compile-only", choices=TARGETS, help="compile the benchmarks for this target, run nothing")


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure what the command line asks for.

    Raises: CalibrationError for an unknown benchmark, a number, or without a GPU; ChipError.
    """
    if arguments.repetitions < 1:
        raise CalibrationError(f"--repetitions={arguments.repetitions}: must be at least 1")
    if arguments.list:
        return _listed()
    if arguments.compile_only:
        return _compiled(arguments.compile_only, arguments.only, progress)
    if arguments.from_records:
        about, found = from_records(Path(arguments.from_records), arguments.name)
        return _written(arguments, about, found)
    return _measured(arguments, progress)


def chosen(target: str, only: Sequence[str] | None) -> list[Benchmark]:
    """The benchmarks of these names, or all, in order.

    Raises: CalibrationError naming one that is not there.
    """
    known = benchmarks(target)
    for name in only or ():
        if name not in known:
            raise CalibrationError(f"--only={name}: no such benchmark for {target}; allowed: {', '.join(known)}")
    return [known[name] for name in known if not only or name in only]


def _listed() -> Outcome:
    found = {target: benchmarks(target) for target in TARGETS}
    everything = {name: benchmark.what for of in found.values() for name, benchmark in of.items()}
    report = [
        {"name": name, "what": what, "targets": [target for target in TARGETS if name in found[target]]}
        for name, what in everything.items()
    ]
    width = max(map(len, everything))
    lines = [
        f"{row['name']:{width}}  {row['what']}" + ("" if len(row["targets"]) > 1 else f" ({row['targets'][0]} only)")
        for row in report
    ]
    return Outcome(True, {"ok": True, "benchmarks": report}, "\n".join(lines))


def _compiled(target: str, only: Sequence[str] | None, progress: Progress) -> Outcome:
    probes = {launch.probe.name: launch.probe for found in chosen(target, only) for launch in found.launches}
    report = []
    for name, probe in probes.items():
        progress.step(f"compiling {name}")
        used = compile_probe(probe, target).resources
        report.append({"probe": name, "registers": used.registers, "spill_bytes": used.spill_load_bytes})
    text = f"{len(report)} probes compiled for {target}"
    return Outcome(True, {"ok": True, "target": target, "probes": report}, text)


def _measured(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    from undertow.calibrate.run import current_gpu, results_of  # here, because it imports torch

    gpu = current_gpu()
    found: list[Measured] = []
    for benchmark in chosen(gpu.target, arguments.only):
        progress.step(f"measuring {benchmark.name}")
        found += benchmark.evaluate(results_of(gpu, benchmark.launches, arguments.repetitions))
    command = " ".join(["undertow calibrate", *(f"--only {name}" for name in arguments.only or ())])
    name = arguments.name or short_name(gpu.name)
    about = About(name, gpu.name, gpu.num_sms, gpu.target, _driver(), command, date.today())
    if arguments.records:
        with Path(arguments.records).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in records(about, found))
    return _written(arguments, about, found)


def _written(arguments: argparse.Namespace, about: About, found: list[Measured]) -> Outcome:
    chip = chip_of(about, found, package_chip(about.arch))
    Path(arguments.output).write_text(to_toml(chip))
    rows = records(about, found)
    report: dict[str, Any] = {"ok": True, "output": arguments.output, "chip": chip.name, "measured": rows}
    return Outcome(True, report, _text(found, arguments.output, len(chip.constants)))


def _driver() -> str:
    from undertow.bench.machine import NvmlMonitor, uuid_of_current

    return NvmlMonitor(uuid_of_current()).driver or "unknown"


def _text(found: list[Measured], output: str, constants: int) -> str:
    width = max((len(each.name) for each in found), default=0)
    lines = [
        f"{each.name:{width}}  {each.value:10.3f}  [{each.low:.3f}, {each.high:.3f}] {each.unit}" for each in found
    ]
    measured = sum(each.is_constant for each in found)
    return "\n".join([*lines, "", f"{constants} constants in {output}, {measured} of them measured here"])
