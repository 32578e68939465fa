"""The SM90 plan: it fits the machine, its layouts are what the GEMMs read and write, and it refuses what it has not."""

from __future__ import annotations

import itertools

import pytest

from undertow.kernels.sm90 import call
from undertow.kernels.sm90.plan import HEAD_DIM, ROW_TERMS, TILE_M, dq_accumulator_index, plan, row_term_index
from undertow.kernels.sm90.tensors import check_scale
from undertow.kernels.sm100.launch import LaunchInputError, Settings
from undertow.plan.checks import check_pipelines, check_registers, check_smem
from undertow.plan.schema import DType, PlanError

ELEMENTS_PER_VECTOR = 8


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_fits_the_machine(dtype):
    planned = plan(dtype)
    check_smem(planned)
    check_registers(planned)
    check_pipelines(planned)


def test_named_barriers_count_who_takes_part():
    planned = plan()
    assert planned.barrier_threads("turn0") == 256
    assert planned.barrier_threads("dq_full1") == 128 + 32
    assert len(planned.barriers) < 16  # 16 named barriers of a CTA, 0 being its own


def test_dq_accumulator_holds_every_element_once():
    places = {dq_accumulator_index(row, column) for row in range(TILE_M) for column in range(HEAD_DIM)}
    assert places == set(range(TILE_M * HEAD_DIM))


def test_dq_accumulator_follows_the_fragments_of_wgmma():
    """Register 4 j + 2 h + e of thread t has row 16 (t // 32) + t % 32 // 4 + 8 h and column 8 j + 2 (t % 4) + e."""
    for thread, j, h, e in itertools.product(range(128), range(8), range(2), range(2)):
        row, column = thread // 32 * 16 + thread % 32 // 4 + 8 * h, 8 * j + 2 * (thread % 4) + e
        assert dq_accumulator_index(row, column) == (j * 128 + thread) * 4 + 2 * h + e
        assert dq_accumulator_index(row + 64, column) == 4096 + dq_accumulator_index(row, column)


def test_postprocess_reads_sixteen_neighbours():
    """Of 8 columns of rows r and r + 8, in the order that `postprocess` takes them apart."""
    for row, group in itertools.product((0, 5, 16, 71), range(8)):
        first = dq_accumulator_index(row, 8 * group)
        assert first % 16 == 0
        for half, column in itertools.product(range(2), range(8)):
            register = column // 2 * 4 + half * 2 + column % 2
            assert dq_accumulator_index(row + 8 * half, 8 * group + column) == first + register


def test_row_terms_lie_under_the_32_byte_swizzle():
    """Bit 4 of a byte address is XORed with bit 7: PTX ISA, swizzling modes."""
    places = set()
    for row, number in itertools.product(range(TILE_M), range(2)):
        linear = row * 2 * ROW_TERMS + number * 16
        assert row_term_index(row, number) * 2 == linear ^ ((linear >> 7 & 1) << 4)
        places.add(row_term_index(row, number))
    assert places == set(range(0, TILE_M * ROW_TERMS, ELEMENTS_PER_VECTOR))


def test_a_thread_finds_its_columns_at_equal_distances():
    """What the softmax adds to its first column to find the terms of the others, under the swizzle."""
    for column, group, number in itertools.product(range(8), range(TILE_M // 8), range(2)):
        assert row_term_index(8 * group + column, number) == row_term_index(column, number) + 8 * group * ROW_TERMS


def test_refuses_an_element_type():
    with pytest.raises(PlanError, match="f32 is 4 bytes wide"):
        plan(DType.F32)


@pytest.mark.parametrize(
    "dtype, scale", [(DType.BF16, 0.0), (DType.BF16, 1e-21), (DType.BF16, -1e-21), (DType.F16, 1e-6)]
)
def test_refuses_a_scale_that_lse_cannot_be_divided_by(dtype, scale):
    variant = call.variant_named("dense", dtype)
    with pytest.raises(LaunchInputError, match="softmax_scale="):
        call.numbers_of(variant, None, Settings(softmax_scale=scale), 132)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0, 1e-21, -4e-7])
def test_a_softcap_divides_by_the_scale_nowhere(scale):
    check_scale(Settings(softmax_scale=scale, softcap=2.0), DType.F16)
