"""Preprocess: what the main kernel wants to know of every query row before it starts, and a cleared dQ accumulator.

One CTA per (tile of 128 query rows, head, batch). Each warp owns 16 consecutive rows and reads 4 of them at a time, 8
lanes a row, so that a load instruction covers whole 128-byte lines. Nothing waits on another warp: no shared memory.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute

from undertow.kernels.sm100.arguments import dq_accumulator_argument, row_scalars_argument, rows_argument
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M
from undertow.plan.schema import DType

VECTOR = 8  # 16-bit elements of one 16-byte access
LANES_PER_ROW = HEAD_DIM // VECTOR
ROWS_PER_PASS = 32 // LANES_PER_ROW
ROWS_PER_WARP = TILE_M // (ROW_KERNEL_THREADS // 32)
PASSES = ROWS_PER_WARP // ROWS_PER_PASS
LOG2_E = math.log2(math.e)
NOTHING = -math.inf  # LSE of a row that attended nothing: the log of an empty sum


def build(dtype: DType) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`; `dtype` is that of O and dO."""
    preprocess_kernel.set_name_prefix("undertow_preprocess", remove_cutlass_symbol=True, keep_mangled_name=False)
    return preprocess, (
        rows_argument(dtype),
        rows_argument(dtype),
        row_scalars_argument(padded=False),
        row_scalars_argument(padded=True),
        row_scalars_argument(padded=True),
        dq_accumulator_argument(),
    )


@cute.jit
def preprocess(
    mO: cute.Tensor,
    mdO: cute.Tensor,
    mLSE: cute.Tensor,
    mLSE_log2: cute.Tensor,
    mD: cute.Tensor,
    mdQ_accumulator: cute.Tensor,
):
    """Launch one CTA per accumulator tile."""
    batch, heads, tiles, _ = mdQ_accumulator.shape
    preprocess_kernel(mO, mdO, mLSE, mLSE_log2, mD, mdQ_accumulator).launch(
        grid=(tiles, heads, batch), block=(ROW_KERNEL_THREADS, 1, 1)
    )


@cute.kernel
def preprocess_kernel(
    mO: cute.Tensor,
    mdO: cute.Tensor,
    mLSE: cute.Tensor,
    mLSE_log2: cute.Tensor,
    mD: cute.Tensor,
    mdQ_accumulator: cute.Tensor,
):
    """Write D, LSE in base 2 and a zero accumulator for one tile.

    Math:   D = rowsum(dO * O); LSE_log2 = LSE * log2(e)
    Shapes: mO, mdO (batch, seqlen_q, heads, 64); mLSE (batch, heads, seqlen_q) f32; mLSE_log2, mD (batch, heads, padded
            seqlen_q) f32; mdQ_accumulator (batch, heads, tiles, 8192) f32
    Rows:   padding rows, and rows that attended nothing (LSE = -inf), get LSE_log2 = +inf and D = 0. Then P =
            exp2(S * scale_log2 - inf) = 0 for every finite or masked (-inf) score, and dS = P * (dP - 0) = 0.
    Error:  products of 16-bit floats are exact in f32 and each passes at most 10 roundings on its way into D:
            |error of D| <= 10 * 2^-24 * sum |dO * O| to first order. LSE_log2: one rounding, after that of log2(e).
    """
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    warp, lane = thread // 32, thread % 32
    seqlen = mO.shape[1]
    first_row = tile * TILE_M + warp * ROWS_PER_WARP

    rO = cute.make_rmem_tensor((VECTOR, PASSES), mO.element_type)
    rdO = cute.make_rmem_tensor((VECTOR, PASSES), mdO.element_type)
    rO.fill(0.0)
    rdO.fill(0.0)
    for step in cutlass.range_constexpr(PASSES):  # all loads are under way before the first is used
        row = first_row + step * ROWS_PER_PASS + lane // LANES_PER_ROW
        if row < seqlen:
            cute.autovec_copy(_row_vector(mO, batch, row, head, lane % LANES_PER_ROW), rO[None, step])
            cute.autovec_copy(_row_vector(mdO, batch, row, head, lane % LANES_PER_ROW), rdO[None, step])
    _clear(mdQ_accumulator, (batch, head, cutlass.Int64(tile)), thread)

    sums = cute.make_rmem_tensor((PASSES,), cutlass.Float32)
    for step in cutlass.range_constexpr(PASSES):
        products = rO[None, step].load().to(cutlass.Float32) * rdO[None, step].load().to(cutlass.Float32)
        partial = products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        sums[step] = cute.arch.warp_reduction_sum(partial, threads_in_group=LANES_PER_ROW)
    _write_row_scalars((mLSE, mLSE_log2, mD), sums, (batch, head), (first_row, lane, seqlen))


@cute.jit
def _row_vector(mX: cute.Tensor, batch, row, head, vector):
    """Return the view of elements [8 vector, 8 vector + 8) of one row."""
    return cute.local_tile(mX[batch, row, head, None], (VECTOR,), (vector,))


@cute.jit
def _clear(mdQ_accumulator: cute.Tensor, tile, thread):
    """Zero one accumulator tile with 16-byte stores; neighbouring threads write neighbouring vectors."""
    zeros = cute.make_rmem_tensor((4,), cutlass.Float32)
    zeros.fill(0.0)
    gTile = mdQ_accumulator[(*tile, None)]
    for step in cutlass.range_constexpr(DQ_ACCUMULATOR_TILE // (4 * ROW_KERNEL_THREADS)):
        cute.autovec_copy(zeros, cute.local_tile(gTile, (4,), (step * ROW_KERNEL_THREADS + thread,)))


@cute.jit
def _write_row_scalars(tensors, sums: cute.Tensor, batch_head, position):
    """Write the scalars of a warp's 16 rows with one instruction each: lane 8 g + s has the sum of row 4 s + g."""
    mLSE, mLSE_log2, mD = tensors
    first_row, lane, seqlen = position
    step = lane % LANES_PER_ROW
    row = first_row + step * ROWS_PER_PASS + lane // LANES_PER_ROW
    if step < PASSES:
        D = sums[0]
        for other in cutlass.range_constexpr(1, PASSES):
            D = sums[other] if step == other else D
        LSE = cutlass.Float32(NOTHING)
        if row < seqlen:
            LSE = mLSE[(*batch_head, row)]
        attended = LSE != NOTHING
        mLSE_log2[(*batch_head, row)] = LSE * LOG2_E if attended else cutlass.Float32.inf
        mD[(*batch_head, row)] = D if attended else cutlass.Float32(0.0)
