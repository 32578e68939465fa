"""A plan names what a machine only numbers, with the words of the plan and no others."""

from __future__ import annotations

import pytest

from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.labels import PlanLabels


def test_every_warp_has_the_role_of_the_plan() -> None:
    labels = PlanLabels(plan("split"))
    roles = ["reduce"] * 4 + ["compute"] * 8 + ["mma", "load", "idle", "idle"]
    assert [labels.role(warp) for warp in range(16)] == roles
    assert labels.role(16) == "no role"


@pytest.mark.parametrize(
    "offset, name",
    [
        (0, "load_mma_q.full[0]"),
        (8, "load_mma_q.full[1]"),
        (12, "load_mma_q.full[1]+0x4"),
        (24, "load_mma_q.empty[1]"),
        (184, "tmem_pointer"),
        (188, "smem+0xbc (outside the plan's map)"),
        (1024, "sQ[0]"),
        (1024 + 16384 + 0x40, "sQ[1]+0x40"),
        (33792, "sK"),
        (149504 + 511, "sD+0x1ff"),
        (150016, "smem+0x24a00 (outside the plan's map)"),
    ],
)
def test_shared_memory_is_named_down_to_the_stage(offset: int, name: str) -> None:
    assert PlanLabels(plan("split")).smem(offset) == name


def test_shared_memory_names_move_with_the_base_of_the_map() -> None:
    labels = PlanLabels(plan("split"), smem_base=256)
    assert labels.smem(256 + 1024) == "sQ[0]"
    assert labels.smem(0) == "smem+0x0 (outside the plan's map)"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_byte_of_the_map_has_exactly_the_name_of_its_owner(schedule: str) -> None:
    p = plan(schedule)
    labels = PlanLabels(p)
    for name, offset in p.mbarriers.items():
        assert {labels.smem(offset + byte).split("+")[0] for byte in range(8)} == {name}
    for region in p.smem:
        for stage in range(region.stages):
            name = f"{region.name}[{stage}]" if region.stages > 1 else region.name
            start = p.smem_offsets[region.name] + stage * region.stage_bytes
            assert labels.smem(start) == name
            assert labels.smem(start + region.stage_bytes - 1) == f"{name}+{region.stage_bytes - 1:#x}"


@pytest.mark.parametrize(
    "schedule, column, name",
    [
        ("aliased", 0, "S/P"),
        ("aliased", 64, "S"),
        ("aliased", 192, "dP/dQ/dS"),
        ("aliased", 400, "column 400 (outside the plan's map)"),
        ("split", 0, "S"),
        ("split", 200, "dP/dQ"),
        ("split", 319, "dP"),
        ("split", 384, "P"),
        ("split", 511, "dS"),
    ],
)
def test_a_tmem_column_is_named_after_all_that_lies_on_it(schedule: str, column: int, name: str) -> None:
    assert PlanLabels(plan(schedule)).tmem(column) == name


def test_named_barriers_are_named() -> None:
    p = plan("aliased")
    labels = PlanLabels(p)
    assert labels.barrier_id(0) == "cta"
    assert {labels.barrier_id(number): number for number in (1, 2, 3)} == p.barrier_ids
    assert labels.barrier_id(9) == "barrier 9"
