"""Which waits of the plans carry weight: without any other, some access would be unordered or stale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.machine import works_in_every_order
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.checks import check
from undertow.plan.schema import Plan, PlanError
from undertow.plan.steps import Wait

# Implied by other edges, as long as the tensor pipe is in order: dP_t, for which a compute warp waits anyway, is issued
# behind dQ_{t-1}, which has then read dS_{t-1}; and the Q slot that the load warp waits for is handed back by dK_{t-2},
# long after the softmax of t-2 has read its LSE. The plans keep both waits: a hand-over without its wait is a trap.
IMPLIED = {
    ("compute", Wait("compute_mma_ds", "empty", -1)),
    ("load", Wait("load_compute_lse", "empty", -2)),
}


def without_wait(p: Plan, role: str, wait: Wait) -> Plan:
    return replace(p, programs=tuple((r, tuple(s for s in steps if r != role or s != wait)) for r, steps in p.programs))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_wait_is_needed_but_the_two_that_other_edges_imply(schedule: str) -> None:
    p = plan(schedule)
    waits = {(role, step) for role, steps in p.programs for step in steps if isinstance(step, Wait)}
    spare = set()
    for role, wait in waits:
        try:
            check(without_wait(p, role, wait))
        except PlanError:
            continue
        spare.add((role, wait))
    assert spare == IMPLIED


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_machine_agrees_about_the_waits_of_tensor_memory(schedule: str) -> None:
    """Its columns do not see shared memory, so only the compute and reduce warps' waits for TMEM are asked about."""
    p = plan(schedule)
    tmem = {region.name for region in p.tmem}
    for role in ("compute", "reduce"):
        for wait in [step for step in p.program(role) if isinstance(step, Wait)]:
            if not set(p.pipeline(wait.pipeline).carries) & tmem:
                continue
            expected = (role, wait) in IMPLIED
            assert works_in_every_order(without_wait(p, role, wait)) == expected, f"{role} without {wait}"
