"""The `undertow` command: finds the subcommand, keeps stdout clean, turns what happens into an exit code.

Exit codes: 0 right; 1 a wrong result or a finding; 2 bad input; 3 it could not be judged (an error of ours, or of the
compiler); 130 interrupted. With --json stdout holds exactly one JSON object for 0 and 1 and nothing otherwise; progress
and messages go to stderr.

A subcommand is a module in `undertow.commands` and a row of COMMANDS. The module offers DESCRIPTION (str), BAD_INPUT
(exception types that mean exit code 2), configure(parser) and execute(arguments, progress) -> Outcome. It is imported
only if it is asked for, so that `undertow --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from undertow import __version__
from undertow.progress import Progress

RIGHT, WRONG, BAD_INPUT, NOT_JUDGED, INTERRUPTED = 0, 1, 2, 3, 130

COMMANDS = {  # name: (module, one line of help)
    "verify": ("undertow.commands.verify", "run the backward kernels on the emulator and compare with float64"),
    "check": ("undertow.commands.check", "run kernels under all observers: races, fences, barriers, lifetimes"),
    "sweep": ("undertow.commands.sweep", "judge every configuration: 124 cells, all schedules, under all observers"),
    "mutate": ("undertow.commands.mutate", "take one synchronisation away at a time: which of them are needed"),
    "timeline": ("undertow.commands.timeline", "predict where the time of a kernel goes, and how sure that is"),
    "bench": ("undertow.commands.bench", "time the backward pass on this GPU, beside the libraries that are installed"),
    "report": ("undertow.commands.report", "everything that is known of the kernels as one HTML file"),
    "calibrate": ("undertow.commands.calibrate", "measure the constants of a chip file on this GPU"),
    "precompile": ("undertow.commands.precompile", "have kernels compiled before they are needed, without a GPU"),
    "doctor": ("undertow.commands.doctor", "is this machine fit, and what would run on it"),
}


@dataclass(frozen=True)
class Outcome:
    """What a subcommand found: whether all is right, the JSON object, and the same for people to read."""

    ok: bool
    report: dict[str, Any]
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (sys.argv if None) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser, module = _parser(words)
        parsed = parser.parse_args(words)
    except SystemExit as leaving:  # argparse has answered: help, version, or a usage error
        return leaving.code if isinstance(leaving.code, int) else BAD_INPUT
    assert module is not None, "argparse insists on a subcommand"
    outcome, code = _execute(module, parsed)
    if outcome is None:
        return code
    return _print(json.dumps(outcome.report, allow_nan=False) if parsed.json else outcome.text, code)


def _parser(words: list[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """The parser of the whole command line; of the subcommands only the one that is asked for has its options."""
    parser = argparse.ArgumentParser(
        prog="undertow", description="FlashAttention backward for Blackwell at head dim 64, proved without a GPU."
    )
    parser.add_argument("--version", action="version", version=f"undertow {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    module = None
    for name, (where, line) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            module = importlib.import_module(where)
            subparser.description = module.DESCRIPTION
            module.configure(subparser)
            subparser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser, module


def _execute(module: ModuleType, parsed: argparse.Namespace) -> tuple[Outcome | None, int]:
    name = f"undertow {parsed.command}"
    try:
        with _stdout_to_stderr(), _warnings_as_lines(name), Progress(name) as progress:
            outcome: Outcome = module.execute(parsed, progress)
    except module.BAD_INPUT as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None, BAD_INPUT
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return None, INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        print(f"{name}: not judged, because of the error above: {type(error).__name__}: {error}", file=sys.stderr)
        return None, NOT_JUDGED
    return outcome, RIGHT if outcome.ok else WRONG


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what anything prints meanwhile, compilers' C++ included, to stderr: stdout is for the result alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _warnings_as_lines(name: str) -> Iterator[None]:
    """Tell warnings as messages to a user, one line each, instead of as places in our source."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"{name}: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _print(text: str, code: int) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough (`undertow ... | head`): the verdict stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code
