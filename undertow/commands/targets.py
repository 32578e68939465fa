"""What `check` and `mutate` run: our schedules on a random batch, or any PTX file with a launch description."""

from __future__ import annotations

import argparse
from typing import Any

from undertow.cases import COMPLETIONS, CaseError, Kernel, settings
from undertow.emulator import Options
from undertow.inputs import Shape
from undertow.kernels.backward import SCHEDULES
from undertow.launch_file import read_kernel
from undertow.pool import cores

ARCH = "sm100"  # of the kernels that commands take if nobody says

# the least that fills every pipeline and has tails: three query tiles by two key tiles, both last ones partial. On sm90
# it takes a fourth until a slot is handed back a second time.
DEFAULT_SHAPE = Shape(batch=1, seqlen_q=300, seqlen_k=200, heads=1)
DEFAULT_SHAPES = {ARCH: DEFAULT_SHAPE, "sm90": DEFAULT_SHAPE._replace(seqlen_q=430)}

# What one key/value tile for a CTA does not show: more of them than the ring of eight that announces them has stages.
# Ten with one query tile each, so that a stage is handed back twice; then nine with three, of which the last is one of
# the loop that has no masks; then a few with two, of which the last is one of the loop that has them, of two heads, so
# that a partial tile is not the last that a CTA works on. Rows, keys, heads:
SEVERAL_TILES = ((100, 2400, 1), (300, 2176, 1), (200, 345, 2))
MORE_SHAPES = {
    "sm90": tuple(DEFAULT_SHAPE._replace(seqlen_q=q, seqlen_k=k, heads=heads) for q, k, heads in SEVERAL_TILES)
}


def add_schedule(parser: argparse.ArgumentParser, default: str, **more: Any) -> None:
    """Add the options that choose kernels of ours. default: the schedules if none is named, in words."""
    names = [name for schedules in SCHEDULES.values() for name in schedules]
    of = "; ".join(f"{arch}: {', '.join(schedules)}" for arch, schedules in SCHEDULES.items())
    parser.add_argument(
        "--arch", choices=SCHEDULES, default=ARCH, help="architecture of the kernels (default: %(default)s)"
    )
    parser.add_argument(
        "--schedule", choices=names, metavar="NAME", help=f"of the kernels, {of} (default: {default})", **more
    )


def add_target(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Add the options that say what is run, and how often."""
    for name in Shape._fields:
        default = _told(name)
        parser.add_argument(_flag(name), type=int, metavar="N", help=f"extent of the random batch (default: {default})")
    parser.add_argument("--seed", type=int, help="of the random batch (default: 0)")
    parser.add_argument("--ptx", metavar="FILE", help="a PTX file instead of a schedule of ours; needs --launch")
    parser.add_argument("--launch", metavar="FILE", help="its launch description: see `undertow check --help`")
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help="scheduler seeds (default: %(default)s)")
    parser.add_argument(
        "--completion",
        action="append",
        choices=COMPLETIONS,
        help="when asynchronous operations happen; may be repeated (default: all three)",
    )
    parser.add_argument("--jobs", type=int, default=cores(), metavar="N", help="processes (default: %(default)s)")


def own_kernel(arguments: argparse.Namespace) -> Kernel | None:
    """The kernel of --ptx and --launch, None if a schedule is to be run.

    Raises: CaseError if one lacks the other, if options for schedules are given as well, or for a wrong file.
    """
    ptx, launch = arguments.ptx, arguments.launch
    if ptx is None and launch is None:
        return None
    if ptx is None or launch is None:
        raise CaseError("--launch: needs --ptx, too" if ptx is None else "--ptx: needs --launch, too")
    given = [name for name in (*Shape._fields, "seed", "schedule") if getattr(arguments, name) is not None]
    if given:
        raise CaseError(f"{', '.join(map(_flag, given))}: not allowed beside --ptx, whose launch file says it all")
    return read_kernel(ptx, launch)


def shapes_of(arguments: argparse.Namespace) -> list[Shape]:
    """The shapes of the random batches: one if any extent is given, otherwise what shows all that the kernels do."""
    given = {name: getattr(arguments, name) for name in Shape._fields if getattr(arguments, name) is not None}
    shape = DEFAULT_SHAPES[arguments.arch]
    return [shape._replace(**given)] if given else [shape, *MORE_SHAPES.get(arguments.arch, ())]


def settings_of(arguments: argparse.Namespace) -> list[Options]:
    """The settings under which everything is run.

    Raises: CaseError for less than one seed or process.
    """
    if arguments.jobs < 1:
        raise CaseError(f"--jobs={arguments.jobs}: must be at least 1")
    return settings(arguments.seeds, arguments.completion or COMPLETIONS)


def _told(name: str) -> str:
    """The default of an extent, and of which architectures it is another."""
    usual = getattr(DEFAULT_SHAPE, name)
    others = {arch: getattr(shape, name) for arch, shape in DEFAULT_SHAPES.items()}
    return ", ".join([str(usual), *(f"{arch}: {extent}" for arch, extent in others.items() if extent != usual)])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
