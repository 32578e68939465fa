"""The arguments that kernels take, as the compiler sees them: types, alignment, and which extents are fixed.

Extents and strides that are not fixed here become parameters of the compiled kernel: i32 extents, then i64 strides in
elements (so that offsets are computed in 64 bits). `launch.py` supplies them in the same order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.kernels.sm100.plan import HEAD_DIM
from undertow.kernels.sm100.sequences import Packing
from undertow.plan.schema import DType

VECTOR_BYTES = 16  # every global access of a row is a 16-byte vector, so bases and strides are multiples of it

ELEMENT_TYPES = {DType.BF16: cutlass.BFloat16, DType.F16: cutlass.Float16, DType.F32: cutlass.Float32}


def rows_argument(dtype: DType) -> Any:
    """Return a (batch, seqlen, heads, 64) argument of any strides, whose last dimension is contiguous."""
    stride = [cute.sym_int64(divisibility=VECTOR_BYTES // dtype.bytes) for _ in range(3)]
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), HEAD_DIM)
    return make_fake_tensor(ELEMENT_TYPES[dtype], shape, stride=(*stride, 1), assumed_align=VECTOR_BYTES)


def row_scalars_argument(padded: bool) -> Any:
    """Return a (batch, heads, seqlen) fp32 argument; `padded` says that seqlen is whole tiles, hence aligned."""
    divisibility = VECTOR_BYTES // DType.F32.bytes if padded else 1
    stride = (cute.sym_int64(divisibility=divisibility), cute.sym_int64(divisibility=divisibility), 1)
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32())
    return make_fake_tensor(cutlass.Float32, shape, stride=stride, assumed_align=4 * divisibility)


def dq_accumulator_argument() -> Any:
    """Return the (batch, heads, tiles, 8192) fp32 accumulator; see `layouts` for the order within a tile."""
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), DQ_ACCUMULATOR_TILE)
    stride = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), DQ_ACCUMULATOR_TILE, 1)
    return make_fake_tensor(cutlass.Float32, shape, stride=stride, assumed_align=VECTOR_BYTES)


def counters_argument() -> Any:
    """Return the (batch, heads, tiles) i32 turns of the query tiles."""
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32())
    return make_fake_tensor(cutlass.Int32, shape, stride=(cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)


def vector_argument(dtype: Any) -> Any:
    """Return a contiguous vector of any length."""
    return make_fake_tensor(dtype, (cute.sym_int32(),), stride=(1,), assumed_align=4)


def packing_argument() -> Packing:
    """Return one side of packed sequences."""
    return Packing(vector_argument(cutlass.Int32), vector_argument(cutlass.Int32))
