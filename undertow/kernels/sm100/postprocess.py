"""Postprocess: dQ leaves the fp32 accumulator, gets its softmax scale and its 16-bit type.

One CTA per (tile of 128 query rows, head, batch). The accumulator keeps 4 columns of all rows together, the result
keeps rows together. A warp takes 4 rows by 64 columns: its stores then cover whole 128-byte lines and its loads whole
32-byte sectors, so nothing is gained by a transposition through shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from undertow.kernels.sm100.arguments import dq_accumulator_argument, rows_argument
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_SHAPE, DQ_ACCUMULATOR_STRIDES, ROW_KERNEL_THREADS
from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M
from undertow.plan.schema import DType

VECTOR = 8  # 16-bit elements of one 16-byte store
LANES_PER_ROW = HEAD_DIM // VECTOR
ROWS_PER_PASS = ROW_KERNEL_THREADS // LANES_PER_ROW
PASSES = TILE_M // ROWS_PER_PASS


def build(dtype: DType) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`; `dtype` is that of dQ."""
    postprocess_kernel.set_name_prefix("undertow_postprocess", remove_cutlass_symbol=True, keep_mangled_name=False)
    return postprocess, (dq_accumulator_argument(), rows_argument(dtype), cutlass.Float32(1.0))


@cute.jit
def postprocess(mdQ_accumulator: cute.Tensor, mdQ: cute.Tensor, softmax_scale: cutlass.Float32):
    """Launch one CTA per accumulator tile."""
    batch, heads, tiles, _ = mdQ_accumulator.shape
    postprocess_kernel(mdQ_accumulator, mdQ, softmax_scale).launch(
        grid=(tiles, heads, batch), block=(ROW_KERNEL_THREADS, 1, 1)
    )


@cute.kernel
def postprocess_kernel(mdQ_accumulator: cute.Tensor, mdQ: cute.Tensor, softmax_scale: cutlass.Float32):
    """Write dQ = softmax_scale * accumulator for the rows of one tile that exist.

    Shapes: mdQ_accumulator (batch, heads, tiles, 8192) f32; mdQ (batch, seqlen_q, heads, 64)
    Error:  one rounding of f32 for the product, one of the 16-bit type.
    """
    thread, _, _ = cute.arch.thread_idx()
    tile, head, batch = cute.arch.block_idx()
    accumulator = cute.make_tensor(
        mdQ_accumulator[batch, head, cutlass.Int64(tile), None].iterator,
        cute.make_layout(DQ_ACCUMULATOR_SHAPE, stride=DQ_ACCUMULATOR_STRIDES),
    )
    first, vector = thread // LANES_PER_ROW, thread % LANES_PER_ROW
    sums = cute.make_rmem_tensor((VECTOR, PASSES), cutlass.Float32)
    for step in cutlass.range_constexpr(PASSES):  # padding rows exist in the accumulator, so no test holds up a load
        row_in_tile = first + step * ROWS_PER_PASS
        cute.autovec_copy(cute.local_tile(accumulator[row_in_tile, None], (VECTOR,), (vector,)), sums[None, step])
    for step in cutlass.range_constexpr(PASSES):
        row = tile * TILE_M + first + step * ROWS_PER_PASS
        if row < mdQ.shape[1]:
            rdQ = cute.make_rmem_tensor((VECTOR,), mdQ.element_type)
            rdQ.store((sums[None, step].load() * softmax_scale).to(mdQ.element_type))
            cute.autovec_copy(rdQ, cute.local_tile(mdQ[batch, row, head, None], (VECTOR,), (vector,)))
