"""Preprocess: what the main kernel wants to know of every query row before it starts, and cleared accumulators.

One CTA per (tile of 128 query rows, head, batch). Each warp owns 16 consecutive rows and reads 4 of them at a time, 8
lanes a row, so that a load instruction covers whole 128-byte lines. Nothing waits on another warp: no shared memory.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from undertow.kernels.sm100.arguments import (
    counters_argument,
    dq_accumulator_argument,
    packing_argument,
    row_scalars_argument,
    rows_argument,
    vector_argument,
)
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M
from undertow.kernels.sm100.sequences import Packing, QueryTile, query_tile
from undertow.plan.attention import PLAIN, RowVariant
from undertow.plan.schema import DType

VECTOR = 8  # 16-bit elements of one 16-byte access
LANES_PER_ROW = HEAD_DIM // VECTOR
ROWS_PER_PASS = 32 // LANES_PER_ROW
WARPS = ROW_KERNEL_THREADS // 32
ROWS_PER_WARP = TILE_M // WARPS
PASSES = ROWS_PER_WARP // ROWS_PER_PASS
LOG2_E = math.log2(math.e)
NOTHING = -math.inf  # LSE of a row that attended nothing: the log of an empty sum


@dataclass(frozen=True)
class RowInputs:
    """mO, mdO: (batch, seqlen_q, heads, 64). mLSE, mdLSE: (batch, heads, seqlen_q) f32. mSink: (heads) f32."""

    mO: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor
    mdLSE: Any = None
    mSink: Any = None


@dataclass(frozen=True)
class RowOutputs:
    """mLSE_log2, mD: (batch, heads, padded rows) f32. mdQ_accumulator: (batch, heads, tiles, 8192) f32.

    mTurns: (batch, heads, tiles) i32. mdSink_parts: (batch, heads, 8 tiles) f32, one per warp.
    """

    mLSE_log2: cute.Tensor
    mD: cute.Tensor
    mdQ_accumulator: cute.Tensor
    mTurns: Any = None
    mdSink_parts: Any = None


def build(dtype: DType, variant: RowVariant = PLAIN) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`; `dtype` is that of O and dO."""
    set_name()
    plain_scalars, padded_scalars = row_scalars_argument(padded=False), row_scalars_argument(padded=True)
    inputs = RowInputs(
        rows_argument(dtype),
        rows_argument(dtype),
        plain_scalars,
        row_scalars_argument(padded=False) if variant.dlse else None,
        vector_argument(Float32) if variant.sink else None,
    )
    outputs = RowOutputs(
        padded_scalars,
        row_scalars_argument(padded=True),
        dq_accumulator_argument(),
        counters_argument() if variant.deterministic else None,
        row_scalars_argument(padded=False) if variant.sink else None,
    )
    return preprocess, (inputs, outputs, packing_argument() if variant.packed else None)


