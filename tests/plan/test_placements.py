"""Wherever P and dS are put, guards follow from the map and the checks agree with a machine that tries every order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.plan.machine import works_in_every_order
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.checks import check
from undertow.plan.schedule import synchronised_program
from undertow.plan.schema import Plan, PlanError
from undertow.plan.steps import Guard

columns = st.integers(min_value=0, max_value=448)
near = st.sampled_from([0, 16, 32, 64, 128, 192, 208, 224, 256, 320, 384, 400, 448])
placements = st.one_of(near, columns)


def placed(schedule: str, p: int, ds: int) -> Plan:
    """The schedule's plan with P and dS at other columns."""
    base = plan(schedule)
    moved = {"P": p, "dS": ds}
    return replace(base, tmem=tuple(replace(r, column=moved.get(r.name, r.column)) for r in base.tmem))


def accepted(candidate: Plan) -> bool:
    try:
        check(candidate)
    except PlanError:
        return False
    return True


def stored_under_another_warps_load(candidate: Plan, stored: str) -> bool:
    """Brute force over threads' elements: does a warp store a column that the other warpgroup loads S or dP from?"""

    def touched(name: str, warpgroup: int) -> set[int]:
        region = candidate.tmem_region(name)
        elements = [e for e in range(128) if e // 32 % 2 == warpgroup]
        return {region.column + element * region.dtype.bytes // 4 for element in elements}

    return any(touched(stored, one) & touched(loaded, 1 - one) for one in (0, 1) for loaded in ("S", "dP"))


@given(schedule=st.sampled_from(SCHEDULES), p=columns, ds=columns)
@example("split", 384, 448)
@example("aliased", 0, 192)
@example("aliased", 112, 192)
@settings(max_examples=400)
def test_a_guard_stands_exactly_where_one_warp_stores_what_another_loads(schedule: str, p: int, ds: int) -> None:
    candidate = placed(schedule, p, ds)
    for region in ("P", "dS"):
        assert (region in candidate.guards) == stored_under_another_warps_load(candidate, region), region
    steps = [step for step in synchronised_program(candidate, "compute") if isinstance(step, Guard)]
    assert Counter(guard.region for guard in steps) == Counter(candidate.guards)


@given(schedule=st.sampled_from(SCHEDULES), p=placements, ds=placements)
@example("split", 384, 448)
@example("split", 384, 192)
@example("aliased", 0, 192)
@example("aliased", 384, 448)
@example("aliased", 64, 192)
@example("aliased", 0, 208)
@settings(max_examples=60)
def test_checks_accept_exactly_what_works_in_every_order(schedule: str, p: int, ds: int) -> None:
    candidate = placed(schedule, p, ds)
    assert accepted(candidate) == works_in_every_order(candidate)


@pytest.mark.parametrize("schedule", ["aliased", "signals"])
@pytest.mark.parametrize("region", ["P", "dS"])
def test_the_machine_sees_a_missing_guard(schedule: str, region: str) -> None:
    """The second opinion is no yes-man."""
    assert works_in_every_order(plan(schedule))
    assert not works_in_every_order(plan(schedule).without_guard(region))


@pytest.mark.parametrize("schedule", ["aliased", "signals"])
def test_the_second_ds_guard_orders_nothing_that_the_first_does_not(schedule: str) -> None:
    """Stage 1 of dS lies over dP columns that every warp has loaded in stage 0, before the first guard.

    The plans keep it because the baseline executes it: `aliased` is that baseline.
    """
    for omitted, survives in (("P", False), ("dS stage 0", False), ("dS stage 1", True)):
        candidate = plan(schedule)
        kept = [s for s in candidate.guarded_stores if omitted not in (s.region, f"{s.region} stage {s.stages[0]}")]
        assert len(kept) == 2
        vars(candidate)["guarded_stores"] = tuple(kept)
        assert accepted(candidate) == works_in_every_order(candidate) == survives


@pytest.mark.parametrize("own_slots, moved", [("slots", {"dS": 192}), ("split", {"dS": 192})])
def test_ds_alone_may_stay_over_dp(own_slots: str, moved: dict[str, int]) -> None:
    """Half of the change is legal too: P in a slot of its own, dS over dP, behind its two guards."""
    candidate = placed(own_slots, 384, moved["dS"])
    check(candidate)
    assert candidate.guards == {"dS": 2}
