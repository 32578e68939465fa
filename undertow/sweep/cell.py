"""What is asked of one cell: right gradients, nothing found, and bits that do not depend on an order.

Every schedule runs on the same random batches. Values come from the fast back end at the scaled size, findings from the
NumPy back end under all observers at the watched one. Each schedule is observed in another setting, and in another for
every cell, so that four schedules meet every setting in a cell, and one schedule meets them in turn.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from undertow import emulated, emulator
from undertow.backward_case import batch_case
from undertow.cases import setting_name
from undertow.check import check
from undertow.inputs import DTYPES, Batch, Shape, random_batch
from undertow.kernels.backward import allocate_workspaces, compile_for, launches
from undertow.reference import Gradients, Scoring, Sequences
from undertow.sweep.instructions import Roles, inside_loops, per_tile
from undertow.sweep.matrix import Cell, Size
from undertow.verify import Run, verify

FAST = emulator.Options(backend="auto")
OBSERVED = (
    emulator.Options(),
    emulator.Options(completion="late"),
    emulator.Options(schedule=1, completion=("seeded", 1)),
    emulator.Options(completion=("seeded", 2)),
)
ORDERS = 5  # of CTAs, warps and completions, under which a deterministic cell must give the same bits


class Kernels(NamedTuple):
    """Which of our kernels run."""

    arch: str
    schedule: str
    deterministic: bool = False


@dataclass(frozen=True)
class Measured:
    """One schedule on one cell.

    errors: relative Frobenius errors of dQ, dK, dV. complaint: what is wrong with them, or why the machine refused to
    go on; empty if all is well. tiles: trips of the main kernel's tile loop.
    instructions, in_loops: of each role, warp instructions of the main kernel per trip of the tile loop: all, and those
    in loops; None if a run was stopped.
    setting: in which it was observed. findings: kernel, rule and message of each.
    bits: digest of dQ, of its float32 sums, of dK and of dV under each order, of a deterministic cell.
    """

    schedule: str
    backend: str | None
    errors: tuple[float, ...] | None
    complaint: str
    tiles: int | None
    compute_barriers_per_tile: float | None
    instructions: dict[str, float] | None
    in_loops: dict[str, float] | None
    setting: str
    findings: list[dict[str, str]]
    bits: list[str] | None


@dataclass(frozen=True)
class Judged:
    """One cell: the errors of the ideal pipeline, those that are float32 noise, and what each schedule did."""

    ideal: tuple[float, ...]
    floor: tuple[float, ...]
    measured: list[Measured]


def batch_of(size: Size, dtype: str, causal: bool, seed: int = 0) -> Batch:
    """A random batch of a size."""
    sequences = None
    if size.packed:
        offsets = torch.tensor([0, *accumulate(size.lengths)], dtype=torch.int32)
        sequences = Sequences(offsets, offsets)
    rows = size.tokens if size.packed else size.lengths[0]
    scoring = Scoring(causal=causal, window=size.window, sequences=sequences)
    return random_batch(Shape(len(size.lengths), rows, rows, *size.heads), seed, scoring, DTYPES[dtype])


def judge(cell: Cell, schedules: Sequence[str], arch: str = "sm100") -> Judged:
    """Run a cell in emulation, on schedules of an architecture; its name is the seed of its numbers.

    Raises: CompileError, UnsupportedPtx, LaunchError for a kernel that cannot be run at all.
    """
    seed = zlib.crc32(cell.name.encode())
    batch, watched = (batch_of(size, cell.dtype, cell.causal, seed) for size in (cell.scaled, cell.watched))

    def backward(given: Batch, schedule: str) -> emulated.EmulatedBackward:
        return emulated.backward(given, schedule=schedule, deterministic=cell.deterministic, options=FAST, arch=arch)

    runs = list(verify(batch, schedules, backward))
    measured = []
    for turn, run in enumerate(runs):
        kernels = Kernels(arch, run.schedule, cell.deterministic)
        bits, stopped = _all_bits(batch, kernels) if cell.deterministic and run.executed else (None, "")
        done = _measured(run, watched, kernels, OBSERVED[(seed + turn) % len(OBSERVED)])
        complaint = "; ".join(filter(None, (done.complaint, stopped)))
        measured.append(replace(done, bits=bits, complaint=complaint))
    return Judged(runs[0].measure.ideal, runs[0].measure.floor, measured)


def _measured(run: Run, watched: Batch, kernels: Kernels, options: emulator.Options) -> Measured:
    """What there is to say of a run but for its bits; `watched` is run under the observers."""
    done = run.executed
    roles = Roles()
    findings, program = _observed(watched, kernels, options, roles)
    instructions = in_loops = None
    if isinstance(done, emulated.EmulatedBackward) and program is not None:
        executions, inside = done.results["main"].executions, inside_loops(program)
        if executions.shape == inside.shape:  # or else their sizes chose two kernels: on SM90 groups are split, or not
            instructions = per_tile(executions, roles, done.tile_iterations)
            in_loops = per_tile(executions * inside, roles, done.tile_iterations)
    return Measured(
        run.schedule,
        None if done is None else done.backend,
        run.errors,
        run.complaint,
        None if done is None else done.tile_iterations,
        None if done is None else done.compute_barriers_per_tile,
        instructions,
        in_loops,
        setting_name(options),
        findings,
        None,
    )


def _observed(
    batch: Batch, kernels: Kernels, options: emulator.Options, roles: Roles
) -> tuple[list[dict[str, str]], emulator.Program | None]:
    """What is found in the three kernels, and the program of the main one if it came to its end."""
    findings, main = [], None
    for kernel in batch_case(batch, kernels.schedule, kernels.deterministic, kernels.arch):
        program = emulated.program(kernel.ptx, kernel.launch.kernel)
        checked = check(program, kernel.launch, options, also=[roles] if kernel.name == "main" else [])
        findings += [{"kernel": kernel.name, "rule": f.rule, "message": f.message} for f in checked.errors]
        if checked.error is not None:
            return findings, None  # the next kernel would read what was never written
        if kernel.name == "main":
            main = program
    return findings, main


def _all_bits(batch: Batch, kernels: Kernels) -> tuple[list[str], str]:
    """The bits under every order, and why there are not more of them, if the machine refused to go on."""
    bits = []
    for order in range(ORDERS):
        try:
            bits.append(_bits(batch, kernels, order))
        except emulator.EmulatorError as error:
            return bits, f"in CTA order {order}: {type(error).__name__}: {error}"
    return bits, ""


def _bits(batch: Batch, kernels: Kernels, order: int) -> str:
    """Digest of the gradients, the float32 sums of dQ included: rounding hides most of what an order changes.

    Order 0 is ascending, 1 is descending; the others are random, warps and completions as well.
    """
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, deterministic=True)
    work = allocate_workspaces(kernels.arch, tensors, deterministic=True)
    work.dq_accumulator.fill_(torch.nan)  # what no kernel writes has the same bits every time
    compiled = compile_for(kernels.arch, kernels.schedule, tensors, settings)
    for kernel, launch in launches(compiled, tensors, settings, work):
        options = _ordered(order, launch.grid[0]) if kernel.name.startswith("backward") else FAST
        emulator.launch(emulated.program(kernel.ptx, kernel.entry), launch, options)
    return digest(work.dq_accumulator, *Gradients(tensors.dq, tensors.dk, tensors.dv))


def _ordered(order: int, num_ctas: int) -> emulator.Options:
    if order == 0:
        return FAST
    ctas = list(range(num_ctas))[::-1]
    if order > 1:
        random.Random(order).shuffle(ctas)
    return emulator.Options("auto", order, "late" if order % 2 else ("seeded", order), ctas)


def digest(*tensors: torch.Tensor) -> str:
    """The first 64 bits of the SHA-256 of the bytes of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        flat: Any = tensor.contiguous().view(torch.uint8).numpy()
        sha.update(flat.tobytes())
    return sha.hexdigest()[:16]
