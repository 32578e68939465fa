"""What of the plan becomes a barrier id here and not in `sm100.bind`: barriers that come in one per warpgroup."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from undertow.kernels.events import span
from undertow.plan.schema import Plan


def sync_of(plan: Plan, name: str, owner: Int32) -> None:
    """Wait at the named barrier of a compute warpgroup: `name` followed by its number."""
    with span(plan, name):
        threads = plan.barrier_threads(f"{name}0")
        cute.arch.barrier(barrier_id=_identifier(plan, name, owner), number_of_threads=threads)


def arrive_of(plan: Plan, name: str, owner: Int32) -> None:
    """Arrive at it without waiting."""
    threads = plan.barrier_threads(f"{name}0")
    cute.arch.barrier_arrive(barrier_id=_identifier(plan, name, owner), number_of_threads=threads)


def _identifier(plan: Plan, name: str, owner: Int32) -> Int32:
    first, second = plan.barrier_ids[f"{name}0"], plan.barrier_ids[f"{name}1"]
    return owner * (second - first) + first
