"""`undertow verify`: compile the backward kernels, execute them on the emulator, compare with float64."""

from __future__ import annotations

import argparse
import functools
import math

from undertow.cli import Outcome
from undertow.commands.attention import add_attention, only_random, random_batch_of, scoring_of
from undertow.commands.targets import add_schedule
from undertow.inputs import Batch, InputError, Shape, read_batch
from undertow.kernels.backward import schedules_of
from undertow.kernels.sm100.launch import LaunchInputError
from undertow.progress import Progress
from undertow.reference import Gradients, ProblemError
from undertow.verify import Backward, Run, saved_forward_errors, verify

DESCRIPTION = """\
Compile the head-dim-64 backward kernels of an architecture, execute their PTX on the emulator and compare dQ, dK, dV
with float64. No GPU, no driver. Without options: all four sm100 schedules on 256 query rows x 384 keys, 2 heads.

A gradient is right if its relative Frobenius error is at most 1.25 times that of an ideal 16-bit pipeline on the same
data (P, dS and the results rounded once, all sums exact) plus the noise of float32 sums.
"""
BAD_INPUT = (InputError, LaunchInputError, ProblemError)
DEFAULT_SHAPE = Shape(batch=1, seqlen_q=256, seqlen_k=384, heads=2)
BACKENDS = ("auto", "numpy", "compiled")
HEADINGS = ("schedule", "backend", "shape", "error dQ", "dK", "dV", "ideal dQ", "dK", "dV", "ratio")
HEADINGS += ("barriers/tile", "tiles", "compile s", "run s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow verify`."""
    for name, default in zip(Shape._fields, (*DEFAULT_SHAPE[:-1], "as --heads")):
        parser.add_argument(_flag(name), type=int, metavar="N", help=f"extent of a random batch (default: {default})")
    add_schedule(parser, "all; may be repeated", action="append")
    add_attention(parser)
    parser.add_argument("--seed", type=int, help="of the random batch (default: 0)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of the emulator (default: %(default)s)")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="safetensors file with q, k, v, dout (batch, seqlen, heads, 64) in bf16 or fp16, and if you have them "
        "out and lse (batch, heads, seqlen_q; float32, natural logarithm), dlse, sink (heads; float32), or packed rows "
        "without a batch dimension and cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k (int32)",
    )


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Run what the command line asks for.

    Raises: InputError or LaunchInputError for a batch that cannot be run.
    """
    progress.step("loading the emulator")
    from undertow import emulated, emulator

    options = emulator.Options(backend=arguments.backend)

    def backward(batch: Batch, schedule: str) -> emulated.EmulatedBackward:
        return emulated.backward(
            batch,
            schedule=schedule,
            deterministic=arguments.deterministic,
            options=options,
            arch=arguments.arch,
        )

    return judge(arguments, progress, backward)


def judge(arguments: argparse.Namespace, progress: Progress, backward: Backward) -> Outcome:
    """Run `backward` on the batch and the schedules of the command line, and word the outcome."""
    batch, origin = _batch(arguments, progress)
    schedules = schedules_of(arguments.arch, arguments.schedule)
    runs = []
    progress.step("computing the float64 gradients")
    for run in verify(batch, schedules, _announced(backward, progress)):
        runs.append(run)
        progress.step(f"{run.schedule} done")
    lines = [f"Input: {origin}"]
    if len(batch.computed) < 2:
        lines.append(_saved_forward_line(batch))
    return Outcome(
        ok=all(run.ok for run in runs),
        report={"ok": all(run.ok for run in runs), "runs": [_record(run) for run in runs]},
        text="\n".join([*lines, "", *table(runs), "", *_verdict(runs)]),
    )


def _batch(arguments: argparse.Namespace, progress: Progress) -> tuple[Batch, str]:
    """The batch to run, and in words where it comes from."""
    if arguments.input is None:
        progress.step("making a random batch")
        batch, seed, dtype = random_batch_of(arguments, DEFAULT_SHAPE), arguments.seed or 0, arguments.dtype or "bf16"
        return batch, f"random {dtype} numbers, seed {seed}; out and lse by the float64 reference"
    given = [name for name in (*Shape._fields, "seed") if getattr(arguments, name) is not None]
    given += only_random(arguments)
    if given:
        raise InputError(f"{', '.join(map(_flag, given))}: not allowed beside --input, which brings its own batch")
    progress.step(f"reading {arguments.input}")
    batch = read_batch(arguments.input, scoring_of(arguments))
    made = " and ".join(batch.computed)
    return batch, arguments.input + (f"; {made} by the float64 reference" if made else "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _announced(backward: Backward, progress: Progress) -> Backward:
    @functools.wraps(backward)
    def announced(batch: Batch, schedule: str):
        progress.step(f"compiling and executing {schedule}")
        return backward(batch, schedule)

    return announced


def _saved_forward_line(batch: Batch) -> str:
    """How far the user's out and lse are from what q, k, v imply: a wrong forward is not a wrong backward kernel."""
    out, rounded, lse = saved_forward_errors(batch)
    return (
        f"Its forward against float64: out differs by {out:.2e} (one rounding to 16 bits: {rounded:.2e}), "
        f"lse by at most {lse:.2e}"
    )


