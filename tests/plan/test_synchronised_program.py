"""The derived guards and joins: as many barriers as the plan counts, each where it has to stand."""

from __future__ import annotations

import pytest

from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.schedule import synchronised_program
from undertow.plan.steps import Guard, Join, Load, Signal, Store


@pytest.fixture(params=SCHEDULES)
def described(request):
    return plan(request.param)


def test_barriers_are_as_many_as_the_plan_counts(described):
    program = synchronised_program(described, "compute")
    barriers = [step for step in program if isinstance(step, Guard) or (isinstance(step, Join) and step.barrier)]
    assert len(barriers) == described.compute_barriers_per_tile


def test_steps_of_the_plan_are_kept_in_order(described):
    for role in ("load", "compute", "reduce", "epilogue"):
        kept = [step for step in synchronised_program(described, role) if not isinstance(step, Guard | Join)]
        assert kept == list(described.program(role))


def test_a_guard_stands_between_the_loads_and_its_store(described):
    program = synchronised_program(described, "compute")
    for index, step in enumerate(program):
        if isinstance(step, Guard):
            assert isinstance(program[index - 1], Load)
            following = [s for s in program[index:] if isinstance(s, Store | Guard)]
            assert following[0] is step and isinstance(following[1], Store) and following[1].region == step.region


def test_every_signal_has_a_join_before_it_and_no_store_between(described):
    for role in ("compute", "reduce"):
        program = synchronised_program(described, role)
        for index, step in enumerate(program):
            if isinstance(step, Signal):
                last = max(i for i in range(index) if isinstance(program[i], Join))
                assert all(isinstance(between, Signal) for between in program[last + 1 : index])


def test_joins_complete_the_stores_that_the_signal_hands_over(described):
    program = synchronised_program(described, "compute")
    joins = [step for step in program if isinstance(step, Join)]
    assert [(join.tmem, join.smem) for join in joins][-2:] == [(True, False), (True, True)]
    assert all(not join.smem for join in joins[:-1]), "P is in tensor memory, which needs no proxy fence"


def test_staging_that_no_pipeline_hands_over_needs_no_fence_at_a_signal(described):
    joins = [step for step in synchronised_program(described, "reduce") if isinstance(step, Join)]
    assert joins == [Join(None)]
