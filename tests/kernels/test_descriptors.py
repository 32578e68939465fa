"""The MMA descriptors, held against the manual's fields and against where the bytes of an operand really are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from undertow.kernels.sm100.descriptors import (
    GRANULE_BYTES,
    K_STEP,
    PANEL_BYTES,
    instruction_descriptor,
    k_step_bytes,
    operand_descriptor,
)
from undertow.kernels.sm100.plan import plan
from undertow.kernels.sm100.roles import compute
from undertow.plan.schema import DType, MmaOp

PLAN = plan("split")
SMEM = {region.name for region in PLAN.smem}
OPERANDS = [(op.name, region) for op in PLAN.mmas for region in (op.a, op.b) if region in SMEM]

# PTX ISA, instruction descriptor: D f32 1<<4, A and B bf16 1<<7 and 1<<10, MN-major A 1<<15, MN-major B 1<<16,
# N/8 << 17, M/16 << 24. Worked out by hand for 128x128 K/K, 128x64 K/MN and 128x64 MN/MN.
INSTRUCTIONS = {"QK": 0x8200490, "dP": 0x8200490, "PdO": 0x8110490, "dK": 0x8110490, "dQ": 0x8118490}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_instruction_descriptor_is_the_one_worked_out_by_hand(name):
    assert instruction_descriptor(PLAN, PLAN.mma(name)) == INSTRUCTIONS[name]


def test_half_precision_changes_only_the_operand_formats():
    half = plan("split", DType.F16)
    assert instruction_descriptor(half, half.mma("QK")) == INSTRUCTIONS["QK"] & ~(1 << 7 | 1 << 10)


def swizzled(offset: int) -> int:
    """The 128-byte swizzle, on a byte offset from a 1024-byte boundary: bits [4, 7) ^= bits [7, 10)."""
    return offset ^ (offset >> 3 & 0x70)


def stored_at(region: str, row: int, column: int) -> int:
    """Byte of an element of a region that was written as rows of 128 bytes, panel after panel, under the swizzle."""
    panel, within = divmod(2 * column, PANEL_BYTES)
    return swizzled((panel * PLAN.smem_region(region).rows + row) * PANEL_BYTES + within)


def read_at(op: MmaOp, region: str, mn: int, k: int) -> int:
    """Byte that the tensor core reads for (m or n, k), by the canonical layouts of the PTX ISA."""
    descriptor = operand_descriptor(PLAN, op, region)
    assert descriptor >> 61 == 2 and descriptor >> 46 & 3 == 1 and descriptor >> 49 & 7 == 0
    leading = (descriptor >> 16 & 0x3FFF) * GRANULE_BYTES
    stride = (descriptor >> 32 & 0x3FFF) * GRANULE_BYTES
    step, inner = divmod(k, K_STEP)
    start = step * k_step_bytes(op, region)
    assert start % GRANULE_BYTES == 0
    if region in op.mn_major:
        atom, along = divmod(mn, PANEL_BYTES // 2)
        return swizzled(start + 2 * along + atom * leading + inner % 8 * PANEL_BYTES + inner // 8 * stride)
    return swizzled(start + mn // 8 * stride + mn % 8 * PANEL_BYTES + 2 * inner)


@pytest.mark.parametrize(("name", "region"), OPERANDS)
def test_every_element_is_read_where_it_was_stored(name, region):
    """Rows of sQ, sK, sV, sdO are positions of the sequence; rows of sdS are keys, so its columns are queries."""
    op = PLAN.mma(name)
    extent = op.m if region == op.a else op.n
    for k in range(op.k):
        for mn in range(extent):
            row, column = (k, mn) if region in op.mn_major else (mn, k)
            assert read_at(op, region, mn, k) == stored_at(region, row, column)


@pytest.mark.parametrize("warpgroup", range(2))
@pytest.mark.parametrize("stage", range(2))
def test_compute_threads_store_ds_where_the_dq_gemm_reads_it(stage, warpgroup):
    """The role's own address arithmetic, with integers for registers: 8 elements of 16 bits per vector."""
    columns = list(PLAN.queries_of(stage, warpgroup))
    for row in range(PLAN.tile_n):
        context: Any = SimpleNamespace(
            plan=PLAN, smem=SimpleNamespace(address=lambda region: 0), row=row, warpgroup=warpgroup
        )
        for index, address in enumerate(compute._sds_addresses(context, stage)):
            assert address == stored_at("sdS", row, columns[8 * index])
