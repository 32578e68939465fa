"""A plan that cannot work is refused, and the message shows the arithmetic or the missing edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from undertow.kernels.sm100.plan import SPLIT_ORDER, pipelines, plan, tmem_map
from undertow.plan.checks import check
from undertow.plan.schema import DType, Plan, PlanError, Role
from undertow.plan.steps import Issue, Signal, Step, Wait


def refused(broken: Plan, *parts: str) -> None:
    """`broken` must be refused with a message that holds every part."""
    with pytest.raises(PlanError) as caught:
        check(broken)
    for part in parts:
        assert part in str(caught.value)


def with_region(p: Plan, name: str, **changes) -> Plan:
    """The plan with one TMEM or SMEM region changed."""
    return replace(
        p,
        tmem=tuple(replace(r, **changes) if r.name == name else r for r in p.tmem),
        smem=tuple(replace(r, **changes) if r.name == name else r for r in p.smem),
    )


def with_role(p: Plan, name: str, **changes) -> Plan:
    return replace(p, roles=tuple(replace(r, **changes) if r.name == name else r for r in p.roles))


def with_pipeline(p: Plan, name: str, **changes) -> Plan:
    return replace(p, pipelines=tuple(replace(q, **changes) if q.name == name else q for q in p.pipelines))


def with_program(p: Plan, role: str, change: Callable[[tuple[Step, ...]], tuple[Step, ...]]) -> Plan:
    return replace(p, programs=tuple((name, change(steps) if name == role else steps) for name, steps in p.programs))


def without(step: Step) -> Callable[[tuple[Step, ...]], tuple[Step, ...]]:
    def change(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        assert step in steps, f"{step} is not in the program, so its removal tests nothing"
        return tuple(s for s in steps if s != step)

    return change


def moved_after(step: Step, anchor: Step) -> Callable[[tuple[Step, ...]], tuple[Step, ...]]:
    def change(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        rest = without(step)(steps)
        at = rest.index(anchor) + 1
        return (*rest[:at], step, *rest[at:])

    return change


# Alias guards.


@pytest.mark.parametrize("schedule", ["aliased", "signals"])
@pytest.mark.parametrize(
    "region, over, columns", [("P", "S", "TMEM columns [16, 32)"), ("dS", "dP", "TMEM columns [208, 224)")]
)
def test_missing_alias_guard_is_an_unordered_overlap(schedule: str, region: str, over: str, columns: str) -> None:
    """Warps 4 to 7 store the second 16 packed columns while the same lanes of warps 8 to 11 may still load them."""
    broken = plan(schedule).without_guard(region)
    refused(broken, f"reads {over} of tile 0", f"writes {region} of tile 0", columns, "no ordering edge")


def test_a_map_without_overlap_has_no_guard_to_leave_out() -> None:
    with pytest.raises(PlanError, match="split: no alias guard for P; guards: none"):
        plan("split").without_guard("P")


# MMA orders.


def test_split_order_is_refused_on_the_aliased_map() -> None:
    """QK_{t+1} ahead of PdO_t would overwrite the P that lies on S."""
    refused(replace(plan("aliased"), order=SPLIT_ORDER), "P of tile", "no ordering edge", "TMEM columns [0,")


@pytest.mark.parametrize("schedule", ["slots", "split"])
def test_aliased_map_is_refused_under_the_split_programs(schedule: str) -> None:
    refused(replace(plan(schedule), tmem=tmem_map(False, DType.BF16)), "S of tile", "P of tile", "TMEM columns [0, 16)")


DQ_BEFORE_DK = {
    "aliased": (Issue("QK", 1), Issue("dQ"), Issue("dK"), Issue("dP", 1), Issue("PdO", 1)),
    "split": (Issue("QK", 1), Issue("PdO"), Issue("dQ"), Issue("dK"), Issue("dP", 1)),
}


def test_dq_before_dk_is_stale_where_dq_lies_over_ds() -> None:
    broken = replace(plan("aliased"), order=DQ_BEFORE_DK["aliased"])
    refused(broken, "reads dS of tile 0 after tensor pipe writes dQ of tile 0 over it", "TMEM columns [192, 256)")


def test_dq_before_dk_is_fine_where_ds_has_its_own_slot() -> None:
    check(replace(plan("split"), order=DQ_BEFORE_DK["split"]))


@pytest.mark.parametrize(
    "schedule, order",
    [
        ("aliased", (Issue("QK", 1), Issue("dP", 1), Issue("dK"), Issue("dQ"), Issue("PdO", 1))),
        ("split", (Issue("QK", 1), Issue("dP", 1), Issue("PdO"), Issue("dK"), Issue("dQ"))),
    ],
)
def test_dp_before_dq_is_refused(schedule: str, order: tuple[Issue, ...]) -> None:
    """dQ_t lies on dP's columns, so it would have to wait until dP_{t+1} is read, which in turn waits for dQ_t."""
    refused(
        replace(plan(schedule), order=order),
        "mma waits compute_mma_ds.full of tile 1, which nobody completes, before it issues dQ of tile 0",
    )


