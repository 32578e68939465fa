"""Combine: dK and dV of the parts of a group are added up, in fp32 and always in the same order, and get 16-bit types.

Runs where the main kernel has left the sums of every part (`parts.parts_of` says when). One CTA for each tile of 128
keys, key/value head and batch, and for dV and dK each; it reads as `postprocess` does, whose order of a tile this is.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from undertow.kernels.sm90.arguments import partial_argument
from undertow.kernels.sm90.plan import TILE_N, dq_accumulator_index
from undertow.kernels.sm90.postprocess import APART, PAIRS_PER_PASS, PASSES, row_of, write_row
from undertow.kernels.sm100.arguments import packing_argument, rows_argument
from undertow.kernels.sm100.kernel import Outputs
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.postprocess import LANES_PER_ROW, VECTOR
from undertow.kernels.sm100.sequences import Packing, QueryTile, query_tile
from undertow.plan.schema import DType


def build(dtype: DType, packed: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`; `dtype` is that of dK and dV."""
    set_name()
    outputs = Outputs(rows_argument(dtype), rows_argument(dtype))
    return combine, (partial_argument(), outputs, packing_argument() if packed else None, Int32(1), Float32(1.0))


def set_name() -> None:
    """Name the entry of the kernel that is compiled next."""
    combine_kernel.set_name_prefix("undertow_combine_sm90", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def combine(mPartial: cute.Tensor, outputs: Outputs, packing: Packing | None, parts: Int32, softmax_scale: Float32):
    """Launch two CTAs per tile of keys, on the default stream."""
    combine_on((mPartial, outputs), packing, parts, softmax_scale, ())


def combine_on(tensors: Any, packing: Packing | None, parts: Int32, softmax_scale: Float32, stream: Any) -> None:
    """The same on a stream."""
    mPartial, outputs = tensors
    batches, _, kv_heads, _ = outputs.mdK.shape
    combine_kernel(mPartial, outputs, packing, parts, softmax_scale).launch(
        grid=(mPartial.shape[2] * kv_heads * batches, 2, 1), block=(ROW_KERNEL_THREADS, 1, 1), stream=stream
    )


@cute.kernel
def combine_kernel(
    mPartial: cute.Tensor, outputs: Outputs, packing: Packing | None, parts: Int32, softmax_scale: Float32
):
    """Write the sums of all parts for the rows of one tile that exist, zeros for those that are not used.

    mPartial: (batch, kv_heads * parts, tiles, 16384) f32, of a tile dV, then dK; that of dK is scaled.
    Error:  parts - 1 roundings of f32 and one for the product, one of the 16-bit type.
    """
    thread, _, _ = cute.arch.thread_idx()
    _, place, _ = cute.arch.block_idx()
    batches, seqlen_k, kv_heads, _ = outputs.mdK.shape
    whole = cute.make_tensor(mPartial.iterator, cute.make_layout((batches, kv_heads, mPartial.shape[2])))
    tile = query_tile(whole, seqlen_k, packing, TILE_N)  # of keys here; `whole` tells its extents
    sums = cute.make_rmem_tensor((2 * VECTOR, PASSES), Float32)
    sums.fill(0.0)
    for part in cutlass.range(parts, unroll=1):
        of_part = mPartial[tile.batch, tile.head * parts + part, Int64(tile.tile), None]
        sums.store(sums.load() + _loaded(of_part, place, thread).load())
    if place == 0:
        _write(outputs.mdV, (tile, thread), sums, (Float32(1.0), packing))
    else:
        _write(outputs.mdK, (tile, thread), sums, (softmax_scale, packing))


def _loaded(partial: cute.Tensor, place: Int32, thread: Int32) -> cute.Tensor:
    """What a thread adds of a part: 8 columns of two rows, in every pass. place: 0 is dV, 1 is dK."""
    loaded = cute.make_rmem_tensor((2 * VECTOR, PASSES), Float32)
    for step in range(PASSES):
        pair = row_of(thread // LANES_PER_ROW + step * PAIRS_PER_PASS)
        first = place * DQ_ACCUMULATOR_TILE + dq_accumulator_index(pair, thread % LANES_PER_ROW * VECTOR)
        cute.autovec_copy(cute.local_tile(partial, (2 * VECTOR,), (first // (2 * VECTOR),)), loaded[None, step])
    return loaded


def _write(target: cute.Tensor, at: tuple[QueryTile, Int32], sums: cute.Tensor, how: tuple) -> None:
    """Write what a thread has added up. how: scale and packing."""
    tile, thread = at
    for step in range(PASSES):
        for half in range(2):
            row = row_of(thread // LANES_PER_ROW + step * PAIRS_PER_PASS) + half * APART
            write_row(target, (tile, row, thread % LANES_PER_ROW), (sums, step, half), how)
