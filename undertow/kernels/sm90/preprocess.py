"""Preprocess: what the main kernel's GEMMs add to S and dP of every query row, and cleared accumulators.

As on SM100, D = rowsum(dO * O) - dLSE, one CTA per (tile of 128 query rows, head, batch), each warp on 16 rows of its
own. Here the main kernel wants S - LSE / softmax_scale and dP - D from its tensor cores, so each of the two numbers is
split into 16-bit terms, which a step of k = 16 adds up.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from undertow.kernels.sm90.arguments import claims_argument, lse_argument, row_terms_argument
from undertow.kernels.sm90.plan import HEAD_DIM, MOST_OF_TERM, TERM_PLACES, TERM_UNITS, TILE_M, row_term_index
from undertow.kernels.sm100.arguments import (
    counters_argument,
    dq_accumulator_argument,
    packing_argument,
    row_scalars_argument,
    rows_argument,
    vector_argument,
)
from undertow.kernels.sm100.layouts import ROW_KERNEL_THREADS
from undertow.kernels.sm100.preprocess import (
    LANES_PER_ROW,
    LOG2_E,
    NOTHING,
    PASSES,
    ROWS_PER_PASS,
    ROWS_PER_WARP,
    VECTOR,
    WARPS,
    RowInputs,
    clear,
    row_vector,
)
from undertow.kernels.sm100.sequences import Packing, QueryTile, query_tile
from undertow.plan.attention import PLAIN, RowVariant
from undertow.plan.schema import DType

FAR = 1e30  # a score that leaves P nothing, or as much of it as the terms hold
SHARES = 2  # of dQ, each with turns of its own

assert HEAD_DIM == VECTOR * LANES_PER_ROW


@dataclass(frozen=True)
class RowOutputs:
    """mTerms: (batch, heads, tiles, 2048) of the 16-bit type. mdQ_accumulator: (batch, heads, tiles, 8192) f32.

    mClaims: (1) i32. mLSE: (batch, heads, tiles, 128) f32, where the softmax takes LSE off. mTurns: (batch, heads,
    2 tiles) i32. mdSink_parts: (batch, heads, 8 tiles) f32, one per warp.
    """

    mTerms: cute.Tensor
    mdQ_accumulator: cute.Tensor
    mClaims: cute.Tensor
    mLSE: Any = None
    mTurns: Any = None
    mdSink_parts: Any = None


@dataclass(frozen=True)
class RowPlace:
    """Where a thread of a tile works. lse_factor: -1 / (softmax_scale * log2(e)), None under a softcap."""

    tile: QueryTile
    warp: Int32
    lane: Int32
    lse_factor: Any


def build(dtype: DType, variant: RowVariant = PLAIN, softcap: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`; `dtype` is that of O and dO."""
    set_name()
    inputs = RowInputs(
        rows_argument(dtype),
        rows_argument(dtype),
        row_scalars_argument(padded=False),
        row_scalars_argument(padded=False) if variant.dlse else None,
        vector_argument(Float32) if variant.sink else None,
    )
    outputs = RowOutputs(
        row_terms_argument(dtype),
        dq_accumulator_argument(),
        claims_argument(),
        lse_argument() if softcap else None,
        counters_argument() if variant.deterministic else None,
        row_scalars_argument(padded=False) if variant.sink else None,
    )
    packing = packing_argument() if variant.packed else None
    return preprocess, (dtype, inputs, outputs, packing, None if softcap else Float32(1.0))


