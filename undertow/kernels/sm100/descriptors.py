"""The two descriptors of a tcgen05.mma, from the plan: what the instruction does, and how its operands lie in SMEM.

Standard library only, so that tests hold them against the manual bit by bit. Every SMEM operand is made of panels: rows
of 128 bytes under the 128-byte swizzle, which is also how TMA writes a 64-element box of 16-bit values.
Source: PTX ISA, "tcgen05 instruction descriptor", "shared memory descriptor", "canonical layouts".
"""

from __future__ import annotations

from undertow.plan.schema import DType, MmaOp, Plan

K_STEP = 16  # k of one tcgen05.mma with 16-bit operands
PANEL_BYTES = 128  # contiguous bytes of one row: the span of the swizzle
SWIZZLE_ROWS = 8  # rows after which the swizzle repeats
GRANULE_BYTES = 16  # unit of every field of a shared-memory descriptor

_OPERAND_FORMATS = {DType.F16: 0, DType.BF16: 1}
_ACCUMULATOR_F32 = 1
_DESCRIPTOR_VERSION = 1
_SWIZZLE_128B = 2


def instruction_descriptor(plan: Plan, op: MmaOp) -> int:
    """The 32-bit instruction descriptor of one GEMM: fp32 accumulator, operands of the plan's type, shape m x n."""
    operand = _OPERAND_FORMATS[plan.dtype]
    return (
        _ACCUMULATOR_F32 << 4
        | operand << 7
        | operand << 10
        | (op.a in op.mn_major) << 15
        | (op.b in op.mn_major) << 16
        | (op.n >> 3) << 17
        | (op.m >> 4) << 24
    )


def operand_descriptor(plan: Plan, op: MmaOp, region: str) -> int:
    """The 64-bit shared-memory descriptor of an operand that starts at address 0.

    The stride offset leads from 8 rows to the next 8. The leading offset leads from one panel to the next where m or n
    runs along the row; where k does, one panel holds all of it, and the field is not used and is by convention 1.
    """
    stride = SWIZZLE_ROWS * PANEL_BYTES // GRANULE_BYTES
    leading = panel_bytes(plan, region) // GRANULE_BYTES if region in op.mn_major else 1
    return leading << 16 | stride << 32 | _DESCRIPTOR_VERSION << 46 | _SWIZZLE_128B << 61


def k_step_bytes(op: MmaOp, region: str) -> int:
    """How far the operand's start address moves from one instruction to the next, 16 of k later."""
    return K_STEP * PANEL_BYTES if region in op.mn_major else K_STEP * 2


def panel_bytes(plan: Plan, region: str) -> int:
    """Bytes of one panel: all rows of the region, 128 bytes each."""
    return plan.smem_region(region).rows * PANEL_BYTES