def set_name() -> None:
    """Name the entry of the kernel that is compiled next."""
    preprocess_kernel.set_name_prefix("undertow_preprocess", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def preprocess(inputs: RowInputs, outputs: RowOutputs, packing: Packing | None):
    """Launch one CTA per accumulator tile, on the default stream."""
    preprocess_on(inputs, outputs, packing, ())


def preprocess_on(inputs: RowInputs, outputs: RowOutputs, packing: Packing | None, stream: Any) -> None:
    """The same on a stream."""
    batch, heads, tiles, _ = outputs.mdQ_accumulator.shape
    preprocess_kernel(inputs, outputs, packing).launch(
        grid=(tiles * heads * batch, 1, 1), block=(ROW_KERNEL_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def preprocess_kernel(inputs: RowInputs, outputs: RowOutputs, packing: Packing | None):
    """Write D, LSE in base 2 and a zero accumulator for one tile.

    Math:   D = rowsum(dO * O) - dLSE; LSE_log2 = LSE * log2(e); a sink's part of dsink = -sum exp(sink - LSE) * D
    Rows:   padding rows, and rows that attended nothing (LSE = -inf), get LSE_log2 = +inf and D = 0. Then P =
            exp2(S * scale_log2 - inf) = 0 for every finite or masked (-inf) score, and dS = P * (dP - 0) = 0.
    Error:  products of 16-bit floats are exact in f32 and each passes at most 10 roundings on its way into D:
            |error of D| <= 10 * 2^-24 * sum |dO * O| to first order. LSE_log2: one rounding, after that of log2(e).
    """
    thread, _, _ = cute.arch.thread_idx()
    tile = query_tile(outputs.mdQ_accumulator, inputs.mO.shape[1], packing, TILE_M)
    warp, lane = thread // 32, thread % 32
    first_row = warp * ROWS_PER_WARP  # of the tile

    rO = cute.make_rmem_tensor((VECTOR, PASSES), inputs.mO.element_type)
    rdO = cute.make_rmem_tensor((VECTOR, PASSES), inputs.mdO.element_type)
    rO.fill(0.0)
    rdO.fill(0.0)
    for step in cutlass.range_constexpr(PASSES):  # all loads are under way before the first is used
        row = first_row + step * ROWS_PER_PASS + lane // LANES_PER_ROW
        if row < tile.used:
            cute.autovec_copy(row_vector(inputs.mO, tile, row, lane % LANES_PER_ROW), rO[None, step])
            cute.autovec_copy(row_vector(inputs.mdO, tile, row, lane % LANES_PER_ROW), rdO[None, step])
    clear(outputs.mdQ_accumulator[tile.batch, tile.head, Int64(tile.tile), None], thread)
    if cutlass.const_expr(outputs.mTurns is not None):
        _reset_turn(outputs.mTurns, tile, thread)

    sums = cute.make_rmem_tensor((PASSES,), Float32)
    for step in cutlass.range_constexpr(PASSES):
        products = rO[None, step].load().to(Float32) * rdO[None, step].load().to(Float32)
        partial = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        sums[step] = cute.arch.warp_reduction_sum(partial, threads_in_group=LANES_PER_ROW)
    _write_row_scalars(inputs, outputs, tile, sums, (warp, lane))


@cute.jit
def row_vector(mX: cute.Tensor, tile: QueryTile, row: Int32, vector: Int32):
    """Return the view of elements [8 vector, 8 vector + 8) of one row of the tile."""
    return cute.local_tile(mX[tile.batch, tile.first + row, tile.head, None], (VECTOR,), (vector,))


@cute.jit
def clear(gTile: cute.Tensor, thread: Int32):
    """Zero one accumulator tile with 16-byte stores; neighbouring threads write neighbouring vectors."""
    zeros = cute.make_rmem_tensor((4,), Float32)
    zeros.fill(0.0)
    for step in cutlass.range_constexpr(DQ_ACCUMULATOR_TILE // (4 * ROW_KERNEL_THREADS)):
        cute.autovec_copy(zeros, cute.local_tile(gTile, (4,), (step * ROW_KERNEL_THREADS + thread,)))


@cute.jit
def _reset_turn(mTurns: cute.Tensor, tile: QueryTile, thread: Int32):
    """Nobody has added to the tile's dQ yet."""
    if thread == 0:
        mTurns[tile.batch, tile.head, tile.tile] = Int32(0)


@cute.jit
def _write_row_scalars(inputs: RowInputs, outputs: RowOutputs, tile: QueryTile, sums: cute.Tensor, at: Constexpr):
    """Write the scalars of a warp's 16 rows with one instruction each: lane 8 g + s has the sum of row 4 s + g."""
    warp, lane = at
    step = lane % LANES_PER_ROW
    row = warp * ROWS_PER_WARP + step * ROWS_PER_PASS + lane // LANES_PER_ROW
    dsink = Float32(0.0)
    if step < PASSES:
        D = sums[0]
        for other in cutlass.range_constexpr(1, PASSES):
            D = sums[other] if step == other else D
        LSE = Float32(NOTHING)
        if row < tile.used:
            LSE = inputs.mLSE[tile.batch, tile.head, tile.first + row]
            if cutlass.const_expr(inputs.mdLSE is not None):
                D = D - inputs.mdLSE[tile.batch, tile.head, tile.first + row]
        attended = LSE != NOTHING
        D = D if attended else Float32(0.0)
        LSE_log2 = LSE * LOG2_E if attended else Float32.inf
        outputs.mLSE_log2[tile.batch, tile.head, tile.tile * TILE_M + row] = LSE_log2
        outputs.mD[tile.batch, tile.head, tile.tile * TILE_M + row] = D
        if cutlass.const_expr(inputs.mSink is not None):
            dsink = -cute.math.exp2(inputs.mSink[tile.head] * LOG2_E - LSE_log2, fastmath=True) * D
    if cutlass.const_expr(inputs.mSink is not None):
        part = cute.arch.warp_reduction_sum(dsink)
        if lane == 0:
            outputs.mdSink_parts[tile.batch, tile.head, tile.tile * WARPS + warp] = part