def set_name() -> None:
    """Name the entry of the kernel that is compiled next."""
    preprocess_kernel.set_name_prefix("undertow_preprocess_sm90", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def preprocess(
    dtype: Constexpr, inputs: RowInputs, outputs: RowOutputs, packing: Packing | None, lse_factor: Float32 | None
):
    """Launch one CTA per accumulator tile, on the default stream."""
    preprocess_on(dtype, (inputs, outputs), packing, lse_factor, ())


def preprocess_on(dtype: DType, tensors: Any, packing: Packing | None, lse_factor: Float32 | None, stream: Any) -> None:
    """The same on a stream."""
    inputs, outputs = tensors
    batch, heads, tiles, _ = outputs.mdQ_accumulator.shape
    preprocess_kernel(dtype, inputs, outputs, packing, lse_factor).launch(
        grid=(tiles * heads * batch, 1, 1), block=(ROW_KERNEL_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def preprocess_kernel(
    dtype: Constexpr, inputs: RowInputs, outputs: RowOutputs, packing: Packing | None, lse_factor: Float32 | None
):
    """Write the terms of -LSE / softmax_scale and -D, and a zero accumulator or no turns, for one tile.

    Rows:   padding rows, and rows that attended nothing (LSE = -inf, or +inf, as some say), get a score so far below
            zero that P = 0, and D = 0. Then dS = P * (dP - 0) = 0.
    Error:  that of D as on SM100; the terms of a number miss it by at most 2^-24 of it in bf16, and in f16 by
            2^-33 of it or 2^-35, whichever is more.
    Range:  a number beyond what a term can hold, 1e30 in bf16 and 3.84e6 in f16, becomes NaN, and so do gradients that
            depend on it. So does NaN.
    """
    thread, _, _ = cute.arch.thread_idx()
    tile = query_tile(outputs.mdQ_accumulator, inputs.mO.shape[1], packing, TILE_M)
    warp, lane = thread // 32, thread % 32
    rO = cute.make_rmem_tensor((VECTOR, PASSES), inputs.mO.element_type)
    rdO = cute.make_rmem_tensor((VECTOR, PASSES), inputs.mdO.element_type)
    rO.fill(0.0)
    rdO.fill(0.0)
    for step in cutlass.range_constexpr(PASSES):  # all loads are under way before the first is used
        row = warp * ROWS_PER_WARP + step * ROWS_PER_PASS + lane // LANES_PER_ROW
        if row < tile.used:
            cute.autovec_copy(row_vector(inputs.mO, tile, row, lane % LANES_PER_ROW), rO[None, step])
            cute.autovec_copy(row_vector(inputs.mdO, tile, row, lane % LANES_PER_ROW), rdO[None, step])
    _reset_claims(outputs.mClaims, thread)
    if cutlass.const_expr(outputs.mTurns is None):
        clear(outputs.mdQ_accumulator[tile.batch, tile.head, Int64(tile.tile), None], thread)
    else:  # who comes first stores its share: there is nothing to clear
        _reset_turns(outputs.mTurns, tile, thread)

    sums = cute.make_rmem_tensor((PASSES,), Float32)
    for step in cutlass.range_constexpr(PASSES):
        products = rO[None, step].load().to(Float32) * rdO[None, step].load().to(Float32)
        partial = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        sums[step] = cute.arch.warp_reduction_sum(partial, threads_in_group=LANES_PER_ROW)
    _write_rows(dtype, inputs, outputs, sums, RowPlace(tile, warp, lane, lse_factor))


@cute.jit
def _reset_claims(mClaims: cute.Tensor, thread: Int32):
    """No key/value tile is claimed yet."""
    number, _, _ = cute.arch.block_idx()
    if (number == 0) & (thread == 0):
        mClaims[0] = Int32(0)


@cute.jit
def _reset_turns(mTurns: cute.Tensor, tile: QueryTile, thread: Int32):
    """Nobody has added to either share of the tile's dQ yet."""
    if thread < SHARES:
        mTurns[tile.batch, tile.head, tile.tile * SHARES + thread] = Int32(0)


@cute.jit
def _write_rows(dtype: Constexpr, inputs: RowInputs, outputs: RowOutputs, sums: cute.Tensor, at: RowPlace):
    """Write the terms of a warp's 16 rows: lane 8 g + s has the sum of row 4 s + g."""
    tile, step = at.tile, at.lane % LANES_PER_ROW
    row = at.warp * ROWS_PER_WARP + step * ROWS_PER_PASS + at.lane // LANES_PER_ROW
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
        attended = (LSE != NOTHING) & (LSE != -NOTHING)
        D = D if attended else Float32(0.0)
        LSE_log2 = LSE * LOG2_E if attended else Float32.inf
        _write_lse(dtype, outputs, at, (row, LSE_log2, attended))
        _write_terms(dtype, outputs.mTerms, (tile, row, 1), -D, attended)
        if cutlass.const_expr(inputs.mSink is not None):
            dsink = -cute.math.exp2(inputs.mSink[tile.head] * LOG2_E - LSE_log2, fastmath=True) * D
    if cutlass.const_expr(inputs.mSink is not None):
        part = cute.arch.warp_reduction_sum(dsink)
        if at.lane == 0:
            outputs.mdSink_parts[tile.batch, tile.head, tile.tile * WARPS + at.warp] = part


@cute.jit
def _write_lse(dtype: Constexpr, outputs: RowOutputs, at: RowPlace, of: tuple):
    """Write what takes LSE off the scores, or under a softcap off the exponents. of: row, LSE, whether it attended."""
    (row, LSE_log2, attended), tile = of, at.tile
    if cutlass.const_expr(at.lse_factor is None):
        of_tile = outputs.mLSE[tile.batch, tile.head, Int64(tile.tile), None]
        of_tile[row] = -LSE_log2 if attended else Float32(-FAR)
        _write_terms(dtype, outputs.mTerms, (tile, row, 0), Float32(0.0), attended)
    else:
        far = Float32(FAR) if at.lse_factor > 0 else Float32(-FAR)
        score = LSE_log2 * at.lse_factor
        _write_terms(dtype, outputs.mTerms, (tile, row, 0), score if attended else far, attended)


@cute.jit
def _write_terms(dtype: Constexpr, mTerms: cute.Tensor, at: tuple, value: Float32, exact: Boolean):
    """Write one number of a row as terms, each of what those before it have left, and zeros.

    at: tile, row, and which number. exact: a number that the terms cannot hold is NaN, and not as much as they can.
    """
    tile, row, number = at
    terms = cute.make_rmem_tensor((VECTOR,), mTerms.element_type)
    terms.fill(0.0)
    units, most = TERM_UNITS[dtype], Float32(MOST_OF_TERM[dtype])
    holds = (value <= most * units[0]) & (value >= -most * units[0])
    poison = Float32(0.0) if holds | ~exact else Float32.nan
    rest = value
    for place in TERM_PLACES:
        unit = units[place % 2]
        term = cute.arch.fmin(cute.arch.fmax(rest * Float32(1.0 / unit), -most), most) + poison
        terms[place] = term.to(mTerms.element_type)
        rest = rest - terms[place].to(Float32) * Float32(unit)
    vector = row_term_index(row, number) // VECTOR
    of_tile = mTerms[tile.batch, tile.head, Int64(tile.tile), None]
    cute.autovec_copy(terms, cute.local_tile(of_tile, (VECTOR,), (vector,)))
