"""Cycles of the main kernel, by the hardware counters that Nsight Compute (ncu) reads.

Times of a GPU at its power limit move by several percent from run to run; cycles of one kernel by a few in a thousand.
A child process under ncu makes the calls: before each of them it launches a marker, a kernel of torch that nothing else
launches, so that the list of kernels that ncu prints falls into calls. Clocks are left alone (--clock-control none).
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.bench.machine import PACKAGE, BenchError

METRIC = "gpc__cycles_elapsed.max"
MARKER = "spin_kernel"  # of torch.cuda._sleep
CALLS = 3  # of each provider in each cell
SECONDS = 3600.0
CHILD = "undertow.bench.counted"


class CountError(RuntimeError):
    """ncu did not give what was asked for; the message has its last words."""


@dataclass(frozen=True)
class Launch:
    """One kernel as it ran."""

    kernel: str
    cycles: float


@dataclass(frozen=True)
class Counted:
    """The kernels of one backward pass: medians over the calls. main: the longest of them."""

    kernels: list[Launch]

    @property
    def main(self) -> Launch:
        return max(self.kernels, key=lambda launch: launch.cycles)


def find_ncu(given: str | None) -> str:
    """The path of ncu.

    Raises: BenchError.
    """
    found = shutil.which(given or "ncu")
    if found is None:
        raise BenchError(
            f"{given or 'ncu'} is not found: --cycles needs Nsight Compute, which comes with the CUDA toolkit; "
            "--ncu names its program"
        )
    return found


def command(ncu: str, request: Path, answer: Path) -> list[str]:
    """What is executed: ourselves, under ncu, with the kernels between cudaProfilerStart and Stop in CSV on stdout."""
    options = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    output = ["--metrics", METRIC, "--csv", "--page", "raw", "--print-units", "base"]
    return [ncu, *options, *output, sys.executable, "-m", CHILD, str(request), str(answer)]


def run_counted(ncu: str, request: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Run the child: what it says of each cell and provider, and ncu's CSV.

    Raises: CountError.
    """
    with tempfile.TemporaryDirectory(prefix="undertow-cycles-") as folder:
        asked, said = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        places = filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH")))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        try:
            child = subprocess.run(
                command(ncu, asked, said), capture_output=True, text=True, timeout=SECONDS, env=environment
            )
        except subprocess.TimeoutExpired as error:
            raise CountError(f"ncu did not end within {SECONDS:g} s") from error
        if child.returncode != 0 or not said.exists():
            words = (child.stdout + "\n" + child.stderr).strip()[-2000:]
            raise CountError(f"ncu ended with {child.returncode}: {words}")
        return json.loads(said.read_text(encoding="utf-8")), child.stdout


def launches(text: str) -> list[Launch]:
    """The kernels in what `ncu --csv --page raw` prints: other lines, a header, a line of units, one line a kernel.

    Raises: CountError if there is no such table, or a cell that is no number.
    """
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise CountError(f"ncu printed no table: {text.strip()[-2000:]}")
    rows = list(csv.DictReader(lines[begin:]))
    if METRIC not in (rows[0] if rows else {}):
        raise CountError(f"ncu's table has no column {METRIC}")
    found = []
    for row in rows:
        if not (row["ID"] or "").isdigit():  # units, or ncu's own words behind the table
            continue
        try:
            found.append(Launch(row["Kernel Name"], float(row[METRIC].replace(",", ""))))
        except ValueError as error:
            raise CountError(f"kernel {row['Kernel Name']}: {METRIC} is {row[METRIC]!r}, no number") from error
    return found


def split(found: Sequence[Launch], calls: int) -> list[list[Launch]]:
    """The kernels of each of `calls` calls, by the markers before them.

    Raises: CountError for another number of markers, or a call without a kernel.
    """
    groups: list[list[Launch]] = []
    for launch in found:
        if MARKER in launch.kernel:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
        else:
            raise CountError(f"kernel {launch.kernel} ran before the first marker")
    if len(groups) != calls or not all(groups):
        raise CountError(f"{calls} calls were made, ncu saw {len(groups)}, {groups.count([])} of them without a kernel")
    return groups


def counted(calls: Sequence[Sequence[Launch]]) -> Counted:
    """Medians over the calls of one provider.

    Raises: CountError if the calls launched different kernels.
    """
    names = [[launch.kernel for launch in call] for call in calls]
    if any(other != names[0] for other in names[1:]):
        raise CountError(f"calls launched different kernels: {names}")
    cycles = [statistics.median(column) for column in zip(*([launch.cycles for launch in call] for call in calls))]
    return Counted([Launch(name, value) for name, value in zip(names[0], cycles)])