# Capacity.


def test_tmem_beyond_column_512_is_refused() -> None:
    refused(with_region(plan("split"), "dS", column=456), "dS needs TMEM columns 456 + 64 = 520, but there are 512")


def test_tmem_before_column_0_is_refused() -> None:
    refused(with_region(plan("split"), "S", column=-32), "S needs TMEM columns -32 + 128 = 96")


@pytest.mark.parametrize(
    "region, columns, message",
    [
        ("dV", 32, "PdO writes 64 columns into dV, which has 32"),
        ("P", 32, "PdO reads 64 columns of P (128 elements of bf16), which has 32"),
        ("dS", 128, "dK reads 64 columns of dS (128 elements of bf16), which has 128"),
    ],
)
def test_tmem_region_must_be_as_wide_as_its_tile(region: str, columns: int, message: str) -> None:
    refused(with_region(plan("aliased"), region, columns=columns), message)


def test_smem_beyond_227_kib_is_refused_with_the_sum() -> None:
    """Seven Q stages: 150016 + 5 x 16384 = 231936 bytes still fit into 232448; eight do not."""
    check_message = "shared memory is"
    fits = with_region(plan("split"), "sQ", stages=7)
    assert fits.smem_bytes == 231936
    too_big = with_region(plan("split"), "sQ", stages=8)
    refused(too_big, f"{check_message} {231936 + 16384} bytes", "sQ 131072", "sK 16384", "a CTA has 232448")


def test_registers_beyond_64_k_are_refused_with_the_sum() -> None:
    broken = with_role(plan("split"), "compute", registers=144)
    total = 128 * 152 + 256 * 144 + 128 * 88
    refused(broken, "reduce 128 x 152 + compute 256 x 144 + mma 32 x 88", f"= {total}, but an SM has 65536")


def test_two_register_values_in_one_warpgroup_are_refused() -> None:
    refused(with_role(plan("split"), "idle", registers=24), "warps 12 to 15", "idle 24", "mma 88", "per warpgroup")


@pytest.mark.parametrize("registers", [16, 100, 264])
def test_register_counts_that_setmaxnreg_cannot_take_are_refused(registers: int) -> None:
    refused(with_role(plan("split"), "reduce", registers=registers), f"reduce asks for {registers} registers", "by 8")


def test_a_warp_of_two_roles_is_refused() -> None:
    refused(with_role(plan("split"), "load", warps=range(12, 14)), "warp 12 is in mma and in load")


def test_a_warp_of_no_role_is_refused() -> None:
    """A warpgroup with a hole cannot execute setmaxnreg together."""
    p = plan("split")
    refused(replace(p, roles=tuple(r for r in p.roles if r.name != "load")), "warp 13 has no role")
    refused(replace(p, roles=(*p.roles, Role("extra", range(20, 24), 24, "leaves a hole"))), "warp 16 has no role")
    refused(replace(p, roles=p.roles[:-1]), "warp 14 has no role")


# Pipelines.


@pytest.mark.parametrize(
    "role, step",
    [
        ("compute", Signal("mma_compute_s", "empty")),
        ("compute", Signal("compute_mma_p", "full")),
        ("compute", Signal("load_compute_d", "empty")),
        ("reduce", Signal("mma_reduce_dq", "empty")),
    ],
)
def test_a_pipeline_side_without_arriver_is_refused(role: str, step: Signal) -> None:
    message = f"{step.pipeline}.{step.side} has no arriver: {role} never signals it"
    refused(with_program(plan("split"), role, without(step)), message)


def test_a_full_side_that_no_copy_completes_is_refused() -> None:
    copy = next(s for s in plan("split").program("load") if getattr(s, "region", "") == "sLSE")
    refused(with_program(plan("split"), "load", without(copy)), "load_compute_lse.full has no arriver")


def test_an_empty_side_that_no_gemm_completes_is_refused() -> None:
    """No GEMM reads sLSE, so the MMA warp has nothing to commit after."""
    broken = with_pipeline(plan("split"), "load_compute_lse", consumer="mma")
    broken = with_program(broken, "compute", without(Signal("load_compute_lse", "empty")))
    refused(
        broken, "load waits load_compute_lse.empty of tile 0, which nobody completes", "before it copies sLSE of tile 2"
    )


