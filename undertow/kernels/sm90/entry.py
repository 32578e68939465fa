"""One host function for a whole backward pass, as it is compiled ahead of time: three launches on one stream.

As `sm100.entry`, whose arguments these are; only what lies between the kernels differs.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from undertow.kernels.sm90 import kernel, postprocess, preprocess
from undertow.kernels.sm90.call import Variant
from undertow.kernels.sm90.plan import WARPGROUPS
from undertow.kernels.sm90.tensors import ROW_TERMS_TILE
from undertow.kernels.sm100.arguments import ELEMENT_TYPES
from undertow.kernels.sm100.entry import (
    Reads,
    Writes,
    batched,
    query_side,
    query_tiles,
    reads_and_writes,
    scalar_buffer,
    tile_buffer,
    workspace_argument,
)
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.kernels.sm100.preprocess import WARPS
from undertow.kernels.sm100.work import Scalars, any_scalars


@dataclass(frozen=True)
class Numbers:
    """The run-time numbers of a call. lse_factor: -1 / (softmax_scale * log2(e))."""

    scalars: Scalars
    lse_factor: Float32


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for a compilation with tvm-ffi; it takes torch's current stream."""
    kernel.set_name(variant.plan)
    preprocess.set_name()
    postprocess.set_name()
    reads, writes = reads_and_writes(variant.dtype, variant.rows)
    numbers, stream = Numbers(any_scalars(), Float32(1.0)), make_fake_stream(use_tvm_ffi_env_stream=True)
    return backward_pass, (variant, workspace_argument(), reads, writes, numbers, stream)


@cute.jit
def backward_pass(
    variant: Constexpr,
    workspace: cute.Tensor,
    reads: Reads,
    writes: Writes,
    numbers: Numbers,
    stream: Any,
):
    """Launch the three kernels. There must be a query row and a key."""
    packed, packings, scalars = variant.rows.packed, reads.packings, numbers.scalars
    mQ, mK, mV, mO, mdO = (batched(x, packed) for x in (reads.mQ, reads.mK, reads.mV, reads.mO, reads.mdO))
    mdQ, mdK, mdV = (batched(x, packed) for x in (writes.mdQ, writes.mdK, writes.mdV))
    batch, seqlen_q, heads, _ = mQ.shape
    buffers = cut(variant, workspace, (batch, heads, query_tiles(seqlen_q, packings)))
    packing_q = query_side(packings)
    inputs = preprocess.RowInputs(mO, mdO, batched(reads.mLSE, packed), batched(reads.mdLSE, packed), reads.mSink)
    rows = (inputs, preprocess.RowOutputs(*buffers))
    preprocess.preprocess_on(variant.dtype, rows, packing_q, numbers.lse_factor, stream)
    tensors = (kernel.Inputs(mQ, mK, mV, mdO), kernel.Workspaces(*buffers[:3]), kernel.Outputs(mdK, mdV))
    kernel.backward_on(variant.plan, tensors, scalars, packings, stream)
    sums, results = postprocess.Sums(buffers[1], buffers[3]), postprocess.Results(mdQ, writes.mdSink)
    postprocess.postprocess_on(sums, results, packing_q, scalars.softmax_scale, stream)


@cute.jit
def cut(variant: Constexpr, workspace: cute.Tensor, extents: tuple[Int32, Int32, Int32]):
    """The buffers of `tensors.Workspaces`, one behind the other, the largest first: all begin at 16 bytes."""
    batch, heads, tiles = extents
    count = Int64(batch) * heads * tiles
    start = workspace.iterator
    accumulator = tile_buffer(start, Float32, extents, DQ_ACCUMULATOR_TILE)
    start = start + count * DQ_ACCUMULATOR_TILE
    terms = tile_buffer(start, ELEMENT_TYPES[variant.dtype], extents, ROW_TERMS_TILE)
    start = start + count * (ROW_TERMS_TILE // 2)
    parts, turns = None, None
    if cutlass.const_expr(variant.rows.sink):
        parts = scalar_buffer(start, Float32, (batch, heads, tiles * WARPS), 4)
        start = start + count * WARPS
    if cutlass.const_expr(variant.rows.deterministic):
        turns = scalar_buffer(start, Int32, (batch, heads, tiles * WARPGROUPS), 4)
    return terms, accumulator, turns, parts
