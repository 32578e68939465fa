"""From the tensors of a call to those that the kernels can address, and back to gradients as autograd expects them.

Real strides are read. A copy is made only where the kernels cannot address a tensor: rows whose last dimension is not
contiguous, or that do not begin and continue at multiples of 16 bytes, and a result that would share its memory with
itself. Copies are logged at debug level, by name and reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undertow.attention.problem import Gradients, Problem, misalignment
from undertow.kernels.sm100.tensors import ALIGNMENT, BackwardTensors, Sequences

_LOG = logging.getLogger(__name__)
ROWS = ("q", "k", "v", "out", "dout")  # read in vectors of 16 bytes
SCALARS = ("lse", "dlse")  # read one by one


def obstacle(x: Tensor, vectors: bool) -> str | None:
    """Why the kernels cannot address `x` as it is, or None. vectors: it is accessed 16 bytes at a time."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return f"stride {x.stride(-1)} in the last dimension"
    if not vectors:
        return None
    if misalignment(x):
        return f"address {misalignment(x)} mod {ALIGNMENT}"
    for dim, extent in enumerate(x.shape[:-1]):
        step = x.stride(dim) * x.element_size()
        if extent > 1 and step % ALIGNMENT:
            return f"stride of {step} bytes in dimension {dim}"
    return None


def to_copy(problem: Problem) -> dict[str, str]:
    """The inputs that must be copied for the kernels, and why. Follows from the signature of the problem alone."""
    found = {}
    for names, vectors in ((ROWS, True), (SCALARS, False)):
        for name in names:
            x = getattr(problem, name)
            reason = None if x is None else obstacle(x, vectors)
            if reason:
                found[name] = reason
    return found


class Layout(NamedTuple):
    """What the kernels cannot use as it lies. Follows from the signature of a problem alone.

    copies: inputs that are copied -> why. direct: whether dq, dk, dv are written where autograd expects them.
    """

    copies: dict[str, str]
    direct: tuple[bool, bool, bool]

    @property
    def is_direct(self) -> bool:
        """Whether nothing at all is copied."""
        return not self.copies and all(self.direct)


def layout_of(problem: Problem) -> Layout:
    """Which tensors of `problem` the kernels can address."""
    dq, dk, dv = (obstacle(torch.empty_like(x), vectors=True) is None for x in (problem.q, problem.k, problem.v))
    return Layout(to_copy(problem), (dq, dk, dv))


@dataclass(frozen=True)
class Call:
    """What the kernels read and write, and the gradients that the caller gets from it."""

    tensors: BackwardTensors
    results: Gradients  # dq, dk, dv in the strides that autograd expects; the kernels may have written elsewhere

    def gradients(self) -> Gradients:
        """The gradients after the kernels have run, those of a copy put where they belong."""
        for result, name in zip(self.results[:3], ("dq", "dk", "dv")):
            written = getattr(self.tensors, name)
            if written is not result:
                result.copy_(written)
        dsink = self.tensors.dsink
        if dsink is None or self.results.dsink is None:
            return self.results
        return self.results._replace(dsink=dsink.to(self.results.dsink.dtype))


def call_of(problem: Problem, layout: Layout) -> Call:
    """Tensors for the kernels. layout: that of `problem`."""
    given: dict[str, Any] = {name: getattr(problem, name) for name in (*ROWS, *SCALARS)}
    for name, reason in layout.copies.items():
        _LOG.debug("%s is copied for the kernels: %s", name, reason)
        given[name] = given[name].clone(memory_format=torch.contiguous_format)
    q, k, v, sink = problem.q, problem.k, problem.v, problem.sink
    results = Gradients(
        torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None if sink is None else torch.empty_like(sink)
    )
    dq, dk, dv = (
        x if direct else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, direct in zip(results[:3], layout.direct)
    )
    fp32 = None if sink is None else sink.to(torch.float32).contiguous()
    tensors = BackwardTensors(
        **given,
        dq=dq,
        dk=dk,
        dv=dv,
        sink=fp32,
        dsink=None if fp32 is None else torch.empty_like(fp32),
        sequences=contiguous_sequences(problem),
    )
    return Call(tensors, results)


def contiguous_sequences(problem: Problem) -> Sequences | None:
    """The sequences of `problem` with vectors that lie densely."""
    if problem.sequences is None:
        return None
    vectors = {name: x.contiguous() for name, x in vars(problem.sequences).items() if x is not None}
    return replace(problem.sequences, **vectors)
