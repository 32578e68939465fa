"""The arguments of these kernels that the SM100 kernels do not have; see `sm100.arguments`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from undertow.kernels.sm90.plan import ROW_TERMS, TILE_M
from undertow.kernels.sm100.arguments import ELEMENT_TYPES, VECTOR_BYTES
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.plan.schema import DType


def row_terms_argument(dtype: DType) -> Any:
    """Return the (batch, heads, tiles, 2048) terms of `dtype`; see `plan.row_term_index` for the order in a tile."""
    size = TILE_M * ROW_TERMS
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), size)
    stride = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), size, 1)
    return make_fake_tensor(ELEMENT_TYPES[dtype], shape, stride=stride, assumed_align=VECTOR_BYTES)


def lse_argument() -> Any:
    """Return the (batch, heads, tiles, 128) fp32 numbers -LSE * log2(e), which only a softcap wants apart."""
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), TILE_M)
    stride = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), TILE_M, 1)
    return make_fake_tensor(cutlass.Float32, shape, stride=stride, assumed_align=VECTOR_BYTES)


def partial_argument() -> Any:
    """Return the (batch, kv_heads * parts, tiles, 16384) fp32 sums of parts of groups: dV, then dK of a key tile."""
    size = 2 * DQ_ACCUMULATOR_TILE
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), size)
    stride = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), size, 1)
    return make_fake_tensor(cutlass.Float32, shape, stride=stride, assumed_align=VECTOR_BYTES)


def claims_argument() -> Any:
    """Return the one i32 that counts the key/value tiles claimed so far."""
    return make_fake_tensor(cutlass.Int32, (1,), stride=(1,), assumed_align=4)
