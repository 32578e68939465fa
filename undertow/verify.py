"""Judge kernels on a batch: run each schedule, compare dQ, dK, dV with float64, hold the errors against their budgets.

What is judged is the kernel, not the data: the float64 gradients follow from q, k, v and dout alone, while the ideal
pipeline reads the same out and lse as the kernel. A batch whose stored out is wrong therefore gives large errors and a
ratio near 1, and `saved_forward_errors` says how far its out and lse are from what q, k, v imply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from undertow.emulator.errors import EmulatorError
from undertow.inputs import Batch, Shape
from undertow.kernels.sm100.plan import TILE_M as TILE_ROWS
from undertow.reference import Gradients, attention_forward, round_to
from undertow.tolerance import Errors, Yardstick, relative_error, sink_error, yardstick


class Executed(Protocol):
    """What a backward pass must tell; `undertow.emulated.EmulatedBackward` is one."""

    @property
    def gradients(self) -> Gradients: ...
    @property
    def dsink(self) -> Tensor | None: ...
    @property
    def backend(self) -> str: ...
    @property
    def tile_iterations(self) -> int: ...
    @property
    def compute_barriers_per_tile(self) -> float: ...
    @property
    def compile_seconds(self) -> float: ...
    @property
    def run_seconds(self) -> float: ...


Backward = Callable[[Batch, str], Executed]


@dataclass(frozen=True)
class Run:
    """One schedule on one batch.

    executed, errors: None if the machine refused to go on. complaint: why the run is not ok, empty if it is.
    """

    schedule: str
    shape: Shape
    measure: Yardstick
    executed: Executed | None
    errors: Errors | None
    complaint: str

    @property
    def ok(self) -> bool:
        return not self.complaint


def verify(batch: Batch, schedules: Sequence[str], backward: Backward) -> Iterator[Run]:
    """One Run per schedule, in order, as each is done.

    backward: takes the batch and a schedule's name. An EmulatorError from it is a wrong kernel: a complaint, no raise.
    """
    measure = yardstick(batch, batch.scoring, batch.dlse)
    for schedule in schedules:
        try:
            executed = backward(batch, schedule)
        except EmulatorError as error:
            yield Run(schedule, batch.shape, measure, None, None, f"{type(error).__name__}: {error}")
            continue
        errors = measure.errors(executed.gradients)
        clauses = (complaint(measure, executed.gradients), sink_complaint(batch, executed.dsink))
        yield Run(schedule, batch.shape, measure, executed, errors, "; ".join(filter(None, clauses)))


def complaint(measure: Yardstick, grads: Gradients) -> str:
    """What is wrong with `grads`, one clause per gradient out of its budget; empty if nothing is."""
    clauses = []
    for name, grad, want, error, budget in zip(
        Gradients._fields, grads, measure.reference, measure.errors(grads), measure.budget
    ):
        if not error <= budget:
            where = _where(*(x if x.dim() == 4 else x[None] for x in (grad, want)))  # packed rows are one batch element
            clauses.append(f"{name} has an error of {error:.2e}, allowed are {budget:.2e}: {where}")
    return "; ".join(clauses)


def sink_complaint(batch: Batch, dsink: Tensor | None) -> str:
    """What is wrong with the gradient of the sink; empty if nothing is, or if there is none."""
    if batch.scoring.sink is None or dsink is None:
        return ""
    error, budget = sink_error(batch, dsink, batch.scoring, batch.dlse)
    return "" if error <= budget else f"dsink has an error of {error:.2e}, allowed are {budget:.2e}"


def _where(grad: Tensor, want: Tensor) -> str:
    """Where a gradient is wrong: elements that are not numbers, else the worst element, and the tiles it may be."""
    invalid = torch.nonzero(~torch.isfinite(grad))
    if len(invalid):
        return f"{len(invalid)} of {grad.numel()} elements are not finite, first {_place(invalid[0])}"
    difference = grad.double() - want
    worst = torch.stack(torch.unravel_index(difference.abs().argmax(), grad.shape))
    got, right = (x[tuple(worst)].item() for x in (grad, want))
    return f"worst element {_place(worst)} is {got:.6g}, right is {right:.6g}; {_worst_tiles(difference, want)}"


def _place(index: Tensor) -> str:
    batch, row, head, column = index.tolist()
    return f"[batch {batch}, row {row}, head {head}, column {column}]"


def _worst_tiles(difference: Tensor, want: Tensor) -> str:
    """How the error lies over tiles of TILE_ROWS rows, which are what one trip or one CTA makes."""
    tiles = []
    for first in range(0, want.shape[1], TILE_ROWS):
        rows = slice(first, first + TILE_ROWS)
        tiles.append(torch.linalg.vector_norm(difference[:, rows], dim=(1, 3)))
    squared = torch.stack(tiles, dim=1) ** 2  # (batch, tile, head)
    batch, tile, head = torch.stack(torch.unravel_index(squared.argmax(), squared.shape)).tolist()
    share = float(squared[batch, tile, head] / squared.sum())
    last = min((tile + 1) * TILE_ROWS, want.shape[1]) - 1
    return (
        f"{share:.0%} of the squared error is in rows {tile * TILE_ROWS} to {last} of batch {batch}, head {head}, "
        f"one of {squared.numel()} tiles"
    )


def saved_forward_errors(batch: Batch) -> tuple[float, float, float]:
    """How far the stored forward is from float64: out (relative Frobenius), the same if rounded once, lse (largest)."""
    forward = attention_forward(batch.q, batch.k, batch.v, batch.scoring)
    once = round_to(forward.out, batch.out.dtype)
    seeing = forward.lse > -torch.inf  # the others store nothing that means anything
    stored = batch.out.double().masked_fill(~seeing.transpose(-1, -2)[..., None], 0.0)
    lse = float(torch.where(seeing, batch.lse.double() - forward.lse, 0.0).abs().max())
    return relative_error(stored, forward.out), relative_error(once, forward.out), lse
