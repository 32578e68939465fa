"""`undertow timeline`: how long a tile and a launch would take, where the time goes, and how sure that is."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from undertow import ptx
from undertow.cases import CaseError
from undertow.cli import Outcome
from undertow.commands import ablation
from undertow.commands.attention import add_attention, scoring_of
from undertow.commands.recorded import Problem, recorded
from undertow.commands.targets import add_schedule
from undertow.emulator import Deadlock, LaunchError, UnsupportedPtx
from undertow.inputs import DTYPES, InputError, Shape
from undertow.kernels.backward import schedules_of
from undertow.kernels.sm100.launch import LaunchInputError
from undertow.launch_file import read_kernel
from undertow.plan.schema import PlanError
from undertow.plan.tiles import band
from undertow.pool import cores
from undertow.progress import Progress
from undertow.ptx import PtxSyntaxError
from undertow.timeline.perfetto import TraceError, write_trace
from undertow.timeline.picture import PictureError, draw
from undertow.timing.chip import Chip, ChipError, read_chip
from undertow.timing.constants import ConstantError, constants_of
from undertow.timing.errors import TimingError
from undertow.timing.grid_time import LAUNCH_CONSTANTS, TileCounts, Work, launch_time
from undertow.timing.kernel_time import CtaAlone, Kernels, Recorded, assumed_of, has_steady_state
from undertow.timing.predict import PORT, PORTS, Drawer, Draws, held
from undertow.timing.predict import draw as draw_all
from undertow.timing.results import Prediction, Timeline
from undertow.timing.trace import record

DESCRIPTION = """\
Predict how long a tile of the main kernel takes in its steady state, and a whole launch: the instructions that the
kernel executes are replayed on models of a chip's units. Every constant of the chip has a range, and every prediction
is a distribution over draws from all ranges: median, 5th to 95th percentile. Nothing here is measured. docs/timeline.md
says what is modelled.

Without options: the four sm100 schedules on a B200, dense, 8 x 8192, 32 heads. Any other kernel, with a launch
description as `undertow check --help` gives it: --ptx FILE --launch FILE; its first CTA is what is timed.

Refused, because what runs depends on time: the deterministic mode (CTAs wait for one another in the order of their
turns) and other kernels that fetch their work while they run; of ours that do it is said what is assumed instead.

