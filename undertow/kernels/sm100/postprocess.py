"""Postprocess: dQ leaves the fp32 accumulator, gets its softmax scale and its 16-bit type.

One CTA per (tile of 128 query rows, head, batch). The accumulator keeps 4 columns of all rows together, the result
keeps rows together. A warp takes 4 rows by 64 columns: its stores then cover whole 128-byte lines and its loads whole
32-byte sectors, so nothing is gained by a transposition through shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from undertow.kernels.sm100.arguments import (
    dq_accumulator_argument,
    packing_argument,
    row_scalars_argument,
    rows_argument,
    vector_argument,
)
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_SHAPE, DQ_ACCUMULATOR_STRIDES, ROW_KERNEL_THREADS
from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M
from undertow.kernels.sm100.sequences import Packing, QueryTile, query_tile
from undertow.plan.attention import PLAIN, RowVariant
from undertow.plan.schema import DType

VECTOR = 8  # 16-bit elements of one 16-byte store
LANES_PER_ROW = HEAD_DIM // VECTOR
ROWS_PER_PASS = ROW_KERNEL_THREADS // LANES_PER_ROW
PASSES = TILE_M // ROWS_PER_PASS
WARPS = ROW_KERNEL_THREADS // 32


@dataclass(frozen=True)
class Sums:
    """mdQ_accumulator: (batch, heads, tiles, 8192) f32. mdSink_parts: (batch, heads, parts) f32."""

    mdQ_accumulator: cute.Tensor
    mdSink_parts: Any = None


@dataclass(frozen=True)
class Results:
    """mdQ: (batch, seqlen_q, heads, 64). mdSink: (heads) f32."""

    mdQ: cute.Tensor
    mdSink: Any = None


def build(dtype: DType, variant: RowVariant = PLAIN) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`; `dtype` is that of dQ."""
    set_name()
    sums = Sums(dq_accumulator_argument(), row_scalars_argument(padded=False) if variant.sink else None)
    results = Results(rows_argument(dtype), vector_argument(Float32) if variant.sink else None)
    return postprocess, (sums, results, packing_argument() if variant.packed else None, Float32(1.0))


def set_name() -> None:
    """Name the entry of the kernel that is compiled next."""
    postprocess_kernel.set_name_prefix("undertow_postprocess", remove_cutlass_symbol=True, keep_mangled_name=False)


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
    accumulator = cute.make_tensor(
        sums.mdQ_accumulator[tile.batch, tile.head, Int64(tile.tile), None].iterator,
        cute.make_layout(DQ_ACCUMULATOR_SHAPE, stride=DQ_ACCUMULATOR_STRIDES),
    )
    first, vector = thread // LANES_PER_ROW, thread % LANES_PER_ROW
    loaded = cute.make_rmem_tensor((VECTOR, PASSES), Float32)
    for step in cutlass.range_constexpr(PASSES):
        row = first + step * ROWS_PER_PASS
        if is_worth_loading(row, tile, packing):
            cute.autovec_copy(cute.local_tile(accumulator[row, None], (VECTOR,), (vector,)), loaded[None, step])
    for step in cutlass.range_constexpr(PASSES):
        row = first + step * ROWS_PER_PASS
        if row < tile.kept:
            rdQ = cute.make_rmem_tensor((VECTOR,), results.mdQ.element_type)
            rdQ.store((loaded[None, step].load() * softmax_scale).to(results.mdQ.element_type))
            if cutlass.const_expr(packing is not None):
                clear_unused(rdQ, row, tile)
            target = results.mdQ[tile.batch, tile.first + row, tile.head, None]
            cute.autovec_copy(rdQ, cute.local_tile(target, (VECTOR,), (vector,)))
    if cutlass.const_expr(results.mdSink is not None):
        sum_parts(sums.mdSink_parts, results.mdSink, tile, thread)


def is_worth_loading(row: Int32, tile: QueryTile, packing: Packing | None) -> Boolean | bool:
    """Whether a row of the accumulator is loaded: of packed sequences one that exists, for many tiles may be empty.

    Padding rows exist in the accumulator, too. Where only the last tile has some, no test holds up a load.
    """
    return True if packing is None else row < tile.kept


@cute.jit
def clear_unused(rdQ: cute.Tensor, row: Int32, tile: QueryTile):
    """Write zeros to a row that no sequence uses: its accumulator holds zeros, or nothing that means anything."""
    if row >= tile.used:
        rdQ.fill(0.0)


@cute.jit
def sum_parts(mParts: cute.Tensor, mdSink: cute.Tensor, tile: QueryTile, thread: Int32):
    """Add up a head's dsink, in the CTA of its first tile.

    Always in the same order: the parts strided by thread, then the threads as a tree.
    """
    if (tile.batch == 0) & (tile.tile == 0):
        _sum_parts_of_head(mParts, mdSink, tile.head, thread)


@cute.jit
def _sum_parts_of_head(mParts: cute.Tensor, mdSink: cute.Tensor, head: Int32, thread: Int32):
    batches, _, parts = mParts.shape
    total = Float32(0.0)
    for batch in cutlass.range(batches, unroll=1):
        for part in cutlass.range(thread, parts, ROW_KERNEL_THREADS, unroll=1):
            total += mParts[batch, head, part]
    total = cute.arch.warp_reduction_sum(total)
    shared = cute.make_tensor(cute.arch.alloc_smem(Float32, WARPS), cute.make_layout(WARPS))
    if thread % 32 == 0:
        shared[thread // 32] = total
    cute.arch.sync_threads()
    if thread == 0:
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            total += shared[warp]
        mdSink[head] = total
