"""Postprocess: dQ leaves the fp32 accumulator, gets its softmax scale and its 16-bit type.

One CTA per (tile of 128 query rows, head, batch). The accumulator keeps rows r and r + 8 together, as the GEMM's
registers do, so a thread takes 8 columns of both: it then reads 64 contiguous bytes, and 8 threads write whole rows.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from undertow.kernels.sm90.plan import TILE_M, WARPGROUPS, dq_accumulator_index
from undertow.kernels.sm100.arguments import (
    counters_argument,
    dq_accumulator_argument,
    packing_argument,
    row_scalars_argument,
    rows_argument,
    vector_argument,
)
from undertow.kernels.sm100.layouts import ROW_KERNEL_THREADS
from undertow.kernels.sm100.postprocess import (
    LANES_PER_ROW,
    VECTOR,
    Results,
    clear_unused,
    is_worth_loading,
    sum_parts,
)
from undertow.kernels.sm100.sequences import Packing, QueryTile, query_tile
from undertow.plan.attention import PLAIN, RowVariant
from undertow.plan.schema import DType

APART = 8  # rows r and r + 8 lie together
PAIRS = TILE_M // 2
PAIRS_PER_PASS = ROW_KERNEL_THREADS // LANES_PER_ROW
PASSES = PAIRS // PAIRS_PER_PASS
SHARE_ROWS = TILE_M // WARPGROUPS


@dataclass(frozen=True)
class Sums:
    """mdQ_accumulator: (batch, heads, tiles, 8192) f32. mdSink_parts: (batch, heads, parts) f32.

    mTurns: (batch, heads, 2 tiles) i32, how many key/value tiles were added to a share, if they took turns.
    """

    mdQ_accumulator: cute.Tensor
    mdSink_parts: Any = None
    mTurns: Any = None


def build(dtype: DType, variant: RowVariant = PLAIN) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`; `dtype` is that of dQ."""
    set_name()
    parts = row_scalars_argument(padded=False) if variant.sink else None
    sums = Sums(dq_accumulator_argument(), parts, counters_argument() if variant.deterministic else None)
    results = Results(rows_argument(dtype), vector_argument(Float32) if variant.sink else None)
    return postprocess, (sums, results, packing_argument() if variant.packed else None, Float32(1.0))


def set_name() -> None:
    """Name the entry of the kernel that is compiled next."""
    postprocess_kernel.set_name_prefix("undertow_postprocess_sm90", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def postprocess(sums: Sums, results: Results, packing: Packing | None, softmax_scale: Float32):
    """Launch one CTA per accumulator tile, on the default stream."""
    postprocess_on(sums, results, packing, softmax_scale, ())


def postprocess_on(sums: Sums, results: Results, packing: Packing | None, softmax_scale: Float32, stream: Any) -> None:
    """The same on a stream."""
    batch, heads, tiles, _ = sums.mdQ_accumulator.shape
    postprocess_kernel(sums, results, packing, softmax_scale).launch(
        grid=(tiles * heads * batch, 1, 1), block=(ROW_KERNEL_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def postprocess_kernel(sums: Sums, results: Results, packing: Packing | None, softmax_scale: Float32):
    """Write dQ = softmax_scale * accumulator for the rows of one tile that exist, zeros for those that are not used.

    Error:  one rounding of f32 for the product, one of the 16-bit type.
    """
    thread, _, _ = cute.arch.thread_idx()
    tile = query_tile(sums.mdQ_accumulator, results.mdQ.shape[1], packing, TILE_M)
    accumulator = sums.mdQ_accumulator[tile.batch, tile.head, Int64(tile.tile), None]
    pair, group = thread // LANES_PER_ROW, thread % LANES_PER_ROW
    loaded = cute.make_rmem_tensor((2 * VECTOR, PASSES), Float32)
    for step in cutlass.range_constexpr(PASSES):
        row = row_of(pair + step * PAIRS_PER_PASS)
        if is_worth_loading(row, tile, packing):
            first = dq_accumulator_index(row, group * VECTOR)
            cute.autovec_copy(cute.local_tile(accumulator, (2 * VECTOR,), (first // (2 * VECTOR),)), loaded[None, step])
    if cutlass.const_expr(sums.mTurns is not None):
        _clear_what_nobody_stored(sums.mTurns, tile, pair, loaded)
    for step in cutlass.range_constexpr(PASSES):
        for half in cutlass.range_constexpr(2):
            row = row_of(pair + step * PAIRS_PER_PASS) + half * APART
            write_row(results.mdQ, (tile, row, group), (loaded, step, half), (softmax_scale, packing))
    if cutlass.const_expr(results.mdSink is not None):
        sum_parts(sums.mdSink_parts, results.mdSink, tile, thread)


def row_of(pair: Int32) -> Int32:
    """The first row of a pair."""
    return pair // APART * (2 * APART) + pair % APART


@cute.jit
def _clear_what_nobody_stored(mTurns: cute.Tensor, tile: QueryTile, pair: Int32, loaded: cute.Tensor):
    """Zeros for a share that no key/value tile has a part in: its accumulator was never written."""
    for step in cutlass.range_constexpr(PASSES):
        share = row_of(pair + step * PAIRS_PER_PASS) // SHARE_ROWS
        if mTurns[tile.batch, tile.head, tile.tile * WARPGROUPS + share] == 0:
            loaded[None, step].fill(0.0)


@cute.jit
def write_row(mdQ: cute.Tensor, at: tuple[QueryTile, Int32, Int32], of: tuple, how: tuple):
    """Write 8 columns of a row. of: the registers, their step, and which half of the pair."""
    (tile, row, group), (loaded, step, half), (softmax_scale, packing) = at, of, how
    if row < tile.kept:
        rdQ = cute.make_rmem_tensor((VECTOR,), mdQ.element_type)
        for column in cutlass.range_constexpr(VECTOR):
            register = column // 2 * 4 + half * 2 + column % 2
            rdQ[column] = (loaded[register, step] * softmax_scale).to(mdQ.element_type)
        if cutlass.const_expr(packing is not None):
            clear_unused(rdQ, row, tile)
        cute.autovec_copy(rdQ, cute.local_tile(mdQ[tile.batch, tile.first + row, tile.head, None], (VECTOR,), (group,)))
