"""One host function for a whole backward pass, as it is compiled ahead of time: three launches on one stream.

It takes tensors as their owner has them, with or without a batch dimension and with any strides of extents of 1, and
hands the kernels what `launch.py` describes. Buffers between the kernels are cut from a single workspace, so that a
call allocates once.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from undertow.kernels.sm100 import kernel, postprocess, preprocess
from undertow.kernels.sm100.arguments import ELEMENT_TYPES, VECTOR_BYTES, packing_argument
from undertow.kernels.sm100.call import Variant
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M
from undertow.kernels.sm100.preprocess import WARPS
from undertow.kernels.sm100.sequences import Packing
from undertow.kernels.sm100.work import Packings, Scalars, any_scalars
from undertow.plan.schema import DType

VECTOR = 8  # 16-bit elements of one 16-byte access


@dataclass(frozen=True)
class Reads:
    """mQ, mO, mdO: ([batch,] seqlen_q, heads, 64). mK, mV: ([batch,] seqlen_k, kv_heads, 64); no batch if packed.

    mLSE, mdLSE: ([batch,] heads, seqlen_q) f32. mSink: (heads) f32.
    """

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor
    mdLSE: Any = None
    mSink: Any = None
    packings: Packings | None = None


@dataclass(frozen=True)
class Writes:
    """mdQ: like mQ. mdK, mdV: like mK. mdSink: (heads) f32."""

    mdQ: cute.Tensor
    mdK: cute.Tensor
    mdV: cute.Tensor
    mdSink: Any = None


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for a compilation with tvm-ffi; it takes torch's current stream.

    Tensors that must agree in an extent share its symbol, so that the compiled function refuses those that do not.
    """
    kernel.set_name(variant.plan)
    preprocess.set_name()
    postprocess.set_name()
    return backward_pass, (variant, *arguments(variant, any_scalars()))


def arguments(variant: Any, scalars: Scalars) -> tuple[Any, ...]:
    """The arguments of `backward_pass` as the compiler sees them. variant: its `dtype` and `rows` count."""
    dtype, rows = variant.dtype, variant.rows
    batch = () if rows.packed else (cute.sym_int32(),)
    seqlen_q, seqlen_k, heads, kv_heads = (cute.sym_int32() for _ in range(4))
    query, key = (*batch, seqlen_q, heads), (*batch, seqlen_k, kv_heads)
    of_rows = (*batch, heads, seqlen_q)
    reads = Reads(
        *(rows_of(dtype, extents) for extents in (query, key, key, query, query)),
        mLSE=scalars_of(of_rows),
        mdLSE=scalars_of(of_rows) if rows.dlse else None,
        mSink=scalars_of((heads,)) if rows.sink else None,
        packings=Packings(packing_argument(), packing_argument()) if rows.packed else None,
    )
    gradients = (rows_of(dtype, extents) for extents in (query, key, key))
    writes = Writes(*gradients, mdSink=scalars_of((heads,)) if rows.sink else None)
    workspace = make_fake_tensor(Float32, (cute.sym_int64(),), stride=(1,), assumed_align=VECTOR_BYTES)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return workspace, reads, writes, scalars, stream


