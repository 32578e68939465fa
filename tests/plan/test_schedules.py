"""The four plans hold, and every number that a plan derives equals the one worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from undertow.kernels.sm100.plan import SCHEDULES, dq_accumulator_index, plan
from undertow.plan.attention import Attention
from undertow.plan.checks import check
from undertow.plan.schema import MBARRIER_BYTES, DType, PlanError
from undertow.plan.steps import PassTurn, Signal, Store, TakeTurn

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

KIB = 1024
TILE_BYTES = 128 * 64 * 2  # a 16-bit tile of 128 rows at head dim 64
ROW_BYTES = 128 * 4  # 128 fp32 values of LSE or D

# pipeline: (stages, full arrivals, empty arrivals or None, bytes of a full phase, of the first one)
HAND_OVERS = {
    "load_mma_q": (2, 1, 1, TILE_BYTES, 2 * TILE_BYTES),
    "load_mma_do": (1, 1, 1, TILE_BYTES, 2 * TILE_BYTES),
    "load_compute_lse": (2, 1, 8, ROW_BYTES, ROW_BYTES),
    "load_compute_d": (1, 1, 8, ROW_BYTES, ROW_BYTES),
    "mma_compute_s": (1, 1, 8, None, None),
    "mma_compute_dp": (1, 1, None, None, None),
    "compute_mma_p": (1, 8, 1, None, None),
    "compute_mma_ds": (1, 8, 1, None, None),
    "mma_reduce_dq": (1, 1, 4, None, None),
    "mma_epilogue_dv": (1, 1, None, None, None),
    "mma_epilogue_dk": (1, 1, None, None, None),
}

SMEM_OFFSETS = {
    "sQ": 1024,
    "sK": 33792,
    "sV": 50176,
    "sdO": 66560,
    "sdS": 82944,
    "sdQ": 115712,
    "sLSE": 148480,
    "sD": 149504,
}


@every_schedule
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_plan_passes_its_checks(schedule: str, dtype: DType) -> None:
    check(plan(schedule, dtype))


@every_schedule
def test_every_variant_passes_its_checks_with_the_barriers_of_the_schedule(schedule: str) -> None:
    """Masks, packing, caps and turns change neither a hand-over nor a guard."""
    plain = plan(schedule)
    for left, packed, softcap, deterministic in itertools.product((False, True), repeat=4):
        if left != packed:
            continue  # neither changes a program: together they are checked as well as one by one
        attention = Attention(left, right=not left, packed=packed, softcap=softcap, deterministic=deterministic)
        variant = plan(schedule, attention=attention)
        check(variant)
        assert (variant.compute_barriers_per_tile, variant.guards) == (plain.compute_barriers_per_tile, plain.guards)
        assert (variant.mbarriers, variant.smem_offsets) == (plain.mbarriers, plain.smem_offsets)


def test_turns_are_taken_before_the_first_sum_and_passed_after_the_last() -> None:
    steps = plan("split", attention=Attention(deterministic=True)).program("reduce")
    sums = [index for index, step in enumerate(steps) if isinstance(step, Store)]
    assert steps.index(TakeTurn("dQ")) < min(sums) and max(sums) < steps.index(PassTurn("dQ"))
    freed = next(index for index, step in enumerate(steps) if isinstance(step, Signal))
    assert freed < steps.index(TakeTurn("dQ")), "a CTA that waits for its turn keeps no tensor memory"
    assert not any(isinstance(step, TakeTurn | PassTurn) for step in plan("split").program("reduce"))


@pytest.mark.parametrize(
    "schedule, sites, per_tile, guards",
    [
        ("aliased", 4, 5, {"P": 1, "dS": 2}),
        ("slots", 3, 3, {}),
        ("signals", 2, 3, {"P": 1, "dS": 2}),
        ("split", 0, 0, {}),
    ],
)
def test_compute_wide_barriers(schedule: str, sites: int, per_tile: int, guards: dict[str, int]) -> None:
    p = plan(schedule)
    assert (p.compute_barrier_sites, p.compute_barriers_per_tile, p.guards) == (sites, per_tile, guards)


@every_schedule
def test_pipelines_count_arrivals_and_bytes(schedule: str) -> None:
    p = plan(schedule)
    assert {pipe.name for pipe in p.pipelines} == set(HAND_OVERS) - (set() if "P" in carried(p) else {"compute_mma_p"})
    for pipe in p.pipelines:
        stages, full, empty, steady, first = HAND_OVERS[pipe.name]
        assert pipe.stages == stages, pipe.name
        assert p.arrivals(pipe, "full") == full, pipe.name
        assert (p.arrivals(pipe, "empty") if pipe.has_empty else None) == empty, pipe.name
        if steady is not None:
            assert (p.tx_bytes(pipe), p.tx_bytes(pipe, first=True)) == (steady, first), pipe.name


def carried(p) -> set[str]:
    return {region for pipe in p.pipelines for region in pipe.carries}


@pytest.mark.parametrize("schedule, own_slots", [("aliased", 0), ("slots", 1), ("signals", 0), ("split", 1)])
def test_a_slot_of_its_own_costs_one_pipeline(schedule: str, own_slots: int) -> None:
    p = plan(schedule)
    assert p.has_pipeline("compute_mma_p") == bool(own_slots)
    assert len(p.mbarriers) == 21 + 2 * own_slots


@every_schedule
def test_mbarrier_words_are_packed_from_zero(schedule: str) -> None:
    p = plan(schedule)
    words = p.mbarriers
    assert list(words.values()) == [8 * index for index in range(len(words))]
    assert MBARRIER_BYTES == 8
    assert p.tmem_pointer_offset == 8 * len(words)
    expected = {
        f"{name}.{side}[{stage}]"
        for name, (stages, _, empty, _, _) in HAND_OVERS.items()
        if p.has_pipeline(name)
        for side in (("full",) if empty is None else ("full", "empty"))
        for stage in range(stages)
    }
    assert set(words) == expected


@every_schedule
def test_smem_map(schedule: str) -> None:
    p = plan(schedule)
    assert p.smem_offsets == SMEM_OFFSETS
    assert p.smem_bytes == 150016 <= 227 * KIB
    assert sum(region.bytes for region in p.smem) == 148992  # 145.5 KiB; the rest is barriers and alignment


@pytest.mark.parametrize(
    "schedules, p_columns, ds_columns",
    [(("aliased", "signals"), (0, 64), (192, 256)), (("slots", "split"), (384, 448), (448, 512))],
)
def test_tmem_map(schedules: tuple[str, str], p_columns: tuple[int, int], ds_columns: tuple[int, int]) -> None:
    accumulators = {"S": (0, 128), "dV": (128, 192), "dP": (192, 320), "dQ": (192, 256), "dK": (320, 384)}
    for schedule in schedules:
        columns = {region.name: (region.column, region.end) for region in plan(schedule).tmem}
        assert columns == {**accumulators, "P": p_columns, "dS": ds_columns}
        assert plan(schedule).tmem_columns == 512


@every_schedule
def test_warps_and_registers_fill_the_sm(schedule: str) -> None:
    p = plan(schedule)
    assert (p.num_warps, p.num_threads) == (16, 512)
    assert sum(role.threads * role.registers for role in p.roles) == 64 * KIB
    assert {name: p.barrier_threads(name) for name in p.barrier_ids} == {"compute": 256, "reduce": 128, "teardown": 416}
    assert sorted(p.barrier_ids.values()) == [1, 2, 3]


@every_schedule
def test_two_compute_warps_own_every_column_of_a_tile_once(schedule: str) -> None:
    """A thread owns 64 query columns of a key row: two stages of 32, interleaved between the warpgroups."""
    p = plan(schedule)
    for name in ("S", "dP", "P", "dS"):
        region = p.tmem_region(name)
        owned = [c for stage in (0, 1) for warpgroup in (0, 1) for c in p.columns_of(name, stage, warpgroup)]
        assert sorted(owned) == list(range(region.column, region.end))


def test_dq_accumulator_holds_a_tile_exactly_once() -> None:
    places = {dq_accumulator_index(row, column) for row in range(128) for column in range(64)}
    assert places == set(range(128 * 64))
    assert [dq_accumulator_index(5, column) for column in range(4)] == [20, 21, 22, 23]  # 16 bytes of a row in a piece


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("fast",), r"schedule 'fast' is unknown; allowed: aliased, slots, signals, split"),
        (("split", DType.F32), r"dtype f32 is 4 bytes wide; allowed: bf16, f16"),
    ],
)
def test_unknown_choices_are_refused_by_name(arguments: tuple, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(*arguments)
