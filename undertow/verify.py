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

from undertow.emulator.errors import EmulatorError
from undertow.inputs import Batch, Shape
from undertow.reference import Gradients, attention_forward, round_to
from undertow.tolerance import Errors, Yardstick, relative_error, yardstick


class Executed(Protocol):
    """What a backward pass must tell; `undertow.emulated.EmulatedBackward` is one."""

    @property
    def gradients(self) -> Gradients: ...
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
    measure = yardstick(batch)
    for schedule in schedules:
        try:
            executed = backward(batch, schedule)
        except EmulatorError as error:
            yield Run(schedule, batch.shape, measure, None, None, f"{type(error).__name__}: {error}")
            continue
        errors = measure.errors(executed.gradients)
        yield Run(schedule, batch.shape, measure, executed, errors, complaint(measure, executed.gradients))


def complaint(measure: Yardstick, grads: Gradients) -> str:
    """What is wrong with `grads`, one clause per gradient out of its budget; empty if nothing is."""
    clauses = []
    for name, grad, want, error, budget in zip(
        Gradients._fields, grads, measure.reference, measure.errors(grads), measure.budget
    ):
        if not error <= budget:
            clauses.append(f"{name} has an error of {error:.2e}, allowed are {budget:.2e}; {_worst(grad, want)}")
    return "; ".join(clauses)


def _worst(grad: torch.Tensor, want: torch.Tensor) -> str:
    """Where a gradient is farthest from float64; where it is not a number, how often and where first."""
    invalid = torch.nonzero(~torch.isfinite(grad))
    if len(invalid):
        return f"{len(invalid)} of {grad.numel()} elements are not finite, first {invalid[0].tolist()}"
    index = torch.unravel_index((grad.double() - want).abs().argmax(), grad.shape)
    where = [int(i) for i in index]
    return f"worst element {where} (batch, row, head, column) is {grad[index].item():.6g}, right is {want[index]:.6g}"


def saved_forward_errors(batch: Batch) -> tuple[float, float, float]:
    """How far the stored forward is from float64: out (relative Frobenius), the same if rounded once, lse (largest)."""
    forward = attention_forward(batch.q, batch.k, batch.v)
    once = round_to(forward.out, batch.out.dtype)
    lse = float((batch.lse.double() - forward.lse).abs().max())
    return relative_error(batch.out, forward.out), relative_error(once, forward.out), lse