def rows_of(dtype: DType, extents: tuple[Any, ...]) -> Any:
    """Return an argument of `extents` and 64 columns, of any strides, whose last dimension is contiguous."""
    strides = [cute.sym_int64(divisibility=VECTOR_BYTES // dtype.bytes) for _ in extents]
    shape = (*extents, HEAD_DIM)
    return make_fake_tensor(ELEMENT_TYPES[dtype], shape, stride=(*strides, 1), assumed_align=VECTOR_BYTES)


def scalars_of(extents: tuple[Any, ...]) -> Any:
    """Return an fp32 argument of any strides but in its last dimension."""
    strides = (*(cute.sym_int64() for _ in extents[:-1]), 1)
    return make_fake_tensor(Float32, extents, stride=strides, assumed_align=4)


@cute.jit
def backward_pass(
    variant: Constexpr,
    workspace: cute.Tensor,
    reads: Reads,
    writes: Writes,
    scalars: Scalars,
    stream: Any,
):
    """Launch the three kernels. There must be a query row and a key."""
    packed, packings = variant.rows.packed, reads.packings
    mQ, mK, mV, mO, mdO = (batched(x, packed) for x in (reads.mQ, reads.mK, reads.mV, reads.mO, reads.mdO))
    mdQ, mdK, mdV = (batched(x, packed) for x in (writes.mdQ, writes.mdK, writes.mdV))
    batch, seqlen_q, heads, _ = mQ.shape
    buffers = cut(variant.rows, workspace, (batch, heads, query_tiles(seqlen_q, packings)))
    packing_q = query_side(packings)
    inputs = preprocess.RowInputs(mO, mdO, batched(reads.mLSE, packed), batched(reads.mdLSE, packed), reads.mSink)
    preprocess.preprocess_on(inputs, preprocess.RowOutputs(*buffers), packing_q, stream)
    tensors = (kernel.Inputs(mQ, mK, mV, mdO), kernel.Workspaces(*buffers[:4]), kernel.Outputs(mdK, mdV))
    kernel.backward_on(variant.plan, tensors, scalars, packings, stream)
    sums, results = postprocess.Sums(buffers[2], buffers[4]), postprocess.Results(mdQ, writes.mdSink)
    postprocess.postprocess_on(sums, results, packing_q, scalars.softmax_scale, stream)


@cute.jit
def batched(tensor: Any, packed: Constexpr):
    """The same with a batch dimension of 1 if it has none, and as stride of an extent of 1 what `launch.py` says.

    Such a stride moves nothing, may be any number, and must be a multiple of 16 bytes in a TMA tensor map.
    """
    if cutlass.const_expr(tensor is None):
        return None
    shape, strides = list(tensor.shape), list(tensor.stride)
    if cutlass.const_expr(packed):
        shape, strides = [Int32(1), *shape], [Int64(0), *strides]
    is_rows = len(shape) == 4
    for dim in cutlass.range_constexpr(len(shape) - 2, -1, -1):
        alone = Int64(shape[dim + 1]) * Int64(strides[dim + 1])
        stride = Int64(cutlass.select_(shape[dim] == 1, alone, Int64(strides[dim])))
        strides[dim] = cute.assume(stride, divby=VECTOR) if cutlass.const_expr(is_rows) else stride
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(strides)))


def query_side(packings: Packings | None) -> Packing | None:
    """The packing of query rows, if there is one."""
    return None if packings is None else packings.q


def query_tiles(rows: Int32, packings: Packings | None) -> Int32:
    """Tiles of query rows of a batch element in the workspaces, as `tensors.query_tiles` has it."""
    if packings is None:
        return cute.ceil_div(rows, TILE_M)
    return rows // TILE_M + packings.q.mCu_seqlens.shape[0]


@cute.jit
def cut(rows: Constexpr, workspace: cute.Tensor, extents: tuple[Int32, Int32, Int32]):
    """The buffers of `tensors.Workspaces`, one behind the other, the largest first: all begin at 16 bytes."""
    batch, heads, tiles = extents
    count = Int64(batch) * heads * tiles
    accumulator, per_row = count * DQ_ACCUMULATOR_TILE, count * TILE_M
    row_extents = (batch, heads, tiles * TILE_M)
    start = workspace.iterator
    lse_log2 = buffer(start + accumulator, Float32, row_extents, VECTOR_BYTES)
    d = buffer(start + accumulator + per_row, Float32, row_extents, VECTOR_BYTES)
    parts, turns = None, None
    start = start + accumulator + 2 * per_row
    if cutlass.const_expr(rows.sink):
        parts = buffer(start, Float32, (batch, heads, tiles * WARPS), 4)
        start = start + count * WARPS
    if cutlass.const_expr(rows.deterministic):
        turns = buffer(start, Int32, extents, 4)
    return lse_log2, d, tiles_of(workspace.iterator, Float32, (*extents, DQ_ACCUMULATOR_TILE)), turns, parts


@cute.jit
def buffer(start: Any, dtype: Constexpr, extents: Any, align: Constexpr):
    """A contiguous buffer; its strides are multiples of `align` bytes."""
    pointer = cute.make_ptr(dtype, start.toint(), cute.AddressSpace.gmem, assumed_align=align)
    _, heads, last = extents
    strides = [Int64(heads) * last, Int64(last)]
    if cutlass.const_expr(align > 4):
        strides = [cute.assume(stride, divby=align // 4) for stride in strides]
    return cute.make_tensor(pointer, cute.make_layout(extents, stride=(*strides, 1)))


@cute.jit
def tiles_of(start: Any, dtype: Constexpr, shape: tuple):
    """Contiguous tiles: (batch, heads, tiles, elements of a tile), which are multiples of 16 bytes."""
    pointer = cute.make_ptr(dtype, start.toint(), cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
    _, heads, tiles, size = shape
    of_head = Int64(tiles) * size
    strides = [cute.assume(stride, divby=VECTOR_BYTES * 8 // dtype.width) for stride in (heads * of_head, of_head)]
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=(*strides, size, 1)))
