"""Who can compute a backward pass here. A provider prepares a workload; what comes back is one call, ready to be timed.

What a provider needs from a forward pass (out, LSE) it makes itself, before; only the backward pass is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils.deterministic

from undertow.attention import (
    AttentionInputError,
    BackendError,
    Inputs,
    Problem,
    choose,
    counts,
    run_backward,
    run_forward,
    settings_from,
)
from undertow.attention.backends import OURS
from undertow.bench.work import HEAD_DIM
from undertow.bench.workload import Workload
from undertow.kernels.sm100.tensors import Sequences
from undertow.reference import Gradients
from undertow.sweep.matrix import Cell

UNDERTOW = "undertow"


class UnableError(ValueError):
    """A provider does not compute a workload; the message says why."""


@dataclass(frozen=True)
class Participant:
    """One provider with one workload.

    call: puts one backward pass on the current stream. gradients: what `call` returned as dq, dk, dv in the shapes of
    q, k, v of the workload. around: what has to be in force while calls are made. proof: why it was not this
    provider's code that ran, or None.
    """

    name: str
    call: Callable[[], Any]
    gradients: Callable[[Any], Gradients]
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    proof: Callable[[], str | None] = lambda: None


class Provider(Protocol):
    """name: in records and on the command line."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """Why it is not on this machine, or None."""
        ...

    def compiles(self, cell: Cell) -> Hashable:
        """What the first call in a cell compiles and keeps on disk, equal for cells that share it; None: nothing."""
        ...

    def prepare(self, workload: Workload) -> Participant:
        """Run the forward pass and be ready.

        Raises: UnableError.
        """
        ...


class Undertow:
    """The kernels of this package for the GPU at hand, whatever its architecture, through the dispatch that users use.

    Strict: a fallback is refused. The dispatch counter proves that one of our kernels ran in every call.
    """

    name = UNDERTOW

    def missing(self) -> str | None:
        return None

    def compiles(self, cell: Cell) -> Hashable:
        return cell.kind, cell.causal, cell.dtype, cell.deterministic

    def prepare(self, workload: Workload) -> Participant:
        q, k, v, dout = (workload.shaped(x) for x in (workload.q, workload.k, workload.v, workload.dout))
        cell = workload.cell
        offsets = workload.offsets if workload.size.packed else None
        try:
            settings = settings_from(
                HEAD_DIM, causal=cell.causal, window_size=workload.size.window, deterministic=cell.deterministic
            )
            sequences = None if offsets is None else Sequences(offsets, offsets)
            out, lse = run_forward(Inputs(q, k, v, settings=settings, sequences=sequences))
            problem = Problem(q, k, v, settings=settings, sequences=sequences, out=out, lse=lse, dout=dout)
            choose(problem, strict=True)
        except (AttentionInputError, BackendError) as error:
            raise UnableError(str(error)) from error
        before, made = counts(), 0

        def call() -> Any:
            nonlocal made
            made += 1
            return run_backward(problem, strict=True)

        def proof() -> str | None:
            ran = {name: count - before.get(name, 0) for name, count in counts().items()}
            ran = {name: count for name, count in ran.items() if count}
            if made and sum(ran.get(name, 0) for name in OURS) == made == sum(ran.values()):
                return None
            return f"{made} calls were made, and the dispatcher counted {ran or 'none'}: all must be of {OURS}"

        return Participant(self.name, call, lambda raw: as_rows(workload, raw), proof=proof)


def as_rows(workload: Workload, raw: Any) -> Gradients:
    """dq, dk, dv, of rows first, without the batch dimension."""
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(raw, (workload.q, workload.k, workload.v)))
    return Gradients(dq, dk, dv)


@contextlib.contextmanager
def deterministic_torch(wanted: bool):
    """torch's own kernels in their deterministic form inside, without its filling of fresh memory, which takes time."""
    if not wanted:
        yield
        return
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # warn_only would leave the flash kernel as it is
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills
