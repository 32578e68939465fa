"""From the tensors of a call to those that the kernels can address, and back to gradients as autograd expects them.

Real strides are read. A copy is made only where the kernels cannot address a tensor: rows whose last dimension is not
contiguous, or that do not begin and continue at multiples of 16 bytes, and a result that would share its memory with
itself. Copies are logged at debug level, by name and reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from undertow.attention.problem import Gradients, Problem, misalignment
from undertow.kernels.sm100.tensors import ALIGNMENT, BackwardTensors

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


def call_of(problem: Problem, copies: dict[str, str]) -> Call:
    """Tensors for the kernels. copies: as `to_copy` says."""
    given = {name: getattr(problem, name) for name in (*ROWS, *SCALARS)}
    for name, reason in copies.items():
        _LOG.debug("%s is copied for the kernels: %s", name, reason)
        given[name] = given[name].clone(memory_format=torch.contiguous_format)
    sink = problem.sink
    results = Gradients(
        *(torch.empty_like(x) for x in (problem.q, problem.k, problem.v)),
        dsink=None if sink is None else torch.empty_like(sink),
    )
    written = [
        x if obstacle(x, True) is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in results[:3]
    ]
    of_sink = {}
    if sink is not None:
        fp32 = sink.to(torch.float32).contiguous()
        of_sink = {"sink": fp32, "dsink": torch.empty_like(fp32)}
    tensors = BackwardTensors(
        *(given[name] for name in (*ROWS, "lse")),
        *written,
        dlse=given["dlse"],
        sequences=contiguous_sequences(problem),
        **of_sink,
    )
    return Call(tensors, results)


def contiguous_sequences(problem: Problem):
    """The sequences of `problem` with vectors that lie densely."""
    if problem.sequences is None:
        return None
    vectors = {name: x.contiguous() for name, x in vars(problem.sequences).items() if x is not None}
    return replace(problem.sequences, **vectors)