Exit code 0: predicted. 1: the kernel deadlocks. 2: the options, files or kernel cannot be used.
"""
BAD_INPUT = (
    *(CaseError, InputError, LaunchInputError, PlanError, LaunchError, UnsupportedPtx, PtxSyntaxError),
    *(ChipError, ConstantError, TimingError, TraceError, PictureError),
)
DEFAULT_SHAPE = Shape(batch=8, seqlen_q=8192, seqlen_k=8192, heads=32)
DEFAULT_CHIPS = {"sm_90a": "h200", "sm_100a": "b200"}
TARGETS = {"sm90": "sm_90a", "sm100": "sm_100a"}
SHOWN = 5  # sensitivities, reasons to wait and steps of the critical path in the table; --json has them all
DYNAMIC = "clusterlaunchcontrol."  # of kernels whose CTAs fetch their work


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow timeline`."""
    add_schedule(parser, "all; may be repeated", action="append")
    parser.add_argument("--chip", metavar="NAME", help="h200, b200 or a chip file (default: of the architecture)")
    parser.add_argument(
        "--port",
        choices=(*PORTS, "unknown"),
        help="whether MMA operands share the port of shared memory with loads and stores (default: what the chip says)",
    )
    parser.add_argument("--draws", type=int, default=64, metavar="N", help="from the ranges (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--ablation", action="store_true", help="all sm100 schedules, dense and causal, and published")
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write the timelines at the best guesses for ui.perfetto.dev"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw a steady tile of each, at the best guesses")
    for name, default in zip(Shape._fields, (*DEFAULT_SHAPE[:-1], "as --heads")):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, metavar="N", help=f"extent of the launch (default: {default})")
    add_attention(parser)
    parser.add_argument("--ptx", metavar="FILE", help="a PTX file instead of a schedule of ours; needs --launch")
    parser.add_argument("--launch", metavar="FILE", help="its launch description: see `undertow check --help`")
    parser.add_argument("--jobs", type=int, default=cores(), metavar="N", help="processes (default: %(default)s)")


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Predict what the command line asks for.

    Raises: one of BAD_INPUT for a kernel, file or option that cannot be used.
    """
    _check(arguments)
    try:
        if arguments.ablation:
            ablation.refuse_other_options(arguments)
            return ablation.execute(arguments, _chip(arguments, "sm_100a"), progress)
        if arguments.ptx or arguments.launch:
            return _own(arguments, progress)
        return _schedules(arguments, progress)
    except Deadlock as error:
        return Outcome(False, {"runs": [], "deadlock": str(error)}, f"It deadlocks, so that it has no time:\n{error}")


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("draws", 2), ("jobs", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise CaseError(f"--{name}={getattr(arguments, name)}: must be at least {least}")
    if arguments.deterministic:
        raise CaseError(
            "--deterministic: not modelled; CTAs add to dQ in turns, so that the time of each depends on when the "
            "others run, and a replay of one CTA would have to assume that no turn is ever waited for"
        )
    for side in ("q", "k"):
        if getattr(arguments, f"cu_seqlens_{side}"):
            raise CaseError(f"--cu-seqlens-{side}: the launch of packed sequences has no timing model")


def _chip(arguments: argparse.Namespace, target: str) -> Chip:
    """The chip asked for, with the port as asked for.

    Raises: ChipError for another architecture's, or one that lacks a constant.
    """
    if arguments.chip is None and target not in DEFAULT_CHIPS:
        raise ChipError(f"no chip for {target}: allowed are kernels for {', '.join(DEFAULT_CHIPS)}, or --chip FILE")
    chip = read_chip(arguments.chip or DEFAULT_CHIPS[target])
    if chip.arch != target:
        raise ChipError(f"chip {chip.name} runs {chip.arch}: the kernel is for {target}")
    missing = (constants_of(chip.arch) | LAUNCH_CONSTANTS).keys() - chip.constants.keys()
    if missing:
        raise ChipError(f"chip {chip.name} lacks {', '.join(sorted(missing))}")
    if arguments.port in PORTS:
        return held(chip, **{PORT: PORTS[arguments.port]})
    if arguments.port == "unknown":
        port = replace(chip.constants[PORT], low=0.0, high=1.0)
        return replace(chip, constants={**chip.constants, PORT: port})
    return chip


def problem_of(arguments: argparse.Namespace) -> Problem:
    """What the launch computes.

    Raises: InputError for extents that are none.
    """
    given = {name: getattr(arguments, name) for name in Shape._fields if getattr(arguments, name) is not None}
    shape = DEFAULT_SHAPE._replace(**given)
    for name, extent in given.items():
        if extent < 1:
            raise InputError(f"{name}={extent}: must be at least 1")
    if shape.heads % (shape.kv_heads or shape.heads):
        raise InputError(f"kv_heads={shape.kv_heads}: must divide heads={shape.heads}")
    scoring = scoring_of(arguments)
    softcap = scoring.softcap is not None
    dtype = DTYPES[arguments.dtype or "bf16"]
    return Problem(shape, band(scoring.causal, scoring.window), softcap, dtype, arguments.arch)


def _schedules(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    schedules = schedules_of(arguments.arch, arguments.schedule)
    problem = problem_of(arguments)
    chip = _chip(arguments, TARGETS[arguments.arch])
    kernels = recorded(arguments.arch, schedules, problem, chip.point(), progress.step)
    draws = draw_all(Drawer(chip, arguments.seed, kernels), arguments.draws, arguments.jobs, progress.step)
    work = problem.work
    runs, lines = [], [*_heading(arguments, chip), _shape_line(problem), *assumptions(draws), ""]
    timelines, tiles = {}, {}
    for name in schedules:
        timelines[name] = kernels.timeline(name, draws.point.constants, arguments.seed, chip)
        numbers = _numbers(name, draws, work, problem.flops)
        tiles[name] = numbers["cycles_per_tile"]
        runs.append(_record(name, problem, numbers, draws, timelines[name]))
        lines += [*_told(name, numbers, draws, timelines[name]), ""]
    _write(arguments, timelines, tiles)
    report = {**_about(arguments, chip), "runs": runs, "assumptions": assumptions(draws)}
    return Outcome(True, report, "\n".join([*lines, *_assumed(chip)]))


def assumptions(draws: Draws) -> list[str]:
    """What a replay of one CTA alone has to take for granted about the others, in sentences."""
    stay = [name for name, replayed in draws.point.found.items() if replayed.cta.item is not None]
    if not stay:
        return []
    return [
        f"Assumed of {', '.join(stay)}, whose CTAs stay and claim their work while they run: key/value tiles are "
        "claimed in order, the next one by the CTA that is the first to be done."
    ]


def _own(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """A kernel that no plan describes: its first CTA."""
    if not arguments.ptx or not arguments.launch:
        raise CaseError("--launch: needs --ptx, too" if arguments.launch else "--ptx: needs --launch, too")
    given = [name for name in (*Shape._fields, "schedule") if getattr(arguments, name) is not None]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise CaseError(f"{flags}: not allowed beside --ptx, whose launch file says it all")
    kernel = read_kernel(arguments.ptx, arguments.launch)
    if DYNAMIC in kernel.ptx:
        raise CaseError(f"{arguments.ptx}: has {DYNAMIC}*: CTAs fetch their work when they come to it; not modelled")
    target = (ptx.parse_module(kernel.ptx, kernel.name).target or ("",))[0]
    chip = _chip(arguments, target)
    progress.step(f"executing {kernel.name}")
    trace = record(kernel, chip.point())
    name, kernels = kernel.name, Kernels({kernel.name: (Recorded(TileCounts(0, 0), trace),)})
    find = kernels if has_steady_state(trace) else CtaAlone(trace)
    draws = draw_all(Drawer(chip, arguments.seed, find), arguments.draws, arguments.jobs, progress.step)
    about = _about(arguments, chip)
    lines = [*_heading(arguments, chip), ""]
    if isinstance(find, CtaAlone):
        cycles = draws.predict(lambda draw: draw.found["cycles"])
        run = {"schedule": name, "cycles_per_tile": None, "band": None, "cta_cycles": _distribution(cycles)}
        run |= {"sensitivity": dict(cycles.sensitivity), "assumed": list(assumed_of(chip))}
        lines += [name, _number_line("cta_cycles", cycles), _sensitivity_line(cycles)]
        lines += ["  It has no loop over tiles that are loaded, so that there is no steady state to look into.", ""]
        return Outcome(True, {**about, "runs": [run]}, "\n".join([*lines, *_assumed(chip)]))
    timeline = kernels.timeline(name, draws.point.constants, arguments.seed, chip)
    numbers = {
        "cycles_per_tile": draws.predict(lambda draw: draw.found[name].per_tile),
        "cta_cycles": draws.predict(lambda draw: draw.found[name].cycles),
    }
    _write(arguments, {name: timeline}, {name: numbers["cycles_per_tile"]})
    run = _record(name, None, numbers, draws, timeline)
    lines += [*_told(name, numbers, draws, timeline), "", *_assumed(chip)]
    return Outcome(True, {**about, "runs": [run]}, "\n".join(lines))


def _numbers(name: str, draws: Draws, work: Work, flops: float) -> dict[str, Prediction]:
    """Cycles of a tile and of the launch, and TFLOP/s at the clocks that were drawn."""
    share, sms = work.masked_share, draws.chip.num_sms

    def cycles(draw: Any) -> float:
        return launch_time(work, draw.found[name].cta, sms, draw.constants)

    return {
        "cycles_per_tile": draws.predict(lambda draw: draw.found[name].tile(share)),
        "launch_cycles": draws.predict(cycles),
        "tflops": draws.predict(lambda draw: flops / cycles(draw) * draw.constants["sm_clock_ghz"] * 1e-3),
    }


def _record(
    name: str, problem: Problem | None, numbers: Mapping[str, Prediction], draws: Draws, timeline: Timeline
) -> dict[str, Any]:
    """One entry of `runs`: medians, bands, points, and where the time goes."""
    tile = numbers["cycles_per_tile"]
    about = {} if problem is None else {"mask": problem.mask, "shape": problem.shape._asdict()}
    return {
        "schedule": name,
        **about,
        "cycles_per_tile": tile.median,
        "band": list(tile.band),
        "point": tile.point,
        **{key: _distribution(x) for key, x in numbers.items() if key != "cycles_per_tile"},
        "utilisation": utilisation(name, draws),
        "stalls": {role: dict(reasons) for role, reasons in timeline.stalls.items()},
        "critical_path": [asdict(link) for link in timeline.critical_path],
        "sensitivity": dict(tile.sensitivity),
        "assumed": list(timeline.assumed),
        "assumptions": list(timeline.assumptions),
    }


def _distribution(number: Prediction) -> dict[str, Any]:
    return {"median": number.median, "band": list(number.band), "point": number.point}


def utilisation(name: str, draws: Draws) -> dict[str, float]:
    """Median share of the time in which each unit is busy."""
    units = draws.point.found[name].utilisation
    shares = {unit: [draw.found[name].utilisation.get(unit, 0.0) for draw in draws.drawn] for unit in units}
    return {unit: statistics.median(each) for unit, each in shares.items()}


def _about(arguments: argparse.Namespace, chip: Chip) -> dict[str, Any]:
    clock = chip.constants["sm_clock_ghz"]
    return {
        "chip": chip.name,
        "label": "predicted",
        "num_sms": chip.num_sms,
        "draws": arguments.draws,
        "seed": arguments.seed,
        "port": port_of(chip),
        "clock_ghz": [clock.low, clock.high],
    }


def port_of(chip: Chip) -> str:
    """What is taken of the port of MMA operands: shared, own or unknown."""
    port = chip.constants[PORT]
    if port.low != port.high:
        return "unknown"
    return next(word for word, value in PORTS.items() if value == port.value)


def _heading(arguments: argparse.Namespace, chip: Chip) -> list[str]:
    clock = chip.constants["sm_clock_ghz"]
    return [
        f"Predicted for {chip.name}: {chip.what}.",
        f"Median, 5th to 95th percentile of {arguments.draws} draws (seed {arguments.seed}), and the best guess.",
        f"Port of MMA operands: {port_of(chip)}. Clock: {clock.low:g} to {clock.high:g} GHz.",
    ]


def _shape_line(problem: Problem) -> str:
    shape, work = problem.shape, problem.work
    heads = f"{shape.heads}:{shape.kv_heads or shape.heads}"
    return (
        f"Main kernel, {problem.mask}, {shape.batch} x {shape.seqlen_q} x {shape.seqlen_k}, heads {heads}: "
        f"{len(work.order)} key/value tiles, {work.tiles.tiles} tiles of scores, {work.masked_share:.1%} masked."
    )


UNITS = {"cycles_per_tile": "cycles per tile", "launch_cycles": "cycles of the launch", "tflops": "TFLOP/s"}
UNITS["cta_cycles"] = "cycles of the first CTA"


def _told(name: str, numbers: Mapping[str, Prediction], draws: Draws, timeline: Timeline) -> list[str]:
    lines = [name]
    lines += [_number_line(key, number) for key, number in numbers.items()]
    shares = sorted(utilisation(name, draws).items(), key=lambda item: -item[1])
    lines.append("  busy                  " + ", ".join(f"{unit} {share:.0%}" for unit, share in shares))
    for role, reasons in timeline.stalls.items():
        waits = sorted(reasons.items(), key=lambda item: -item[1])[:SHOWN]
        lines.append(f"  {role + ' waits':<22}" + ", ".join(f"{reason} {cycles:.0f}" for reason, cycles in waits))
    for link in sorted(timeline.critical_path, key=lambda link: -link.cycles)[:SHOWN]:
        lines.append(f"  {'critical path':<22}{link.cycles:.0f}: {link.row}, {link.name}, {link.reason}")
    lines.append(_sensitivity_line(numbers["cycles_per_tile"]))
    lines += [f"  assumed               {sentence}" for sentence in timeline.assumptions]
    return lines


def _number_line(key: str, number: Prediction) -> str:
    low, high = number.band
    return f"  {UNITS[key]:<22}{number.median:>14,.0f}  ({low:,.0f} to {high:,.0f}), best guess {number.point:,.0f}"


def _sensitivity_line(number: Prediction) -> str:
    strongest = list(number.sensitivity.items())[:SHOWN]
    return "  most sensitive to     " + ", ".join(f"{constant} {rank:+.2f}" for constant, rank in strongest)


def _assumed(chip: Chip) -> list[str]:
    return [f"Assumed, nobody has measured or published them: {', '.join(assumed_of(chip))}."]


def _write(arguments: argparse.Namespace, timelines: Mapping[str, Timeline], tiles: Mapping[str, Prediction]) -> None:
    if arguments.perfetto:
        write_trace(list(timelines.values()), Path(arguments.perfetto))
    if arguments.svg:
        picture = draw(list(timelines.values()), predictions=tiles)
        try:
            Path(arguments.svg).write_text(picture, encoding="utf-8")
        except OSError as error:
            raise CaseError(f"--svg={arguments.svg}: cannot be written: {error}") from error
