"""What the timing model says of the four schedules, from one set of draws: for `undertow report`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.calibrate.recorded import Source as TraceSource
from undertow.calibrate.recorded import read_timeline
from undertow.commands.ablation import ARCH, MASKS, SHAPE, UNKNOWN, Ablation, Both, outcome
from undertow.commands.recorded import Problem, recorded
from undertow.inputs import DTYPES, Shape
from undertow.kernels.sm90.plan import plan as hopper_plan
from undertow.kernels.sm100.plan import SCHEDULES
from undertow.report.ablation import COMMAND as ABLATION
from undertow.report.bars import Bar
from undertow.report.page import Label, Missing, Part, Source
from undertow.report.throughput import group_of
from undertow.report.timelines import COMMAND as TIMELINE
from undertow.report.timelines import traced as figure
from undertow.timing.chip import Chip, read_chip
from undertow.timing.errors import TimingError
from undertow.timing.grid_time import launch_time
from undertow.timing.predict import PORT, PORTS, Draw, Drawer, draw
from undertow.timing.published import Throughput, published
from undertow.timing.results import Prediction, Timeline

TRACED_ARCH, TRACED_CHIP, TRACED_ON = "sm90", "h200", "NVIDIA H200"
STEPS = "in steps of 32 ns"  # of the tracer's times
SHOWN_MASK = "dense"  # of the timelines, as in the published figures
SERIES = {"aliased": "predicted, aliased", "split": "predicted, split"}  # beside published before and after


@dataclass(frozen=True)
class Predicted:
    """record: as `undertow timeline --ablation --json` prints it. timelines: at the best guesses. tiles: their cycles,
    by kernel. throughput: bars in TFLOP/s beside the published ones.
    """

    record: dict[str, Any]
    timelines: list[Timeline]
    tiles: dict[str, Prediction]
    throughput: list[Bar]
    source: Source
    throughput_source: Source


def predict(chip: Chip, arguments: argparse.Namespace, step: Callable[[str], None]) -> Predicted:
    """Record the four schedules, dense and causal, and replay them. arguments: draws, seed, jobs.

    Raises: CompileError; TimingError, ConstantError for a chip that lacks something.
    """
    problems = {mask: Problem(SHAPE, band) for mask, band in MASKS.items()}
    kernels = {mask: recorded(ARCH, SCHEDULES, problem, chip.point(), step) for mask, problem in problems.items()}
    draws = draw(Drawer(chip, arguments.seed, Both(kernels)), arguments.draws, arguments.jobs, step)
    found = Ablation(draws, {mask: problem.work for mask, problem in problems.items()})
    port = _port(chip)
    drawn = f"chip `{chip.name}`, {arguments.draws} draws from the ranges of its constants, seed {arguments.seed}"
    clock, shown = chip.constants["sm_clock_ghz"], kernels[SHOWN_MASK]
    return Predicted(
        outcome(found, arguments).report,
        [shown.timeline(name, draws.point.constants, arguments.seed, chip) for name in SCHEDULES],
        {name: found.tiles(port)[name, SHOWN_MASK] for name in SCHEDULES},
        [bar for shape in published().throughput if not shape.deterministic for bar in _bars(found, port, shape)],
        Source(Label.PREDICTED, f"{drawn}; {SHOWN_MASK}, main kernel, steady state", TIMELINE),
        Source(
            Label.PREDICTED,
            f"{drawn}; the main kernel alone, at {clock.low:g} to {clock.high:g} GHz; deterministic kernels are not "
            "modelled, fp16 is taken to be as fast as bf16",
            ABLATION,
        ),
    )


def traced(path: Path, arguments: argparse.Namespace, step: Callable[[str], None]) -> list[Part]:
    """The SM90 kernel in a trace of run-iket, beside its prediction; notes for what is not there of the two.

    Raises: calibrate.recorded.RecordError for a file that is no trace of it.
    """
    made = "run-iket with tools/record_events.py"
    if not path.exists():
        return [Missing(f"a traced run of the SM90 kernel, because there is no file `{path}`", made)]
    chip, plan = read_chip(TRACED_CHIP), hopper_plan()
    gigahertz = chip.constants["sm_clock_ghz"].value
    trace = Source(Label.MEASURED, f"`{path}`, {TRACED_ON}, one CTA, cycles taken to be of {gigahertz:g} GHz", made)
    measured = read_timeline(path, TraceSource(plan, gigahertz, TRACED_ON))
    command = f"{TIMELINE} --arch {TRACED_ARCH}"
    try:
        kernels = recorded(TRACED_ARCH, [plan.name], Problem(SHAPE, MASKS[SHOWN_MASK]), chip.point(), step)
        replayed = kernels.timeline(plan.name, chip.point(), arguments.seed, chip)
    except TimingError as error:  # the trace is worth showing alone
        why = Missing(f"the prediction of the SM90 kernel, because the model refuses it: {error}", command)
        return [figure(measured, None, trace, STEPS), why]
    predicted = Source(Label.PREDICTED, f"chip `{chip.name}`, best guesses, {SHOWN_MASK}", command)
    return [figure(measured, (replayed, predicted), trace, STEPS)]


def _port(chip: Chip) -> str:
    """What the chip says of the port of MMA operands: one of PORTS, or unknown."""
    port = chip.constants[PORT]
    return UNKNOWN if port.low != port.high else next(word for word, value in PORTS.items() if value == port.value)


def _bars(found: Ablation, port: str, shape: Throughput) -> list[Bar]:
    """The baseline and `split` on a published shape: its CTAs are scheduled anew, its tiles are those recorded."""
    extents = Shape(shape.batch, shape.seqlen, shape.seqlen, *shape.heads)
    problem = Problem(extents, MASKS[shape.mask], dtype=DTYPES[shape.dtype])
    work, flops, chip = problem.work, problem.flops, found.draws.chip
    bars = []
    for schedule, series in SERIES.items():

        def tflops(drawn: Draw, schedule: str = schedule) -> float:
            cta = found.replayed(drawn, port, (schedule, shape.mask)).cta
            cycles = launch_time(work, cta, chip.num_sms, drawn.constants)
            return flops / cycles * drawn.constants["sm_clock_ghz"] * 1e-3

        known = found.draws.predict(tflops)
        bars.append(Bar(group_of(shape), series, known.median, known.band))
    return bars
