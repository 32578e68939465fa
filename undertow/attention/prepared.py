"""Calls whose like our kernels have computed on a GPU: from what tells calls apart straight to the launch.

What `dispatch` and `runtime.device` find out about a call follows from its key, and from what the compiled function
checks whenever it is called: that types, devices and extents agree, that strides and addresses are multiples of 16
bytes. Where it refuses, or nothing is prepared, the caller goes the long way, which computes the call or says what is
wrong with it. So no call is computed, or refused, that would not be there.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, are_deterministic_algorithms_enabled, empty_like
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from undertow.attention import backends, dispatch
from undertow.attention.dispatch import MOST_PLANS
from undertow.attention.problem import Gradients, Problem, facts
from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import BackwardTensors

if TYPE_CHECKING:
    from undertow.runtime.device import LaunchPlan

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, out, dout, lse
More = tuple[Tensor | None, ...]  # dlse, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
PLAIN = (Tensor, torch.nn.Parameter)  # tensors without a dispatcher of their own
DEVICES = ("cuda",)
_NONE = (None,) * 4


class Prepared(NamedTuple):
    """plan: how calls of a key are launched, on the device of that index. backend: whom they are counted for.

    unused: the vector of packed sequences that use all their rows, which has no element; None without sequences.
    """

    plan: LaunchPlan
    index: int
    backend: str
    unused: Tensor | None


_prepared: dict[Hashable, Prepared] = {}
_lock = threading.Lock()


def again(options: Hashable, rows: Rows, more: More | None = None) -> tuple[Tensor, ...] | None:
    """dq, dk, dv (and dsink) of a call whose like is prepared; None: go the long way.

    options: what decides besides tensors, each value beside its type where values of two types are equal, and who is
    asked. more: None if all of them are.
    """
    if is_compiling() or is_in_torch_dispatch_mode():
        return None
    try:
        prepared = _prepared.get(_key(options, rows, more))
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or none with strides, or options without a hash
        return None
    if prepared is None:
        return None
    q, k, v, out, dout, lse = rows
    if is_functorch_wrapped_tensor(q) or is_functorch_wrapped_tensor(k) or is_functorch_wrapped_tensor(v):
        return None
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    if more is None:
        reads, writes = (q, k, v, out, dout, lse, None, None, None), (dq, dk, dv, None)
        results = (dq, dk, dv)
    else:
        dlse, sink, *packing = more
        dsink = None if sink is None else empty_like(sink)
        reads = (q, k, v, out, dout, lse, dlse, sink, _packings(packing, prepared.unused))
        writes = (dq, dk, dv, dsink)
        results = (dq, dk, dv) if dsink is None else writes
    try:
        prepared.plan.launch_again(prepared.index, reads, writes)
    except (RuntimeError, TypeError, ValueError):  # refused, or no tensor with memory: nothing counts that was written
        return None
    dispatch.count(prepared.backend)
    return results  # pyright: ignore[reportReturnType]  # without None


def first(problem: Problem, backend: str, strict: bool | None, options: Hashable = None) -> Gradients:
    """`dispatch.run_backward`, remembered where `again` can do the like of it. options: as there, or `options_of`.

    Raises: as `run_backward`.
    """
    options = options_of(problem.settings, backend) if options is None else options
    problem = problem.honouring_torch()
    gradients, plan = dispatch.compute(problem, backend, strict)
    if plan.choice.backend in backends.OURS and problem.q.device.type in DEVICES and plan.layout.is_direct:
        _remember(options, problem, gradients, plan.choice.backend)
    return gradients


def run(problem: Problem, backend: str, strict: bool | None) -> Gradients:
    """As `dispatch.run_backward`: straight to the launch where that is prepared, else the long way.

    Raises: as `run_backward`.
    """
    options = options_of(problem.settings, backend)
    rows = (problem.q, problem.k, problem.v, problem.out, problem.dout, problem.lse)
    made = again(options, rows, more_of(problem))
    return first(problem, backend, strict, options) if made is None else Gradients(*made)


def options_of(settings: Settings, backend: str) -> Hashable:
    """The options of a call whose settings are normalised, so that equal ones mean the same."""
    return ("settings", backend, *vars(settings).values())


def more_of(problem: Problem) -> More | None:
    """The tensors of a problem that few have, for `again`."""
    if problem.dlse is None and problem.sink is None and problem.sequences is None:
        return None
    return (problem.dlse, problem.sink, *(_NONE if problem.sequences is None else vars(problem.sequences).values()))


def forget() -> None:
    """Let every call go the long way once more."""
    with _lock:
        _prepared.clear()


def _key(options: Hashable, rows: Rows, more: More | None) -> Hashable:
    """What tells calls apart, but for what the compiled function checks. Types, because a subclass dispatches."""
    q, k, v, out, dout, lse = rows
    return (
        options,
        q.__class__,
        k.__class__,
        v.__class__,
        out.__class__,
        dout.__class__,
        lse.__class__,
        q.shape,
        k.shape,
        q.dtype,
        q.device,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        dout.stride(),
        lse.stride(),
        are_deterministic_algorithms_enabled(),
        None if more is None else tuple([(x.__class__, facts(x)) for x in more]),
    )


def _remember(options: Hashable, problem: Problem, gradients: Gradients, backend: str) -> None:
    """Prepare for calls like `problem`, unless they need more than a launch."""
    rows = (problem.q, problem.k, problem.v, problem.out, problem.dout, problem.lse)
    more, sink, sequences = more_of(problem), problem.sink, problem.sequences
    if any(x is not None and x.__class__ not in PLAIN for x in (*rows, *(more or ()))):
        return
    if more is not None and any(x is not None and not x.is_contiguous() for x in more[1:]):
        return
    if sink is not None and sink.dtype != torch.float32:
        return
    from undertow.runtime import device

    tensors = BackwardTensors(
        *rows, *gradients[:3], dlse=problem.dlse, sink=sink, dsink=gradients.dsink, sequences=sequences
    )
    plan = device.plan_of(backend, tensors, problem.settings)
    unused = None if sequences is None else sequences.cu_seqlens_q.new_empty(0)
    made = Prepared(plan, problem.q.device.index, backend, unused)
    key = _key(options, rows, more)
    with _lock:
        while len(_prepared) >= MOST_PLANS:
            del _prepared[next(iter(_prepared))]
        _prepared[key] = made


def _packings(packing: list[Any], unused: Tensor | None) -> tuple[Any, ...] | None:
    """Packed sequences as the compiled function takes them, both sides."""
    cu_q, cu_k, used_q, used_k = packing
    if unused is None:
        return None
    return (cu_q, unused if used_q is None else used_q), (cu_k, unused if used_k is None else used_k)
