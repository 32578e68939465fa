"""One host function for a whole backward pass on SM90, as it is compiled ahead of time: its launches on one stream.

As `sm100.entry`, but for the buffers between the kernels, and for a fourth kernel where groups are split.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from undertow.kernels.sm90 import combine, kernel, postprocess, preprocess
from undertow.kernels.sm90.call import Variant
from undertow.kernels.sm90.plan import ROW_TERMS, TILE_M, WARPGROUPS
from undertow.kernels.sm90.tensors import CLAIMS
from undertow.kernels.sm90.work import LaunchScalars, SplitScalars, any_scalars, parts_of
from undertow.kernels.sm100.arguments import ELEMENT_TYPES, VECTOR_BYTES
from undertow.kernels.sm100.entry import Reads, Writes, arguments, batched, buffer, query_side, query_tiles, tiles_of
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.kernels.sm100.preprocess import WARPS
from undertow.kernels.sm100.work import kv_tiles


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for a compilation with tvm-ffi; it takes torch's current stream."""
    kernel.set_name(variant.plan)
    preprocess.set_name()
    postprocess.set_name()
    combine.set_name()
    return backward_pass, (variant, *arguments(variant, any_scalars(variant.attention.split)))


@cute.jit
def backward_pass(
    variant: Constexpr,
    workspace: cute.Tensor,
    reads: Reads,
    writes: Writes,
    scalars: SplitScalars | LaunchScalars,
    stream: Any,
):
    """Launch the kernels. There must be a query row and a key."""
    packed, packings = variant.rows.packed, reads.packings
    mQ, mK, mV, mO, mdO = (batched(x, packed) for x in (reads.mQ, reads.mK, reads.mV, reads.mO, reads.mdO))
    mdQ, mdK, mdV = (batched(x, packed) for x in (writes.mdQ, writes.mdK, writes.mdV))
    batch, seqlen_q, heads, _ = mQ.shape
    extents, of_keys = (batch, heads, query_tiles(seqlen_q, packings)), None
    if cutlass.const_expr(variant.attention.split):
        _, seqlen_k, kv_heads, _ = mK.shape
        of_keys = (batch, kv_heads * parts_of(scalars), kv_tiles(variant.plan, seqlen_k, packings))
    terms, accumulator, claims, lse, turns, parts, partial = cut(variant, workspace, extents, of_keys)
    packing_q = query_side(packings)
    inputs = preprocess.RowInputs(mO, mdO, batched(reads.mLSE, packed), batched(reads.mdLSE, packed), reads.mSink)
    outputs = preprocess.RowOutputs(terms, accumulator, claims, lse, turns, parts)
    factor = lse_factor(variant, scalars.softmax_scale_log2)
    preprocess.preprocess_on(variant.dtype, (inputs, outputs), packing_q, factor, stream)
    buffers = kernel.Workspaces(terms, accumulator, claims, lse, turns, partial)
    tensors = (kernel.Inputs(mQ, mK, mV, mdO), buffers, kernel.Outputs(mdK, mdV))
    kernel.backward_on(variant.plan, tensors, scalars, packings, stream)
    if cutlass.const_expr(variant.attention.split):
        packing_k = None if packings is None else packings.k
        combine.combine_on((partial, tensors[2]), packing_k, parts_of(scalars), scalars.softmax_scale, stream)
    sums, results = postprocess.Sums(accumulator, parts, turns), postprocess.Results(mdQ, writes.mdSink)
    postprocess.postprocess_on(sums, results, packing_q, scalars.softmax_scale, stream)


def lse_factor(variant: Variant, softmax_scale_log2: Float32) -> Float32 | None:
    """What LSE * log2(e) is multiplied with to be taken off the scores; under a softcap they are taken as they are."""
    return None if variant.attention.softcap else Float32(-1.0) / softmax_scale_log2


@cute.jit
def cut(variant: Constexpr, workspace: cute.Tensor, extents: tuple[Int32, Int32, Int32], of_keys: Any):
    """The buffers, one behind the other, the largest first: all begin at 16 bytes.

    Row terms: (batch, heads, tiles, 2048) of 16 bits; accumulator: (batch, heads, tiles, 8192); claims: (1) i32; LSE:
    (batch, heads, tiles, 128), under a softcap; turns: (batch, heads, 2 tiles) i32; parts of dsink: (batch, heads,
    8 tiles); partial sums: (*of_keys, 16384), where groups are split.
    """
    batch, heads, tiles = extents
    count = Int64(batch) * heads * tiles
    size = TILE_M * ROW_TERMS
    accumulator = tiles_of(workspace.iterator, Float32, (*extents, DQ_ACCUMULATOR_TILE))
    start = workspace.iterator + count * DQ_ACCUMULATOR_TILE
    partial = None
    if cutlass.const_expr(variant.attention.split):
        partial = tiles_of(start, Float32, (*of_keys, 2 * DQ_ACCUMULATOR_TILE))
        start = start + Int64(batch) * of_keys[1] * of_keys[2] * (2 * DQ_ACCUMULATOR_TILE)
    terms = tiles_of(start, ELEMENT_TYPES[variant.dtype], (*extents, size))
    start = start + count * (size // 2)
    lse = None
    if cutlass.const_expr(variant.attention.softcap):
        lse = tiles_of(start, Float32, (*extents, TILE_M))
        start = start + count * TILE_M
    claims = cute.make_tensor(cute.recast_ptr(start, dtype=Int32), cute.make_layout(1))
    start = start + CLAIMS
    parts, turns = None, None
    if cutlass.const_expr(variant.rows.sink):
        parts = buffer(start, Float32, (batch, heads, tiles * WARPS), 4)
        start = start + count * WARPS
    if cutlass.const_expr(variant.rows.deterministic):
        turns = buffer(start, Int32, (batch, heads, tiles * WARPGROUPS), 4)
    return terms, accumulator, claims, lse, turns, parts, partial


assert VECTOR_BYTES == 16  # what the sizes above are multiples of
