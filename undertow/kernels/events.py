"""Named spans in the kernels for a tracer on a real GPU: the DSL's in-kernel events (`cutlass.cute.experimental.iket`).

A plan says with `events` whether they are there; without, no kernel differs by an instruction. The compiler is told by
the option of the same name in `compile`. A span costs its warp two reads of a timer and two stores, and the times have
steps of 32 ns, so a traced kernel is slower than it is without. Names are those of the plan, so that what is traced can
be laid beside what is predicted.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from undertow.plan.schema import Plan

MOST_NAMES = 30  # that the tracer can tell apart in a kernel
PHASES = ("tmem", "softmax", "dS", "stage", "add")  # what warps do that is no wait and no GEMM of the plan
GEMMS = ("S", "dP", "dV", "dK", "dQ")  # of kernels whose compute warps issue them, so that the plan names none


def span(plan: Plan, name: str) -> contextlib.AbstractContextManager[None]:
    """What a warp does meanwhile has this name; it stands in the kernel if the plan has events.

    name: `pipeline.side`, a named barrier without its number, a GEMM, or a phase.
    """
    assert name in names(plan), f"{name!r} is no span of {plan.name}"
    return _range(name) if plan.events else contextlib.nullcontext()


def names(plan: Plan) -> tuple[str, ...]:
    """Every name that a span of the plan's kernel may have."""
    waits = [f"{pipeline.name}.{side}" for pipeline in plan.pipelines for side in ("full", "empty")]
    barriers = [barrier.name.rstrip("01") for barrier in plan.barriers]
    gemms = [mma.name for mma in plan.mmas] or GEMMS
    return tuple(dict.fromkeys([*waits, *barriers, *gemms, *PHASES]))


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    iket = importlib.import_module("cutlass.cute.experimental.iket")
    iket.range_push(name)
    yield
    iket.range_pop()