def test_arriving_on_another_roles_side_is_refused() -> None:
    """The arrival count is the consumer's: eight compute warps would complete the phase of one commit."""
    broken = with_pipeline(plan("split"), "load_compute_lse", consumer="mma")
    refused(broken, "compute signals load_compute_lse.empty, but its 1 arrivals are mma's")


def test_a_pipeline_that_the_plan_lacks_is_refused_by_name() -> None:
    refused(replace(plan("split"), pipelines=pipelines(False)), "compute names pipeline compute_mma_p")


@pytest.mark.parametrize("stages", [0, 3, 6])
def test_stages_that_a_mask_cannot_address_are_refused(stages: int) -> None:
    broken = with_pipeline(plan("split"), "load_mma_q", stages=stages)
    refused(broken, f"load_mma_q has {stages} stages; allowed: powers of two")


def test_one_q_stage_is_a_circle_of_waits() -> None:
    """QK_{t+1} is issued before dK_t has handed Q_t back, so a single slot can never hold Q_{t+1} in time."""
    p = with_pipeline(plan("split"), "load_mma_q", stages=1)
    broken = with_program(p, "load", lambda steps: tuple(wait_one_tile(s) for s in steps))
    refused(
        broken,
        "deadlocks, in a circle",
        "load waits load_mma_q.empty of tile 0",
        "mma waits load_mma_q.full of tile 1",
        "tensor pipe dK of tile 0",
    )


def wait_one_tile(step: Step) -> Step:
    return replace(step, tile=-1) if step == Wait("load_mma_q", "empty", -2) else step


# Stale reads.


def test_reading_before_the_hand_over_is_refused() -> None:
    broken = with_program(plan("split"), "compute", without(Wait("mma_compute_dp", "full")))
    refused(broken, "dP of tile", "no ordering edge")


def test_overwriting_before_the_slot_is_handed_back_is_refused() -> None:
    broken = with_program(plan("split"), "compute", without(Wait("compute_mma_p", "empty", -1)))
    refused(broken, "writes P of tile 1", "reads P of tile 0", "no ordering edge")


def test_a_consumer_that_waits_one_tile_late_reads_a_stale_tile() -> None:
    """With two slots a load warp that waits for the slot after next overwrites what nobody has read yet."""
    p = plan("split")
    early = with_program(p, "load", lambda steps: tuple(later(s) for s in steps))
    refused(early, "sQ of tile")


def later(step: Step) -> Step:
    return replace(step, tile=-3) if step == Wait("load_mma_q", "empty", -2) else step


def test_releasing_s_before_it_is_read_is_refused() -> None:
    p = plan("split")
    load = next(s for s in p.program("compute") if getattr(s, "region", "") == "S")
    broken = with_program(p, "compute", moved_after(load, Signal("mma_compute_s", "empty")))
    refused(broken, "reads S of tile 0", "writes S of tile 1", "no ordering edge")


def test_signalling_p_before_it_is_stored_is_refused() -> None:
    p = plan("split")
    store = next(s for s in p.program("compute") if getattr(s, "region", "") == "P")
    refused(with_program(p, "compute", moved_after(store, Signal("compute_mma_p", "full"))), "P of tile 0")


def test_storing_p_before_s_is_loaded_is_refused() -> None:
    """No guard can help: the value is gone in every order."""
    p = plan("aliased")
    store = next(s for s in p.program("compute") if getattr(s, "region", "") == "P")
    broken = with_program(p, "compute", lambda steps: (store, *without(store)(steps)))
    refused(broken, "P of tile", "S of tile")


def test_own_columns_stored_before_they_are_loaded_are_refused() -> None:
    """dS stage 0 over the dP columns that the same warp loads in stage 1."""
    broken = with_region(plan("split"), "dS", column=256)
    refused(broken, "dP")


def test_sharing_one_slot_between_p_and_ds_is_refused() -> None:
    """dS_t may be stored before PdO_t has read P_t."""
    broken = with_region(plan("split"), "dS", column=384)
    refused(broken, "writes dS of tile 0", "reads P of tile 0", "TMEM columns [384, 400) with no ordering edge")


def test_a_running_sum_must_not_be_overwritten_between_two_tiles() -> None:
    """dQ over dK, issued before it: each dK_t would then add to dQ_t instead of to its own sum."""
    p = replace(with_region(plan("split"), "dQ", column=320), order=DQ_BEFORE_DK["split"])
    refused(p, "reads dK of tile 0 after tensor pipe writes dQ of tile 1 over it in TMEM columns [320, 384)")