def table(runs: list[Run]) -> list[str]:
    """The runs as aligned text, one line each under a heading."""
    rows = [HEADINGS, *map(_cells, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    left = 3  # names to the left, numbers to the right
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _cells(run: Run) -> tuple[str, ...]:
    group = "" if run.shape.kv_heads == run.shape.heads else f":{run.shape.kv_heads}"
    shape = f"{run.shape.seqlen_q}x{run.shape.seqlen_k} b{run.shape.batch} h{run.shape.heads}{group}"
    ideal = [f"{error:.2e}" for error in run.measure.ideal]
    if run.executed is None or run.errors is None:
        return (run.schedule, "-", shape, "-", "-", "-", *ideal, "-", "-", "-", "-", "-")
    done = run.executed
    return (
        run.schedule,
        done.backend,
        shape,
        *(f"{error:.2e}" for error in run.errors),
        *ideal,
        _ratio(run),
        f"{done.compute_barriers_per_tile:g}",
        str(done.tile_iterations),
        f"{done.compile_seconds:.2f}",
        f"{done.run_seconds:.2f}",
    )


def _ratio(run: Run) -> str:
    """The largest error over its ideal; where the ideal error is below float32 noise a ratio would say nothing."""
    assert run.errors is not None
    measure = run.measure
    ratios = [error / ideal for error, ideal, floor in zip(run.errors, measure.ideal, measure.floor) if ideal > floor]
    return f"{max(ratios):.3f}" if ratios else "-"


def _verdict(runs: list[Run]) -> list[str]:
    wrong = [f"WRONG {run.schedule}: {run.complaint}" for run in runs if not run.ok]
    return wrong or ["Right: every error is within 1.25 times the ideal pipeline's, plus float32 noise."]


def _record(run: Run) -> dict[str, object]:
    """One entry of `runs` in the JSON object; what could not be measured is null."""
    done = run.executed
    errors = run.errors or (math.nan,) * 3

    def measured(name: str) -> object:
        return _plain(getattr(done, name)) if done is not None else None

    return {
        "schedule": run.schedule,
        "backend": measured("backend"),
        "shape": run.shape._asdict(),
        "errors": _numbers(errors),
        "ideal": _numbers(run.measure.ideal),
        "ok": run.ok,
        "compute_barriers_per_tile": measured("compute_barriers_per_tile"),
        "tile_iterations": measured("tile_iterations"),
        "seconds": {"compile": measured("compile_seconds"), "run": measured("run_seconds")},
    }


def _plain(value: object) -> object:
    """A whole number as an int: five barriers per tile are 5, not 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _numbers(errors: tuple[float, ...]) -> dict[str, float | None]:
    return {name: error if math.isfinite(error) else None for name, error in zip(Gradients._fields, errors)}
