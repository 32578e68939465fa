"""`undertow precompile`: have the compiled calls of named variants on disk, on a machine without a GPU."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from undertow.cache import CacheError, cache_folder
from undertow.cli import Outcome
from undertow.kernels.backward import SCHEDULES
from undertow.kernels.sm100.launch import LaunchInputError
from undertow.plan.schema import DType
from undertow.progress import Progress
from undertow.runtime import objects
from undertow.runtime.ahead import SECONDS, Made, compile_ahead
from undertow.runtime.architectures import ARCHITECTURES, Architecture, ArchitectureError, architecture

DESCRIPTION = """\
Compile whole backward calls to objects and keep them in the cache, where they are found at run time: then nothing is
compiled. No GPU, no driver. Sizes, lengths, scales, the heads of a group and the bounds of a window are run-time
numbers, so that one object of a variant serves all of them.

A variant is a mask (dense, causal, window, or left where only the left is bounded), and after hyphens what is present
besides: packed (sequences of any lengths), softcap, deterministic, dlse (a gradient flows into LSE), sink.

On sm_90a sizes decide more: short sequences take turns as in deterministic mode, and large groups of query heads, or
those of few keys, are split. With a variant those that calls of some size use in its place are compiled too.
"""
BAD_INPUT = (ArchitectureError, LaunchInputError, CacheError)
HOT = "dense,causal,window,dense-packed,causal-packed,window-packed,causal-sink,window-sink"
DTYPES = {"bf16": DType.BF16, "fp16": DType.F16}
HEADINGS = ("target", "variant", "outcome", "s", "KiB")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `undertow precompile`."""
    targets = ",".join(row.target for row in ARCHITECTURES.values())
    parser.add_argument("--arch", type=_words, default=_words(targets), help=f"architectures (default: {targets})")
    parser.add_argument("--dtype", type=_words, default=list(DTYPES), help=f"of q, k, v (default: {','.join(DTYPES)})")
    parser.add_argument("--variant", type=_words, default=_words(HOT), help=f"variants (default: {HOT})")
    schedules = [name for names in SCHEDULES.values() for name in names]
    parser.add_argument("--schedule", choices=schedules, help="default: the fastest of every architecture")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="cache folder to fill; name it in UNDERTOW_CACHE_DIR at run time (default: the cache of this user)",
    )
    parser.add_argument(
        "--timeout", type=float, default=SECONDS, metavar="S", help="for one variant (default: %(default)g)"
    )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Compile what the command line asks for.

    Raises: ArchitectureError, LaunchInputError for a name that is none; CacheError if the folder cannot be written.
    """
    asked = _asked(arguments)
    if arguments.output is not None:
        os.environ["UNDERTOW_CACHE_DIR"] = str(Path(arguments.output).absolute())
    folder = cache_folder()
    if arguments.output is not None and folder != Path(arguments.output).absolute():
        raise CacheError(f"--output={arguments.output}: must be a folder that can be written")
    rows = []
    for row, variants in asked:
        known = {variant for variant in variants if objects.is_compiled(row, variant)}
        for made in compile_ahead(row, variants, arguments.timeout):
            progress.step(f"{row.target} {made.variant.name}")
            rows.append(_record(row, made, made.variant in known))
    ok = all(record["outcome"] != "failed" for record in rows)
    return Outcome(ok, {"ok": ok, "folder": str(folder), "objects": rows}, _text(rows, folder))


def _asked(arguments: argparse.Namespace) -> list[tuple[Architecture, list[Any]]]:
    for dtype in arguments.dtype:
        if dtype not in DTYPES:
            raise LaunchInputError(f"--dtype: {dtype!r} is unknown; known are {', '.join(DTYPES)}")
    return [
        (
            row,
            list(
                dict.fromkeys(
                    used
                    for dtype in arguments.dtype
                    for name in arguments.variant
                    for used in row.call.used_for(row.call.variant_named(name, DTYPES[dtype], arguments.schedule))
                )
            ),
        )
        for row in map(architecture, arguments.arch)
    ]


def _record(row: Architecture, made: Made, was_known: bool) -> dict[str, Any]:
    outcome = "failed" if made.complaint else "cached" if was_known else "compiled"
    return {
        "arch": row.name,
        "target": row.target,
        "variant": made.variant.name,
        "outcome": outcome,
        "complaint": made.complaint,
        "seconds": round(made.seconds, 3),
        "bytes": made.num_bytes,
        "folder": None if made.folder is None else str(made.folder),
    }


def _text(rows: list[dict[str, Any]], folder: Path) -> str:
    cells = [HEADINGS] + [
        (r["target"], r["variant"], r["outcome"], f"{r['seconds']:.1f}", str(r["bytes"] // 1024)) for r in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    lines += [f"FAILED {r['variant']}: {r['complaint']}" for r in rows if r["complaint"]]
    return "\n".join([*lines, "", f"In {folder}"])
